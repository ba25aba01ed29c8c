"""`why` tells a run's attempts as they were: golden texts, 80 columns wide."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from slurm.cluster import JobObservation, JobState
from storage.attempts import Attempt, Element
from storage.checkpoint_records import CommitRef, Resume
from storage.records import (
    Action,
    Cancel,
    Decision,
    Diagnosis,
    End,
    Exit,
    ExitCode,
    Heartbeat,
    Intent,
    JobIdentity,
    Kind,
    Refusal,
    Stage,
    StageRecord,
    Start,
    Submitted,
    Why,
)
from tasks.why import EVIDENCE_LINES, Line, Story, explain

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
NODES = ("n1", "n2", "n3", "n4")


def at(minutes: float) -> datetime:
    return NOON + timedelta(minutes=minutes)


def made(
    number: int,
    *,
    minute: float,
    stage: Stage = Stage.TRAIN,
    floor: int | None = None,
    **records: Any,
) -> Attempt:
    """An attempt whose job started half a minute after it was made."""
    values: dict[str, Any] = {
        "unit": stage.value,
        "after": number - 1 or None,
        **{name: records.pop(name) for name in ("unit", "excluded") if name in records},
    }
    intent = Intent(
        run="gpt",
        stage=stage,
        attempt=number,
        token=f"gpt-{stage}-{number:04d}",
        nonce="0",
        cluster="site",
        user="ann",
        why=Why.FIRST if number == 1 else Why.RESUMED,
        nodes=4,
        ranks_per_node=1,
        fingerprint="f",
        floor=None if floor is None else CommitRef(step=floor, attempt=number - 1, save="s"),
        created_at=at(minute),
        **values,
    )
    job = JobIdentity(job_id=str(4710 + number), token=intent.token, host="n1")
    start = Start(job=job, nodes=NODES, nonce="0", at=at(minute + 0.5))
    return replace(Attempt(intent=intent, start=start), **records)


def closed(
    kind: Kind, action: Action, reason: str, *evidence: str, minute: float, **more: Any
) -> End:
    return End(
        diagnosis=Diagnosis(kind=kind, culprit_nodes=more.pop("culprits", ()), evidence=evidence),
        decision=Decision(action=action, reason=reason, **more),
        by="ann@login",
        nonce="0",
        at=at(minute),
    )


def left(code: int, *, minute: float) -> Exit:
    return Exit(code=code, rank=2, node="n3", nonce="0", at=at(minute))


def resumed(step: int | None, attempt: int = 1) -> Resume:
    source = None if step is None else CommitRef(step=step, attempt=attempt, save="s")
    return Resume(source=source, world_size=4, nonce="0", at=NOON)


def beats(step: int, *, minute: float) -> tuple[Heartbeat, ...]:
    return tuple(Heartbeat(node=node, sequence=9, step=step, at=at(minute)) for node in NODES)


def record(stage: Stage, *, minute: float, **outputs: Any) -> StageRecord:
    return StageRecord(
        stage=stage,
        fingerprint="f",
        generation=0,
        outputs=outputs,
        attempts=(1,),
        nonce="0",
        at=at(minute),
    )


def story(*attempts: Attempt, **more: Any) -> Story:
    by_stage = {
        stage: tuple(one for one in attempts if one.intent.stage is stage) for stage in Stage
    }
    return Story(run="gpt", record=None, folder=Path("/shared/gpt"), attempts=by_stage, **more)


def told(of: Story, *, minute: float = 60, **asked: Any) -> str:
    lines = explain(of, now=at(minute), zone=UTC, **asked)
    return "\n".join(row for line in lines for row in line.wrapped(80)) + "\n"


DONE = closed(Kind.DONE, Action.DONE, "the work is done", minute=0.9)
CUT = made(
    1,
    minute=2,
    resume=resumed(None),
    heartbeats=beats(480, minute=16),
    exit=left(ExitCode.PEER_LOST, minute=16.2),
    end=closed(
        Kind.HARDWARE,
        Action.RETRY_ELSEWHERE,
        "without n3",
        "rank 2 on n2: peer n3 fell silent",
        "node n3: down* Not responding",
        "job 4711 was RUNNING",
        "exit record: code 88 (PEER_LOST) by rank 2 on n2",
        "last step told: 480",
        "srun.log: srun: error: n3: [bold]no answer[/bold]",
        "rank 2 on n2: headrace: peer n3 fell silent",
        "rank 2 on n2: headrace: leaving with 88",
        culprits=("n3",),
        exclude_nodes=("n3",),
        minute=16.3,
    ),
)
SECOND = made(
    2,
    minute=16.4,
    floor=400,
    excluded=("n3",),
    resume=resumed(400),
    heartbeats=beats(410, minute=20),
    end=closed(
        Kind.HARDWARE,
        Action.RETRY_ELSEWHERE,
        "without n2",
        "the job ended NODE_FAIL",
        culprits=("n2",),
        exclude_nodes=("n2",),
        delay_s=7.5,
        minute=21,
    ),
)
REFUSED = Refusal(
    stage=Stage.TRAIN,
    unit="train",
    reason="train needs 4 nodes and 3 of 5 are left (n2: hardware in train attempt 2; n3: hardware "
    "in train attempt 1); repair the excluded nodes and validate them again (--force validate), or "
    "lower cluster.nodes to 3",
    after=2,
    by="ann@login",
    at=at(21.2),
)

GAVE_UP = """\
Run gpt: train gave up.
  why       train needs 4 nodes and 3 of 5 are left (n2: hardware in train
            attempt 2; n3: hardware in train attempt 1); repair the excluded
            nodes and validate them again (--force validate), or lower
            cluster.nodes to 3
  to do     mend it, then give the same command again: it carries on from here

shard: is finished

  attempt 1
    ran       2026-03-01 12:00:30 to 12:00:54 (24 s), job 4711 on n1, n2, n3, n4
    end       done

train: gave up

  attempt 1
    ran       2026-03-01 12:02:30 to 12:16:12 (14 min), job 4711 on n1, n2, n3,
              n4
    steps     from the beginning, told up to step 480, committed up to 400
    end       hardware: rank 2 on n2: peer n3 fell silent
    evidence  node n3: down* Not responding
              job 4711 was RUNNING
              exit record: code 88 (PEER_LOST) by rank 2 on n2
              last step told: 480
              srun.log: srun: error: n3: [bold]no answer[/bold]
              rank 2 on n2: headrace: peer n3 fell silent
              and 1 more: --stage train --attempt 1
    culprit   n3
    decision  retry elsewhere: without n3
    next      attempt 2 · from step 400 · without n3, at 12:16:24
    logs      /shared/gpt/train/0001

  attempt 2 · from step 400 · without n3
    ran       2026-03-01 12:16:54 to 12:20:00 (3 min), job 4712 on n1, n2, n3,
              n4
    steps     from step 400, told up to step 410, nothing committed
    end       hardware: the job ended NODE_FAIL
    culprit   n2
    decision  retry elsewhere, after 8 s: without n2
    next      nothing: train needs 4 nodes and 3 of 5 are left (n2: hardware in
              train attempt 2; n3: hardware in train attempt 1); repair the
              excluded nodes and validate them again (--force validate), or
              lower cluster.nodes to 3
    logs      /shared/gpt/train/0002
"""


def test_a_run_that_found_nowhere_to_go_says_so_first_and_then_how_it_came_there() -> None:
    shard = made(1, minute=0, stage=Stage.SHARD, exit=left(0, minute=0.9), end=DONE)
    seen = story(
        shard,
        CUT,
        SECOND,
        stages={Stage.SHARD: record(Stage.SHARD, minute=1)},
        refusals={Stage.TRAIN: REFUSED},
        commits=frozenset({(200, 1), (400, 1)}),
    )
    assert told(seen) == GAVE_UP


WAITING = """\
Run gpt: train is under way.
  why       attempt 2 has no end yet
  to do     nothing while an engine lives; else the same command carries on from
            here

train: is under way

  attempt 2 · from step 400 · without n3
    made      2026-03-01 12:16:24, job 4712
    waits for job 4712 to start, which is PENDING (Priority): jobs of higher
              priority come first
    logs      /shared/gpt/train/0002
"""


def test_what_was_stepped_back_from_is_told_with_the_reason() -> None:
    resume = replace(resumed(30), passed=("step 60: a bad block", "step 50: it is gone"))
    end = closed(Kind.DONE, Action.DONE, "the work is done", minute=9)
    lines = told(story(made(2, minute=1, floor=60, resume=resume, end=end)))
    assert "    steps     from step 30, " in lines
    assert "    skipped   step 60: a bad block\n              step 50: it is gone\n" in lines


def test_an_open_attempt_says_what_it_waits_for() -> None:
    submitted = Submitted(job_id="4712", nonce="0", at=at(16.5))
    waiting = made(2, minute=16.4, floor=400, excluded=("n3",), start=None, submitted=submitted)
    pending = JobObservation(
        token=waiting.intent.token,
        state=JobState.PENDING,
        job_id="4712",
        raw_state="PENDING",
        reason="Priority",
    )
    seen = story(CUT, waiting, observations={waiting.intent.token: pending})
    assert told(seen, stage=Stage.TRAIN, attempt=2) == WAITING


def waits(attempt: Attempt, **more: Any) -> str:
    return told(story(attempt, **more), minute=10).split("waits for ")[1].split("\n    logs")[0]


def test_what_an_open_attempt_waits_for_follows_from_its_records() -> None:
    open_one = made(1, minute=2)
    void = Start(job=None, nonce="0", at=at(3))
    assert waits(open_one) == "its first sign of life; it started 8 min ago"
    assert waits(replace(open_one, heartbeats=beats(7, minute=9.9))).startswith("its end; the last")
    assert "code 75 (RESUME)" in waits(replace(open_one, exit=left(75, minute=4)))
    assert "no job can start" in waits(replace(open_one, start=void))
    assert "sbatch has not answered" in waits(replace(open_one, start=None))


def test_a_cancel_that_is_under_way_names_who_asked_for_it() -> None:
    cancel = Cancel(who="bob", why="wrong data", nonce="0", at=at(5))
    assert "cancelled by bob: wrong data" in told(story(made(1, minute=2, cancel=cancel)))


def test_of_one_attempt_all_evidence_is_told() -> None:
    brief = told(story(CUT), stage=Stage.TRAIN)
    whole = told(story(CUT), stage=Stage.TRAIN, attempt=1)
    assert "leaving with 88" not in brief
    assert "leaving with 88" in whole
    assert "more: --stage" not in whole
    assert len(CUT.end.diagnosis.evidence) == EVIDENCE_LINES + 2  # type: ignore[union-attr]


def test_a_run_without_attempts_says_so() -> None:
    assert told(story()) == ("Run gpt: nothing was begun.\n\nNo attempt of the run was made.\n")
    assert "No attempt of stage smoke was made." in told(story(CUT), stage=Stage.SMOKE)


def test_many_probes_that_are_done_take_one_line() -> None:
    probes = [
        made(
            number,
            minute=0,
            stage=Stage.VALIDATE,
            unit=f"n{number}",
            exit=left(0, minute=0.9),
            end=DONE,
        )
        for number in range(1, 30)
    ]
    assert "29 attempts are done; --stage validate shows them" in told(story(*probes))
    assert "attempt 7 · n7" in told(story(*probes), stage=Stage.VALIDATE)


def test_a_gate_that_refused_and_a_person_who_stopped_it_are_told_as_such() -> None:
    gate = record(Stage.SMOKE, minute=5, passed=False, reason="efficiency 0.4 at 4 nodes")
    smoke = made(1, minute=2, stage=Stage.SMOKE, exit=left(0, minute=3), end=DONE)
    refused = told(story(smoke, stages={Stage.SMOKE: gate}))
    assert refused.startswith("Run gpt: smoke refused.\n  why       efficiency 0.4 at 4 nodes\n")
    stop = closed(Kind.OPERATOR, Action.STOP, "ann cancelled it: enough", "by ann", minute=5)
    assert told(story(made(1, minute=2, end=stop))).startswith("Run gpt: train was stopped.\n")


def test_an_end_with_nothing_after_it_is_told_as_between_two_attempts() -> None:
    between = told(story(CUT))
    assert between.startswith("Run gpt: train is between two attempts.\n")
    assert "next      no other attempt was made yet" in between
    assert "wait" not in between.partition("no other attempt")[2]


def test_an_attempt_that_is_put_off_for_nodes_is_told_as_waiting_perhaps() -> None:
    elastic = replace(CUT, intent=replace(CUT.intent, most_nodes=4))
    words = " ".join(told(story(elastic)).split())
    assert "no other attempt was made yet; it may wait for excluded nodes to come back" in words


def test_an_attempt_that_a_person_asked_for_after_a_give_up_is_told_as_such() -> None:
    gave_up = closed(Kind.CODE, Action.GIVE_UP, "a mistake", "TypeError", minute=4)
    anew = made(2, minute=9)
    assert "attempt 2, at 12:09:00 (asked for again)" in told(
        story(made(1, minute=2, end=gave_up), anew)
    )


def test_an_array_is_told_with_its_size_and_the_nodes_of_all_its_elements() -> None:
    array = made(1, minute=2)
    assert array.start is not None
    starts = [replace(array.start, element=one, nodes=(f"n{one % 2}",)) for one in range(3)]
    array = replace(
        array,
        intent=replace(array.intent, elements=3),
        start=starts[1],
        elements=tuple(Element(number=one, start=start) for one, start in enumerate(starts)),
    )
    text = told(story(array))
    assert "attempt 1 · 3 elements" in text
    assert "on n1, n0" in text


def test_times_are_the_readers() -> None:
    lines = explain(story(CUT), now=at(60), zone=timezone(timedelta(hours=2)))
    assert any("2026-03-01 14:02:30 to 14:16:12" in line.text for line in lines)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_line_is_as_wide_as_it_may_be_and_breaks_no_word(width: int) -> None:
    path = "/a/path/that/is/longer/than/a/narrow/terminal/by/far/0001"
    rows = Line(text=f"some words before {path}", indent=4, label="logs").wrapped(width)
    assert path in "".join(rows)
    assert all(len(row) <= max(width, 34) for row in rows if path not in row)
