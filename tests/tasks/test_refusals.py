"""Why a stage gave up is found in the ledger, when no engine lives any more."""

from __future__ import annotations

from pathlib import Path

from storage.records import Action, Kind
from tasks.context import Unit
from tasks.failures import AttemptFailed
from tasks.last_word import LastWord, Standing, last_word
from tests.tasks.test_runner import Notebook, attempts, one_engine
from tests.tasks.world import NODES, STAGE, Fate, JobPlan, World

FOLDER = Path("/nonexistent/headrace-model")


def word(world: World) -> LastWord:
    ledger = world.open_ledger()
    return last_word(ledger.attempts(STAGE), record=None, refusal=ledger.refusal(STAGE))


def test_too_few_nodes_for_the_next_try_are_the_stages_last_word() -> None:
    all_nodes = Unit(name="u0", entry="none", nodes=len(NODES))
    plan = one_engine(JobPlan(fate=Fate.NODE_FAIL))
    world = World(plan, FOLDER, may_fail=True, units=(all_nodes,))
    world.run()
    error = world.failures[0]
    assert isinstance(error, AttemptFailed)
    (attempt,) = attempts(world)
    assert attempt.end is not None
    assert attempt.end.decision.action is Action.RETRY_ELSEWHERE
    found = word(world)
    assert found.standing is Standing.GAVE_UP
    assert f"{len(NODES) - 1} of {len(NODES)} are left (n1: hardware" in found.reason
    assert found.reason in str(error)
    assert found.attempt == attempt


def test_a_refusal_is_no_longer_the_last_word_once_another_attempt_is_made() -> None:
    world = World(one_engine(JobPlan(fate=Fate.BUG)), FOLDER, may_fail=True)
    world.run()
    assert word(world).standing is Standing.GAVE_UP
    world.start_engine(0, delay_s=0.0)
    world.go_on()
    assert [one.end.diagnosis.kind for one in attempts(world) if one.end] == [Kind.CODE, Kind.DONE]
    assert word(world).standing is Standing.UNDER_WAY


def test_a_person_who_ends_a_run_is_no_refusal() -> None:
    notebook = Notebook(cancel_at_s=2.0)
    world = World(one_engine(JobPlan(run_s=400.0)), FOLDER, may_fail=True, eyes=notebook)
    notebook.world = world
    world.run()
    assert world.open_ledger().refusal(STAGE) is None
    assert word(world).standing is Standing.STOPPED
