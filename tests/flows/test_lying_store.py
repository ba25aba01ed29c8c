"""A whole run in a store that answers 200 to every condition and overwrites, killed in between."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.console import Lines
from flows.opening import open_run
from flows.ticking import Standing, tick
from headrace import command
from storage.claims import Claims
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.records import Stage
from storage.spec import StoreSpec
from tasks.eyes import Unseen
from tests.flows.own_runs import Place, a_place
from tests.storage.meddler import Meddler

pytestmark = pytest.mark.s3


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StoreSpec]:
    from moto.server import ThreadedMotoServer

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    meddler = Meddler(f"http://{host}:{port}")
    meddler.rule = lambda asked, forward: forward(asked.without("if-none-match", "if-match"))
    with meddler.serving():
        spec = StoreSpec(bucket="lying-store", endpoint_url=meddler.endpoint_url)
        ObjectStore(spec).ensure_bucket()
        yield spec
    server.stop()


class Notebook(Unseen):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)


def test_a_run_whose_engine_is_killed_in_between_runs_no_attempt_twice(
    lying: StoreSpec, tmp_path: Path
) -> None:
    with a_place(tmp_path) as place:
        line = "echo ran >> ran; echo step 1; until [ -e go ]; do sleep 0.05; done"
        spec = place.spec("lying", line, store=lying.model_dump(mode="json"))
        for delay_s in (1.0, 2.0, 3.0):
            engine = subprocess.Popen(command("tick", "lying", "--spec", str(place.file(spec))))
            time.sleep(delay_s)
            engine.send_signal(signal.SIGKILL)
            engine.wait()
        place.let_end("lying")
        deadline = time.monotonic() + 120
        while (now := tick(spec, eyes=Lines(), stay_s=0.0)).standing is Standing.GOING_ON:
            assert time.monotonic() < deadline, now
            time.sleep(0.2)
        assert now.standing is Standing.COMPLETE, now

        ledger = Ledger(ObjectStore(lying), RunKeys(prefix="", run="lying"))
        record = ledger.run_record()
        assert record is not None
        assert record.store_probe["conditional_writes"] is False
        assert record.store_probe["claims"] == str(spec.workdir / "claims")
        attempts = ledger.attempts(Stage.TRAIN)
        started = [one for one in attempts if one.start is not None and not one.start.is_void]
        assert (tmp_path / "lying" / "ran").read_text() == "ran\n" * len(started)
        require_claims_stand(place, spec.workdir / "claims", ledger)

        notebook = Notebook()
        with open_run(spec, eyes=notebook) as context:
            assert context.store.claims == spec.workdir / "claims"
        (warning,) = [said for said in notebook.said if said.startswith("warning: the store")]
        assert "has no conditional writes" in warning
        assert str(spec.workdir / "claims") in warning


def require_claims_stand(place: Place, folder: Path, ledger: Ledger) -> None:
    """What was claimed is what is stored."""
    claims, bucket = Claims(folder, bucket=ledger.store.bucket), folder / ledger.store.bucket
    keys = [
        str(path.relative_to(bucket)).removesuffix(".claim") for path in bucket.rglob("*.claim")
    ]
    assert ledger.keys.run_record in keys
    assert ledger.keys.intent(Stage.TRAIN, 1) in keys
    for key in keys:
        assert claims.holder(key) == ledger.store.get(key)
