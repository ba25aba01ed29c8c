"""A person ends what runs: from anywhere, at the terminal, or not at all."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flows.alone import run_alone
from flows.cancelling import Wish, cancel, find_open, open_existing
from flows.console import Lines
from flows.janitor import tidy
from flows.spec import PipelineSpec
from headrace import command
from slurm.cluster import open_cluster
from storage.attempts import Attempt
from storage.records import Action, Decision, Diagnosis, End, Kind, Stage, new_nonce
from tasks.cancelling import ask_for_the_end
from tasks.failures import RunCancelled
from tests.flows.own_runs import Place, a_place
from tests.flows.waiting import wait_for

pytestmark = pytest.mark.s3

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with a_place(tmp_path_factory.mktemp("cancels")) as place:
        yield place


class Engine:
    """A live engine of a run, in a thread."""

    def __init__(self, spec: PipelineSpec) -> None:
        self.error: Exception | None = None
        self._spec = spec
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def _live(self) -> None:
        try:
            run_alone(self._spec, eyes=Lines())
        except Exception as error:
            self.error = error


def cancelled(spec: PipelineSpec, why: str) -> tuple[Attempt, ...]:
    """What is left of the run after it was cancelled."""
    with open_existing(spec, eyes=Wish(print)) as context:
        ask_for_the_end(context.ledger, why=why)
        return cancel(context, find_open(context, spec.stages).ours, why=why, stages=spec.stages)


def inside(file: Path) -> subprocess.Popen[str]:
    """An engine that believes to be in an allocation, which needs no Prefect."""
    return subprocess.Popen(
        command("run", str(file), "--in-job"),
        env={**os.environ, "SLURM_JOB_ID": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_run_is_left_by_its_engine_then_cancelled_while_one_lives_and_while_none_does(
    place: Place,
) -> None:
    spec = place.spec("ended")
    engine = inside(place.file(spec))
    wait_for("training", lambda: place.has_begun("ended"), timeout_s=DEADLINE_S)
    engine.terminate()
    told, _ = engine.communicate(timeout=DEADLINE_S)
    assert engine.returncode == 75, told
    assert "A job that was submitted goes on" in told
    (attempt,) = place.attempts(spec)
    assert attempt.is_open
    assert open_cluster(spec.cluster, workdir=spec.workdir).queue()

    assert cancelled(spec, "enough of it") == ()
    (attempt,) = place.attempts(spec)
    assert attempt.cancel is not None
    assert "@" in attempt.cancel.who
    assert attempt.cancel.why == "enough of it"
    assert attempt.end is not None
    assert attempt.end.decision.action is Action.STOP
    assert not open_cluster(spec.cluster, workdir=spec.workdir).queue()

    (place.folder / "ended" / "begun").unlink()
    live = Engine(spec)
    wait_for("training again", lambda: place.has_begun("ended"), timeout_s=DEADLINE_S)
    assert cancelled(spec, "once more") == ()
    live.wait()
    assert isinstance(live.error, RunCancelled)
    assert len(place.attempts(spec)) == 2

    done = subprocess.run(
        command("cancel", "ended", "--yes"), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "no job to cancel" in done.stdout


def test_a_validation_that_is_cancelled_makes_no_node_unfit(place: Place) -> None:
    # The probe is not done before the cancel comes, however slow that is.
    spec = place.spec("probing", cluster={"setup": ["sleep 600"]})
    engine = Engine(spec)

    def probes() -> bool:
        return (spec.workdir / "probing" / "validate" / "0001" / "job.json").exists()

    wait_for("the probe", probes, timeout_s=DEADLINE_S)
    assert cancelled(spec, "not now") == ()
    engine.wait()
    assert isinstance(engine.error, RunCancelled)
    with place.ledger(spec) as ledger:
        assert ledger.stage_records(Stage.VALIDATE) == ()


def test_an_attempt_of_another_cluster_is_named_and_left(place: Place) -> None:
    spec = place.spec("elsewhere", "exit 81")
    engine = Engine(spec)
    engine.wait()
    (attempt,) = place.attempts(spec)
    with place.ledger(spec) as ledger:
        intent = replace(attempt.intent, attempt=2, cluster="far", nonce=new_nonce())
        ledger.claim_intent(intent)
    done = subprocess.run(
        command("cancel", "elsewhere", "--yes"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "left alone: train" in done.stdout
    assert "'far'" in done.stdout
    assert place.attempts(spec)[1].is_open


def test_the_janitor_ends_the_job_of_a_closed_attempt_and_no_other(place: Place) -> None:
    spec = place.spec("orphan")
    engine = inside(place.file(spec))
    wait_for("training", lambda: place.has_begun("orphan"), timeout_s=DEADLINE_S)
    engine.kill()
    engine.communicate()
    assert list(tidy([spec])) == []
    assert open_cluster(spec.cluster, workdir=spec.workdir).queue()
    (attempt,) = place.attempts(spec)
    with place.ledger(spec) as ledger:
        end = End(
            diagnosis=Diagnosis(kind=Kind.LOST, evidence=("nobody saw it",)),
            decision=Decision(action=Action.RESUME, reason="it was lost"),
            by="a test",
            nonce=new_nonce(),
            at=attempt.intent.created_at,
        )
        ledger.claim_end(attempt.intent, end)
    (line,) = tidy([spec])
    assert attempt.intent.token in line
    assert "closed: lost" in line
    assert not open_cluster(spec.cluster, workdir=spec.workdir).queue()
    assert list(tidy([spec])) == []


AT_A_TERMINAL = """
import time
from functools import partial
from flows.interrupts import Wishes, ask_at_terminal, attend
wishes = Wishes()

def work():
    print("at work", flush=True)
    while not (wishes.cancel_requested() or wishes.leave_requested()):
        time.sleep(0.05)
    return "cancelled" if wishes.cancel_requested() else "left"

tell = partial(print, flush=True)

def ask(until):
    answer = ask_at_terminal(until, show=partial(tell, end=""))
    tell("answered:", answer)
    return answer

print("it is", attend(work, wishes, say=tell, ask=ask, tidy=partial(tell, "tidied")))
"""
STUBBORN = AT_A_TERMINAL.replace("while not (", "while True or not (")


def at_a_terminal(code: str, replies: Sequence[tuple[str, bytes]]) -> tuple[int, str]:
    """Exit code and screen of `code` on a real terminal; each reply is typed after its prompt."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", code])
    screen, seen, left = "", 0, list(replies)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                screen += os.read(terminal, 4096).decode()
            except OSError:
                break
        if left and (at := screen.find(left[0][0], seen)) >= 0:
            seen = at + len(left[0][0])
            os.write(terminal, left.pop(0)[1])
    else:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), re.sub(r"\r", "", screen)


CTRL_C = b"\x03"


@pytest.mark.parametrize(("reply", "outcome"), [(b"l\n", "left"), (b"c\n", "cancelled")])
def test_an_interrupt_asks_and_goes_back_to_watching_when_told_so(
    reply: bytes, outcome: str
) -> None:
    code, screen = at_a_terminal(
        AT_A_TERMINAL,
        [
            ("at work", CTRL_C),
            ("watching?", b"what?\n"),
            ("watching?", b"b\n"),
            ("answered: Answer.BACK", CTRL_C),
            ("watching?", reply),
        ],
    )
    assert f"it is {outcome}" in screen
    assert code == 0


def test_a_second_interrupt_leaves_at_once() -> None:
    """While it asks, and while an answer takes its time."""
    for replies in (
        [("at work", CTRL_C), ("watching?", CTRL_C)],
        [("at work", CTRL_C), ("watching?", b"c\n"), ("answered: Answer.CANCEL", CTRL_C)],
    ):
        code, screen = at_a_terminal(STUBBORN, replies)
        assert code == 128 + signal.SIGINT, screen
        assert "goes on, and the same command adopts it" in screen
        assert "tidied" in screen
        assert "it is" not in screen.replace("at work", "")
