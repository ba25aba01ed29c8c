"""The whole loop with a job that Slurm would never start: it ends, says why, and nothing runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.attempts import Attempt
from storage.records import Action, Kind
from tasks.failures import AttemptFailed
from tests.tasks.world import STAGE, Fault, FaultKind, JobPlan, Plan, World

FOLDER = Path("unused")


@pytest.mark.parametrize("engines", [1, 2])
def test_a_job_that_waits_in_vain_ends_the_stage_with_slurms_reason(engines: int) -> None:
    never = JobPlan(queue_s=1e7, reason="BadConstraints")
    world = World(Plan(engines=engines, jobs=(never, never)), FOLDER, may_fail=True)
    world.start_engine(0, delay_s=0.0)
    if engines == 2:
        world.start_engine(1, delay_s=1.0)
    world.go_on()
    for index in range(engines):
        error = world.failures[index]
        assert isinstance(error, AttemptFailed)
        assert error.attempt is not None
    (attempt,) = world.open_ledger().attempts(STAGE)
    assert attempt.end is not None
    assert (attempt.end.diagnosis.kind, attempt.end.decision.action) == (Kind.CODE, Action.GIVE_UP)
    assert attempt.start is not None
    assert attempt.start.is_void
    assert attempt.cancel is not None
    assert "BadConstraints" in attempt.cancel.why
    assert world.cluster.job("1").raw_state == "CANCELLED"
    assert world.passed == {}


def test_a_job_that_starts_as_it_is_being_given_up_runs_on() -> None:
    """Whichever comes first, the void or the job's start: there is one winner, and one result."""
    kinds = set()
    for tenths in range(20, 90):
        late = JobPlan(queue_s=tenths / 10, reason="BadConstraints")
        world = World(Plan(engines=1, jobs=(late,)), FOLDER, may_fail=True)
        world.run()
        attempt = world.open_ledger().attempts(STAGE)[0]
        assert attempt.start is not None
        assert attempt.end is not None
        assert attempt.start.is_void is (0 not in world.results)
        expected = Kind.CODE if attempt.start.is_void else Kind.DONE
        assert attempt.end.diagnosis.kind is expected
        kinds.add(expected)
    assert kinds == {Kind.CODE, Kind.DONE}


def test_a_job_that_slurm_could_not_launch_is_sent_once_more_wherever_the_engine_dies() -> None:
    held = JobPlan(queue_s=1e7, reason="launch failed requeued held")
    for crash_at in (None, *range(20, 284, 2)):
        faults = () if crash_at is None else (Fault(0, crash_at, FaultKind.CRASH),)
        plan = Plan(engines=1, jobs=(held, held, held), faults=faults)
        world = World(plan, FOLDER, may_fail=True)
        world.run()
        attempts = world.open_ledger().attempts(STAGE)
        # An engine that dies before its sbatch leaves an attempt that no job carried.
        sent = [one for one in attempts if one.submitted or _kind(one) is not Kind.LOST]
        assert [_kind(one) for one in sent] == [Kind.OUTPUT] * 2, crash_at
        first, second = (one.end for one in sent)
        assert first is not None
        assert second is not None
        assert first.decision.action is Action.RESUME
        assert second.decision.action is Action.GIVE_UP
        assert "workdir" in second.decision.reason


def _kind(attempt: Attempt) -> Kind | None:
    return None if attempt.end is None else attempt.end.diagnosis.kind
