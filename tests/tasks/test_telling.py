"""Eyes are told each thing once: why a job waits, that accounting is away, the log to its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from slurm.cluster import JobObservation, JobState
from slurm.job_logs import node_log
from storage.attempts import Attempt
from storage.checkpoint_records import CommitRef, Resume
from storage.records import Action, Decision, Diagnosis, End, Kind
from tasks.eyes import Unseen
from tasks.telling import Teller
from tests.slurm.attempts import NOW, an_attempt

WAITING = JobObservation(token="t", state=JobState.PENDING, job_id="7", raw_state="PENDING")
ENDED = JobObservation(token="t", state=JobState.ENDED, job_id="7", raw_state="FAILED")
ABSENT = JobObservation(token="t", state=JobState.ABSENT)


@dataclass
class Notebook(Unseen):
    said: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def attempt_state(self, attempt: Attempt, *, state: str, detail: str) -> None:
        self.details.append(detail)

    def attempt_log(self, attempt: Attempt, lines: Sequence[str]) -> None:
        self.lines.extend(lines)

    def say(self, message: str) -> None:
        self.said.append(message)


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


@pytest.fixture
def teller(notebook: Notebook, tmp_path: Path) -> Teller:
    return Teller(notebook, lambda attempt: tmp_path)


def test_a_reason_that_may_need_a_person_is_said_once(teller: Teller, notebook: Notebook) -> None:
    attempt = replace(an_attempt(), start=None)
    for nodes in ("n2", "n2", "n[2-3]"):
        waiting = replace(WAITING, reason=f"ReqNodeNotAvail, UnavailableNodes:{nodes}")
        teller.tell(attempt, waiting)
    (said,) = notebook.said
    assert said.startswith("attempt 1 waits: ReqNodeNotAvail: nodes that it needs are down")
    assert "`sinfo -R`" in said
    assert notebook.details[-1].endswith("(not available: n[2-3])")
    teller.tell(attempt, replace(WAITING, reason="JobHeldUser"))
    assert len(notebook.said) == 2


def test_an_attempt_with_fewer_nodes_than_it_takes_is_said_once(
    teller: Teller, notebook: Notebook
) -> None:
    attempt = an_attempt()
    assert attempt.start is not None
    took = len(attempt.nodes)
    for most, said in ((None, 0), (took, 0), (took + 1, 1), (took + 1, 1)):
        teller.tell(replace(attempt, intent=replace(attempt.intent, most_nodes=most)), ABSENT)
        assert len(notebook.said) == said
    assert f"up to {took + 1} nodes, and Slurm had {took} for it" in notebook.said[0]


def test_what_an_attempt_stepped_back_from_is_said_once(teller: Teller, notebook: Notebook) -> None:
    attempt = an_attempt()
    source = CommitRef(step=30, attempt=1, save="s")
    resume = Resume(source=source, world_size=2, nonce="0", at=NOW)
    for each in (resume, replace(resume, passed=("step 60: bad", "step 50: gone"))):
        for _ in range(2):
            teller.tell(replace(attempt, resume=each), ABSENT)
    told = "attempt 1 goes on from step 30, stepping back from"
    assert notebook.said == [f"{told} step 60: bad", f"{told} step 50: gone"]


def test_a_reason_that_passes_by_itself_is_only_shown(teller: Teller, notebook: Notebook) -> None:
    attempt = replace(an_attempt(), start=None)
    teller.tell(attempt, replace(WAITING, reason="Priority"))
    teller.tell(attempt, replace(WAITING, reason="SomethingNew"))
    assert notebook.said == []
    assert notebook.details == [
        "job 7 PENDING Priority: jobs of higher priority come first",
        "job 7 PENDING SomethingNew",
    ]


def test_accounting_that_is_away_is_said_once_and_that_it_is_back(
    teller: Teller, notebook: Notebook
) -> None:
    attempt = an_attempt()
    silent = replace(ENDED, accounting_silence="Connection refused")
    running = replace(ENDED, state=JobState.RUNNING)
    for seen in (running, silent, running, silent, replace(ABSENT, accounting_silence="refused")):
        teller.tell(attempt, seen)
    (said,) = notebook.said
    assert "accounting does not answer" in said
    assert "Connection refused" in said
    for seen in (running, ENDED, running, ENDED):
        teller.tell(attempt, seen)
    assert notebook.said[1:] == ["Slurm's accounting answers again"]


def test_the_log_is_told_to_its_very_end(
    teller: Teller, notebook: Notebook, tmp_path: Path
) -> None:
    attempt = an_attempt()
    assert attempt.start is not None
    log = node_log(tmp_path, attempt.start.nodes[0])
    log.write_text("0: step 1\n0: st")
    teller.tell(attempt, None)
    log.write_text("0: step 1\n0: step 2\n0: the end")
    end = End(
        diagnosis=Diagnosis(kind=Kind.DONE),
        decision=Decision(action=Action.DONE, reason="done"),
        by="e",
        nonce="e",
        at=NOW,
    )
    teller.tell_end(replace(attempt, end=end))
    assert notebook.lines[1:] == ["step 1", "step 2", "the end"]
