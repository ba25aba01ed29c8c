"""What the runner promises, in the model's world: one scene a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurm.spec import RetrySpec
from storage.attempts import Attempt
from storage.errors import StoreError
from storage.records import Action, Cancel, ExitCode, Kind, Stage, StageRecord, Why
from tasks.context import Unit
from tasks.eyes import Eyes
from tasks.failures import AttemptFailed, RunCancelled
from tasks.last_word import Standing, last_word
from tasks.runner import CANCEL_POLL_S, NEWS_POLL_S
from tests.tasks.world import (
    STAGE,
    Answer,
    Fate,
    Fault,
    FaultKind,
    JobPlan,
    Landing,
    Plan,
    World,
)

FOLDER = Path("/nonexistent/headrace-model")


@dataclass
class Notebook(Eyes):
    """Writes down what it is told, and asks for the end when the world is that old."""

    cancel_at_s: float = float("inf")
    world: World | None = None
    said: list[str] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    states: list[str] = field(default_factory=list)

    def attempt_opened(self, attempt: Attempt) -> None:
        self.opened.append(attempt.number)

    def attempt_closed(self, attempt: Attempt) -> None:
        assert attempt.end is not None
        self.closed.append(attempt.number)

    def attempt_state(self, attempt: Attempt, *, state: str, detail: str) -> None:
        self.states.append(state)

    def say(self, message: str) -> None:
        self.said.append(message)

    def cancel_requested(self) -> bool:
        return self.world is not None and self.world.now_s >= self.cancel_at_s


def one_engine(*jobs: JobPlan, faults: Sequence[Fault] = (), units: int = 1) -> Plan:
    return Plan(engines=1, jobs=jobs, faults=tuple(faults), units=units)


def calls_of_a_plain_life() -> int:
    world = World(one_engine(), FOLDER)
    world.run()
    return world.calls_of(0)


def attempts(world: World) -> tuple[Attempt, ...]:
    return world.open_ledger().attempts(STAGE)


def kinds(world: World) -> list[Kind]:
    return [one.end.diagnosis.kind for one in attempts(world) if one.end is not None]


def test_a_unit_ends_with_the_outputs_of_its_job() -> None:
    notebook = Notebook()
    world = World(one_engine(), FOLDER, eyes=notebook)
    world.run()
    result = world.results[0]["u0"]
    assert result.done
    assert result.outputs == {"by": "1"}
    assert result.attempt.submitted is not None
    assert result.attempt.intent.why is Why.FIRST
    assert (notebook.opened, notebook.closed) == ([1], [1])
    assert notebook.states[-1] in ("running", "ended")


@pytest.mark.parametrize("kind", [FaultKind.CRASH, FaultKind.ERROR])
def test_an_engine_hit_at_any_call_and_started_again_carries_on(kind: FaultKind) -> None:
    for step in range(1, calls_of_a_plain_life()):
        world = World(one_engine(faults=[Fault(0, step, kind)]), FOLDER)
        world.run()
        world.check_rest()
        assert sum(world.sbatches.values()) == len(world.sbatches)


def test_a_job_that_runs_is_adopted_by_the_engine_started_after_a_crash() -> None:
    plan = one_engine(JobPlan(run_s=60.0), faults=[Fault(0, 70, FaultKind.CRASH)])
    notebook = Notebook()
    world = World(plan, FOLDER, eyes=notebook)
    world.run()
    world.check_rest()
    assert notebook.opened == [1, 1], "the crash came before or after the job's life"
    assert len(world.sbatches) == 1


def test_an_engine_frozen_at_any_call_does_no_harm_to_the_other() -> None:
    for step in range(1, calls_of_a_plain_life()):
        plan = Plan(engines=2, faults=(Fault(0, step, FaultKind.PAUSE, 600.0),))
        world = World(plan, FOLDER)
        world.run()
        world.check_rest()


def test_an_outage_of_slurm_fails_nothing_and_is_said_once() -> None:
    notebook = Notebook()
    plan = one_engine(JobPlan(run_s=30.0, fate=Fate.RESUME), JobPlan())
    world = World(plan, FOLDER, eyes=notebook)
    world.start_engine(0, delay_s=0.0)
    world.begin(partial(setattr, world.cluster, "down_until_s", 7200.0), delay_s=5.0)
    world.go_on()
    world.check_rest()
    assert kinds(world) == [Kind.TIME, Kind.DONE]
    assert len(notebook.said) == 2
    assert "does not answer" in notebook.said[0]
    assert "answers again" in notebook.said[1]


def test_a_job_that_is_done_needs_no_slurm_to_be_believed() -> None:
    world = World(one_engine(JobPlan(run_s=30.0)), FOLDER)
    world.start_engine(0, delay_s=0.0)
    world.begin(partial(setattr, world.cluster, "down_until_s", 7200.0), delay_s=5.0)
    world.go_on()
    world.check_rest()
    assert world.now_s < 7200.0


def test_an_outage_of_the_store_is_waited_for_but_not_for_ever() -> None:
    for down_s, ends_well in ((300.0, True), (7200.0, False)):
        world = World(one_engine(JobPlan(run_s=1000.0)), FOLDER, may_fail=True)
        world.start_engine(0, delay_s=0.0)
        go_down = partial(setattr, world.store, "down_until_s", 5.0 + down_s)
        world.begin(go_down, delay_s=5.0)
        world.go_on()
        assert (0 in world.results) is ends_well
        assert ends_well or isinstance(world.failures[0], StoreError)


def test_a_node_that_fails_is_not_used_again() -> None:
    world = World(one_engine(JobPlan(fate=Fate.NODE_FAIL)), FOLDER)
    world.run()
    first, second = attempts(world)
    assert first.end is not None
    assert first.end.decision.exclude_nodes == ("n1",)
    assert second.intent.excluded == ("n1",)
    assert second.intent.after == 1
    assert second.intent.why is Why.RETRIED


def test_a_mistake_in_the_code_is_not_tried_again_until_somebody_asks() -> None:
    world = World(one_engine(JobPlan(fate=Fate.BUG)), FOLDER, may_fail=True)
    world.run()
    error = world.failures[0]
    assert isinstance(error, AttemptFailed)
    assert error.attempt is not None
    assert error.attempt.number == 1
    assert "0001" in str(error)
    assert "code" in str(error)

    world.start_engine(0, delay_s=0.0)
    world.go_on()
    assert world.results[0]["u0"].attempt.number == 2


def test_a_tolerated_failure_is_a_result_and_its_tries_are_counted() -> None:
    unit = Unit(name="n3", entry="none", node_list=("n3",), tries=2)
    other = Unit(name="n4", entry="none", node_list=("n4",), tries=2)
    jobs = (JobPlan(fate=Fate.BUG), JobPlan(fate=Fate.DONE))
    world = World(one_engine(*jobs), FOLDER, tolerate=True, units=(unit, other))
    world.run()
    results = world.results[0]
    assert sorted(one.done for one in results.values()) == [False, True]
    failed = next(one for one in results.values() if not one.done)
    assert failed.exit is not None
    assert failed.exit.code == ExitCode.BAD_CONFIG

    patient = Unit(name="p", entry="none", tries=2)
    jobs = tuple(JobPlan(fate=Fate.FREEZE) for _ in range(4))
    world = World(one_engine(*jobs), FOLDER, tolerate=True, units=(patient,))
    world.run()
    assert not world.results[0]["p"].done
    assert len(attempts(world)) == 2


def test_a_unit_that_fails_ends_its_siblings_before_the_stage_fails() -> None:
    plan = one_engine(JobPlan(run_s=500.0), JobPlan(fate=Fate.BUG), units=2)
    world = World(plan, FOLDER, may_fail=True)
    world.run()
    assert isinstance(world.failures[0], AttemptFailed)
    assert world.failures[0].attempt is not None
    assert world.failures[0].attempt.number == 2
    assert sorted(kinds(world)) == sorted([Kind.CODE, Kind.OPERATOR])
    assert world.now_s < 400.0


@pytest.mark.parametrize("cancel_at_s", [0.0, 2.0, 6.0])
def test_a_person_ends_the_run_and_the_same_command_carries_on(cancel_at_s: float) -> None:
    notebook = Notebook(cancel_at_s=cancel_at_s)
    plan = one_engine(JobPlan(queue_s=3.0, run_s=400.0))
    world = World(plan, FOLDER, may_fail=True, eyes=notebook)
    notebook.world = world
    world.run()
    assert isinstance(world.failures[0], RunCancelled)
    for attempt in attempts(world):
        assert attempt.end is not None
        assert attempt.cancel is not None
        assert attempt.cancel.who == "model"
        assert attempt.end.decision.action is Action.STOP
    assert world.now_s < 100.0, "the job was not cancelled"

    notebook.world = None
    world.start_engine(0, delay_s=0.0)
    world.go_on()
    assert world.results[0]["u0"].done


def test_a_sbatch_that_lands_after_the_void_finds_no_start_left() -> None:
    landing = Landing(answer=Answer.DOUBT, delays_s=(120.0,))
    world = World(Plan(engines=1, landings=(landing,)), FOLDER)
    world.run()
    assert kinds(world) == [Kind.LOST, Kind.DONE]
    first = attempts(world)[0]
    assert first.start is not None
    assert first.start.is_void
    late = world.cluster.job("1")
    assert late.exit_code == f"{ExitCode.FENCED}:0"


def test_a_site_that_takes_no_more_jobs_for_now_is_waited_for_and_that_is_said_once() -> None:
    notebook = Notebook()
    landings = (Landing(answer=Answer.LIMIT),) * 20
    world = World(Plan(engines=1, landings=landings), FOLDER, eyes=notebook)
    world.run()
    assert kinds(world) == [Kind.LIMIT] * 20 + [Kind.DONE]
    assert [line for line in notebook.said if "takes more jobs" in line] == notebook.said
    assert len(notebook.said) == 1
    assert "QOSMaxSubmitJobPerUserLimit" in notebook.said[0]


def test_a_job_that_has_left_and_still_runs_is_cancelled_by_the_loop() -> None:
    world = World(one_engine(JobPlan(fate=Fate.LINGER)), FOLDER)
    world.run()
    (attempt,) = attempts(world)
    assert attempt.cancel is not None
    assert attempt.cancel.who == "headrace"
    assert kinds(world) == [Kind.DONE]
    assert world.cluster.job("1").raw_state == "CANCELLED"


def test_an_attempt_of_another_cluster_is_neither_adopted_nor_voided() -> None:
    world = World(
        one_engine(JobPlan(queue_s=3.0), faults=[Fault(0, 40, FaultKind.CRASH)]),
        FOLDER,
        may_fail=True,
    )
    world.start_engine(0, delay_s=0.0)
    world.begin(lambda: setattr(world.cluster, "name", "elsewhere"), delay_s=2.0)
    world.go_on()
    error = world.failures[0]
    assert isinstance(error, AttemptFailed)
    assert "'model'" in str(error)
    assert "'elsewhere'" in str(error)
    assert attempts(world)[0].end is None


def test_the_result_of_another_fingerprint_is_awaited_but_does_not_count() -> None:
    world = World(one_engine(JobPlan(run_s=30.0), faults=[Fault(0, 60, FaultKind.CRASH)]), FOLDER)
    world.start_engine(0, delay_s=0.0)
    world.begin(lambda: setattr(world, "fingerprint", "changed.0"), delay_s=2.5)
    world.go_on()
    first, second = attempts(world)
    assert first.intent.fingerprint != second.intent.fingerprint
    assert kinds(world) == [Kind.DONE, Kind.DONE]
    assert world.results[0]["u0"].attempt.number == 2


@pytest.mark.parametrize("run_s", [3601.0, 3608.0, 3615.0, 3622.0])
def test_an_old_jobs_last_word_is_heard_within_moments(run_s: float) -> None:
    """Its place in the queue is looked at every 30 s by then."""
    world = World(one_engine(JobPlan(run_s=run_s, fate=Fate.RESUME), JobPlan()), FOLDER)
    world.run()
    first, second = attempts(world)
    assert first.exit is not None
    heard_s = (second.intent.created_at - first.exit.at).total_seconds()
    # In the model's own time, which no busy machine stretches.
    assert heard_s < NEWS_POLL_S + CANCEL_POLL_S + 2.0


@pytest.mark.parametrize("wish_at_s", [1.0, 6.0, 11.0, 16.0])
def test_a_wish_for_the_end_is_heard_by_whoever_was_there(wish_at_s: float) -> None:
    """Also between two attempts, when there is none that could be cancelled."""
    jobs = [JobPlan(run_s=2.0, fate=Fate.NODE_FAIL)] * 3 + [JobPlan(run_s=500.0)]
    world = World(Plan(engines=2, jobs=tuple(jobs)), FOLDER, may_fail=True)

    def wish() -> None:
        record = Cancel(who="ana", why="enough", nonce="0" * 16, at=world.time())
        world.open_ledger().ask_for_the_end(record)

    world.start_engine(0, delay_s=0.0)
    world.begin(wish, delay_s=wish_at_s)
    world.go_on()
    assert isinstance(world.failures[0], RunCancelled)
    assert "ana cancelled it: enough" in str(world.failures[0])
    assert all(one.end is not None for one in attempts(world))
    word = last_word(attempts(world), record=None, refusal=world.open_ledger().refusal(STAGE))
    assert (word.standing, word.reason) == (Standing.STOPPED, "ana cancelled it: enough")
    assert world.now_s < 100.0

    world.start_engine(1, delay_s=0.0)
    world.go_on()
    assert world.results[1]["u0"].done


RANGE = (Unit(name="u0", entry="none", nodes=6, most_nodes=8),)
WAIT_S = RetrySpec().wait_for_nodes_s


def an_elastic_run(**fields: Any) -> tuple[World, Notebook]:
    """Its first job fails by its node, n1, so that 7 nodes are left of the 8 that it takes."""
    notebook = Notebook()
    plan = one_engine(JobPlan(fate=Fate.NODE_FAIL))
    return World(plan, FOLDER, eyes=notebook, units=RANGE, **fields), notebook


def pause_s(world: World) -> float:
    """How long after the first attempt's end the second was made."""
    first, second = attempts(world)
    assert first.end is not None
    return (second.intent.created_at - first.end.at).total_seconds()


@pytest.mark.parametrize("tick_s", [None, 60.0])
def test_an_attempt_waits_for_a_failed_node_and_then_takes_what_is_left(
    tick_s: float | None,
) -> None:
    """Whether its engine stays or looks in now and then."""
    world, notebook = an_elastic_run(tick_s=tick_s)
    world.run()
    first, second = attempts(world)
    assert (first.intent.nodes, first.intent.most_nodes) == (6, 8)
    assert (second.intent.nodes, second.intent.most_nodes) == (6, 7)
    assert second.intent.excluded == ("n1",)
    assert WAIT_S <= pause_s(world) <= WAIT_S + 120
    told = notebook.said if tick_s is None else [pause.state for pause in world.pauses]
    waits = {words for words in told if "u0 waits for nodes" in words}
    assert len(waits) == 1, "the words change with what they say"
    if tick_s is None:
        assert len([words for words in told if words in waits]) == 1


def test_a_node_that_passes_a_validation_meanwhile_ends_the_wait() -> None:
    world, _ = an_elastic_run()

    def validate() -> None:
        row = {"node": "n1", "measures": {"disk": 1}}
        record = StageRecord(
            stage=Stage.VALIDATE,
            fingerprint="v",
            generation=0,
            outputs={"healthy": ["n1"], "nodes": [row]},
            attempts=(),
            nonce="v",
            at=world.time(),
        )
        world.open_ledger().claim_stage(record)

    world.begin(validate, delay_s=100.0)
    world.run()
    _, second = attempts(world)
    assert (second.intent.most_nodes, second.intent.excluded) == (8, ())
    assert pause_s(world) < 200


def test_a_person_can_end_a_run_that_waits_for_nodes() -> None:
    world, notebook = an_elastic_run(may_fail=True)
    notebook.world, notebook.cancel_at_s = world, 100.0
    world.run()
    assert isinstance(world.failures[0], RunCancelled)
    assert len(attempts(world)) == 1
    assert world.now_s < WAIT_S
