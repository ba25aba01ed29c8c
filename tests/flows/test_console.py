"""A terminal shows stage by stage what happens, and a log file gets plain lines."""

from __future__ import annotations

import io

from rich.console import Console

from flows.console import ConsoleEyes
from storage.records import Action, Kind, Stage
from tests.flows.attempts import attempt, dead_node, end, record
from tests.flows.waiting import wait_for


def shown(*, terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120)
    with ConsoleEyes(console, total_steps={Stage.TRAIN: 10}) as eyes:
        eyes.say("a [bold] word")
        eyes.stage_skipped(record(Stage.SHARD, tokens=12, documents=3))
        eyes.stage_started(Stage.TRAIN, ["train"])
        eyes.attempt_opened(attempt(1))
        eyes.attempt_opened(attempt(1))
        eyes.attempt_state(attempt(1), state="pending", detail="(Resources)")
        eyes.attempt_state(attempt(1), state="running", detail="n1 n2")
        eyes.attempt_progress(attempt(1), step=4, numbers={"loss": 2.5})
        eyes.attempt_log(attempt(1), ["a line"])
        if terminal:
            wait_for("the bar to be drawn", lambda: "step 4 of 10" in stream.getvalue())
        eyes.attempt_closed(attempt(1, end=dead_node()))
        eyes.attempt_closed(attempt(2, end=end(Kind.OPERATOR, Action.STOP, reason="asked")))
        eyes.attempt_closed(attempt(3, end=end()))
        eyes.stage_finished(record(Stage.TRAIN, final_step=10, train_loss=2.0))
        assert eyes.cancel_requested() is False
    return stream.getvalue()


def test_a_log_file_gets_a_line_for_whatever_happened() -> None:
    lines = [line.strip() for line in shown(terminal=False).splitlines()]
    assert lines[:-1] == [
        "a [bold] word",
        "✓ shard finished 2026-01-02 03:04 UTC: 12 tokens of 3 documents",
        "▶ train",
        "train · attempt 1: pending (Resources)",
        "train · attempt 1: running n1 n2",
        "train · attempt 1: step 4 of 10 · loss 2.5",
        "● train · attempt 1: hardware on n3: NODE_FAIL → retry elsewhere (node n3 is excluded)",
        "● train · attempt 2 · again: operator → stop (asked)",
        "● train · attempt 3 · again: done",
    ]
    assert lines[-1].endswith("step 10, loss 2")


def test_a_terminal_shows_how_far_an_attempt_is() -> None:
    text = shown(terminal=True)
    assert "step 4 of 10 · loss 2.5" in text
    assert "a [bold] word" in text
