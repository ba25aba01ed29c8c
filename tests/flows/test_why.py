"""`headrace why` reads a run from the bucket, whoever started it, and shows text as it is."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from flows.cli.app import app
from flows.cli.why import show
from flows.loading import load_spec
from flows.opening import open_ledger
from storage import embedded
from storage.errors import HeadraceError
from storage.ledger import Ledger
from storage.records import Refusal, RunRecord, Stage
from tasks.why import Line, Tone
from tests.flows.attempts import attempt, dead_node

pytestmark = pytest.mark.s3

REASON = "train needs 2 nodes and 1 of 3 are left (n3: hardware in train attempt 1)"


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("why")
    path = folder / "r.yaml"
    fields = {
        "run": "r",
        "workdir": str(folder / "work"),
        "data": {"inputs": [f"{folder}/*.txt"]},
        "store": {"embedded": {"directory": str(folder / "store")}},
    }
    path.write_text(yaml.safe_dump(fields))
    loaded = load_spec(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_HOME", str(folder / "home"))
        with open_ledger(loaded) as (_, ledger):
            fill(ledger)
        yield path
    server = embedded.store_of(loaded.store, workdir=loaded.workdir)
    assert server is not None
    server.stop()


def fill(ledger: Ledger) -> None:
    """A run whose only attempt lost its node, and found no other."""
    now = datetime(2026, 1, 2, 3, 5, tzinfo=UTC)
    ledger.claim_run(
        RunRecord(
            run="r",
            spec={},
            code="c",
            git_commit=None,
            git_dirty=None,
            store_probe={},
            nonce="0",
            at=now,
        )
    )
    lost = attempt(1, end=dead_node())
    intent = replace(lost.intent, token="r-train-0001")
    ledger.claim_intent(intent)
    assert lost.start is not None
    assert lost.end is not None
    ledger.claim_start(intent, lost.start)
    ledger.claim_end(intent, lost.end)
    refusal = Refusal(stage=Stage.TRAIN, unit="train", reason=REASON, after=1, by="e", at=now)
    ledger.put_refusal(refusal)


def ask(*words: str) -> str:
    answer = CliRunner().invoke(app, ["why", *words], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_the_last_word_comes_first_and_fits_a_terminal(spec: Path) -> None:
    told = ask("r", "--spec", str(spec))
    assert told.startswith("Run r: train gave up.\n")
    assert "nothing: train needs 2 nodes" in told
    assert "culprit   n3" in told
    paths = [line for line in told.splitlines() if line.strip().startswith("logs ")]
    assert all(len(line) <= 80 for line in told.splitlines() if line not in paths)


def test_an_attempt_or_a_run_that_is_not_there_is_said(spec: Path) -> None:
    assert "hardware: NODE_FAIL" in ask("r", "--spec", str(spec), "--attempt", "1")
    with pytest.raises(HeadraceError, match="its attempts are 1 to 1"):
        ask("r", "--spec", str(spec), "--attempt", "2")
    with pytest.raises(HeadraceError, match="no attempt of it was made"):
        ask("r", "--spec", str(spec), "--attempt", "2", "--stage", "smoke")
    with pytest.raises(HeadraceError, match="has no record"):
        ask("another", "--spec", str(spec))


def test_what_a_log_says_is_shown_as_it_is() -> None:
    text = "srun: [red]not[/red] markup [bold]"
    page = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    show([Line(text=text, tone=Tone.BAD)], page)
    assert isinstance(page.file, io.StringIO)
    assert text in page.file.getvalue()
    assert page.file.getvalue().startswith("\x1b[31m")
