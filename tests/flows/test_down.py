"""`headrace down` ends the servers of a spec, and says of each whether there was one to end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from flows.cli.app import app
from flows.loading import load_spec
from flows.opening import open_ledger
from storage import embedded
from storage.embedded import EmbeddedStore
from storage.errors import StoreError
from storage.records import Exit, ExitCode
from tests.flows.attempts import NOW, attempt


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"run: a\nworkdir: {tmp_path}/work\ndata: {{inputs: [x]}}\n")
    return spec


@pytest.fixture
def store(spec: Path) -> Iterator[EmbeddedStore]:
    """The spec's server, running."""
    loaded = load_spec(spec)
    store = embedded.store_of(loaded.store, workdir=loaded.workdir)
    assert store is not None
    store.ensure()
    yield store
    store.stop()


def down(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["down", *map(str, arguments)])


@pytest.mark.s3
def test_what_was_running_is_told_apart_from_what_was_not(spec: Path, store: EmbeddedStore) -> None:
    told = down(spec)
    assert told.exit_code == 0, told.output
    assert "No Prefect server was running." in told.output
    assert f"The embedded store is down; its data stays in {store.directory}." in told.output
    assert not store.status().running
    assert f"No embedded store was running in {store.directory}" in down(spec).output


@pytest.mark.s3
def test_a_store_that_a_job_may_need_goes_on_unless_forced(
    spec: Path, store: EmbeddedStore
) -> None:
    """The job is another run's, whose engine was killed: its records alone say that it is there."""
    other = load_spec(spec).renamed("b")
    working = attempt(run="b")
    with open_ledger(other) as (_, ledger):
        ledger.claim_intent(working.intent)
        assert working.start is not None
        ledger.claim_start(working.intent, working.start)
    told = down(spec)
    assert told.exit_code == 1
    assert "b: train · attempt 1 (job 101) was not seen to end." in told.output
    assert "Prefect" not in told.output
    assert store.status().running
    assert down(spec, "--force").exit_code == 0
    assert not store.status().running

    with open_ledger(other) as (_, ledger):
        done = Exit(code=ExitCode.DONE, rank=0, node="n1", nonce="0", at=NOW)
        ledger.claim_exit(working.intent, done)
    assert down(spec).exit_code == 0


@pytest.mark.s3
def test_nothing_is_ended_while_a_run_uses_the_store(spec: Path, store: EmbeddedStore) -> None:
    with store.in_use():
        told = down(spec)
    assert (told.exit_code, told.output) == (
        1,
        "A run is using the embedded store; it goes on.\n",
    )
    assert store.status().running


@pytest.mark.s3
def test_a_store_that_does_not_answer_is_ended_by_force_alone(
    spec: Path, store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a job needs it stands in its records, which only it can read."""
    pid = store.status().pid
    assert pid is not None
    monkeypatch.setattr(embedded, "START_TIMEOUT_S", 1.0)
    monkeypatch.setattr(embedded, "READ_TIMEOUT_S", 1.0)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(StoreError, match="--force ends it all the same"):
        CliRunner().invoke(app, ["down", str(spec)], catch_exceptions=False)
    assert store.status().running
    assert down(spec, "--force").exit_code == 0
    assert not store.status().running
