"""The submit protocol holds whatever happens.

Engines die or freeze at any line; sbatches land late, twice or never; the answers of claims are
lost; jobs vanish. The code under test is the real one, from `carry_out` down to the start register;
only the store, the cluster and the clock are a model (`world.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from storage.ledger import Claim, Ledger
from storage.records import Exit, Intent
from tasks import attending
from tasks.deeds import Deeds
from tasks.situation import Allocate, Order, Submission, Submit
from tests.tasks.world import (
    Answer,
    Fate,
    Fault,
    FaultKind,
    JobPlan,
    Landing,
    Plan,
    ViolationError,
    World,
)

FOLDER = Path("/nonexistent/headrace-model")

SOME_SECONDS = st.sampled_from((0.5, 2.0, 6.0, 15.0, 60.0, 300.0))

faults = st.builds(
    Fault,
    engine=st.integers(0, 2),
    at_step=st.integers(1, 240),
    kind=st.sampled_from(FaultKind),
    seconds=SOME_SECONDS,
)
landings = st.builds(
    Landing,
    answer=st.sampled_from((Answer.JOB_ID, Answer.JOB_ID, *Answer)),
    delays_s=st.lists(st.sampled_from((0.0, 1.0, 5.0, 30.0, 200.0)), max_size=2).map(tuple),
    unseen_s=st.sampled_from((0.0, 0.0, 3.0, 10.0)),
)
jobs = st.builds(
    JobPlan,
    queue_s=st.sampled_from((0.0, 1.0, 4.0, 40.0)),
    run_s=st.sampled_from((0.0, 2.0, 10.0)),
    fate=st.sampled_from([fate for fate in Fate if fate is not Fate.BUG]),
)
plans = st.builds(
    Plan,
    seed=st.integers(0, 2**32 - 1),
    engines=st.integers(2, 3),
    units=st.integers(1, 2),
    elements=st.sampled_from((1, 1, 1, 1, 3)),
    stagger_s=st.sampled_from((0.0, 0.0, 1.0, 7.0)),
    pause_rate=st.sampled_from((0.0, 0.0, 0.003, 0.02)),
    faults=st.lists(faults, max_size=8).map(tuple),
    landings=st.lists(landings, max_size=5).map(tuple),
    jobs=st.lists(jobs, max_size=6).map(tuple),
)

exploring = settings(
    max_examples=400,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
hunting = settings(exploring, phases=[Phase.generate], report_multiple_bugs=False)


def live(plan: Plan, *, obeys_start: bool = True) -> World:
    world = World(plan, FOLDER, obeys_start=obeys_start)
    world.run()
    world.check_rest()
    return world


@exploring
@given(plan=plans)
def test_one_sbatch_and_one_start_an_attempt_and_none_is_lost_for_ever(plan: Plan) -> None:
    live(plan)


def hunt() -> None:
    """Looks for a plan that breaks a promise; its finder's job is to find one."""

    @hunting
    @given(plan=plans)
    def explore(plan: Plan) -> None:
        live(plan)

    explore()


def test_the_model_sees_jobs_that_ignore_the_start_register() -> None:
    @hunting
    @given(plan=plans)
    def explore(plan: Plan) -> None:
        live(plan, obeys_start=False)

    with pytest.raises(ViolationError, match="passed the start"):
        explore()


def test_the_model_sees_an_engine_that_submits_again_when_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def submit_again(case: attending._Case) -> attending.Busy:
        return case._do(Submit(attempt=case.attempt, unit=case.unit))

    monkeypatch.setattr(attending._Case, "_doubt", submit_again)
    with pytest.raises(ViolationError, match="sbatch was called 2 times"):
        hunt()


def test_the_model_sees_an_engine_that_submits_what_another_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def everything_is_due(case: attending._Case) -> attending.Busy:
        if case.seen.submissions.get(case.attempt.intent.nonce) is Submission.SENT:
            return doubt(case)
        return case._do(Submit(attempt=case.attempt, unit=case.unit))

    doubt = attending._Case._doubt
    monkeypatch.setattr(attending._Case, "_doubt", everything_is_due)
    with pytest.raises(ViolationError, match="sbatch was called 2 times"):
        hunt()


def test_the_model_sees_an_element_that_ends_the_attempt_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def speak_for_all(ledger: Ledger, intent: Intent, record: Exit) -> Claim[Exit]:
        return ledger.claim_exit(intent, record)

    monkeypatch.setattr(Ledger, "claim_word", speak_for_all)
    with pytest.raises(ViolationError, match="were at work"):
        hunt()


def test_the_model_sees_an_attempt_given_up_without_a_void(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attending._Case, "_doubt", attending._Case._void)
    with pytest.raises(ViolationError, match="could still pass its start"):
        hunt()


def test_the_model_sees_a_loser_that_takes_the_next_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take_the_next(deeds: Deeds, step: Allocate, order: Order) -> bool:
        while not allocate(deeds, step, order):
            step = replace(step, number=step.number + 1)
        return True

    allocate = Deeds._allocate
    monkeypatch.setattr(Deeds, "_allocate", take_the_next)
    with pytest.raises(ViolationError, match="was open"):
        hunt()


def test_the_model_sees_an_engine_that_waits_for_ever_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attending._Case, "_doubt", lambda case: case._wait(1.0))
    with pytest.raises(ViolationError, match="nobody comes to an end"):
        hunt()
