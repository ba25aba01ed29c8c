"""What follows each kind of end: how often, how soon, without which nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.policy import BUDGETS, decide
from slurm.spec import RetrySpec
from storage.attempts import Attempt
from storage.checkpoint_records import Resume
from storage.records import Action, Decision, Diagnosis, Kind
from tests.slurm.attempts import NOW, an_attempt, an_exit, beat, commit, ended

RETRY = RetrySpec(hardware=2, network=2, storage=2, site=1, hang=1, unknown=1, backoff_s=10)
ODD = "Traceback (most recent call last):\nRuntimeError: odd"


def judge(
    kind: Kind,
    *,
    culprits: tuple[str, ...] = (),
    attempt: Attempt | None = None,
    history: tuple[Attempt, ...] = (),
    retry: RetrySpec = RETRY,
    **more: Any,
) -> Decision:
    attempt = attempt or an_attempt(len(history) + 1)
    values: dict[str, Any] = {"seed": 1, **more}
    diagnosis = Diagnosis(kind=kind, culprit_nodes=culprits)
    return decide(diagnosis, attempt=attempt, history=history, retry=retry, **values)


def failed(*kinds: Kind) -> tuple[Attempt, ...]:
    """Attempts that ended so, one after the other, with no commit between them."""
    return tuple(ended(an_attempt(n), kind) for n, kind in enumerate(kinds, start=1))


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        (Kind.DONE, Action.DONE),
        (Kind.OPERATOR, Action.STOP),
        (Kind.CODE, Action.GIVE_UP),
        (Kind.MEMORY, Action.GIVE_UP),
        (Kind.DATA, Action.GIVE_UP),
        (Kind.NUMERIC, Action.STEP_BACK),
        (Kind.TIME, Action.RESUME),
        (Kind.PREEMPTED, Action.RESUME),
        (Kind.LOST, Action.RESUME),
        (Kind.FENCED, Action.RESUME),
        (Kind.SITE, Action.RESUME),
        (Kind.STORAGE, Action.RESUME),
        (Kind.UNKNOWN, Action.RESUME),
    ],
)
def test_the_first_end_of_each_kind(kind: Kind, action: Action) -> None:
    assert judge(kind).action is action


@pytest.mark.parametrize("kind", [Kind.HARDWARE, Kind.NETWORK, Kind.HANG, Kind.OUTPUT])
def test_a_node_that_is_blamed_is_excluded_and_its_job_goes_on_at_once(kind: Kind) -> None:
    decision = judge(kind, culprits=("n2",))
    assert decision.action is Action.RETRY_ELSEWHERE
    assert decision.exclude_nodes == ("n2",)
    assert decision.delay_s == 0
    assert "n2" in decision.reason


def test_a_mistake_is_never_tried_again() -> None:
    for kind in (Kind.CODE, Kind.DATA, Kind.MEMORY):
        assert judge(kind, newest=commit(100)).action is Action.GIVE_UP


def test_each_kind_has_a_budget_of_its_own() -> None:
    history = failed(Kind.HARDWARE, Kind.HARDWARE)
    assert judge(Kind.HARDWARE, history=history).action is Action.GIVE_UP
    assert "retry.hardware allows 2" in judge(Kind.HARDWARE, history=history).reason
    assert judge(Kind.STORAGE, history=history).action is Action.RESUME


def test_a_cascade_draws_on_the_networks_budget() -> None:
    history = failed(Kind.NETWORK, Kind.CASCADE)
    assert judge(Kind.NETWORK, history=history).action is Action.GIVE_UP


def test_progress_refills_the_budgets() -> None:
    first = ended(an_attempt(1), Kind.HARDWARE)
    second = ended(an_attempt(2), Kind.HARDWARE)
    third = an_attempt(3, floor=100)
    history = (first, second)
    assert judge(Kind.HARDWARE, history=history, attempt=third).action is Action.RESUME
    stuck = judge(Kind.HARDWARE, history=history, attempt=an_attempt(3))
    assert stuck.action is Action.GIVE_UP
    moved = judge(Kind.HARDWARE, history=history, attempt=an_attempt(3), newest=commit(5))
    assert moved.action is Action.RESUME


def test_a_budget_of_none_means_never_again_even_after_progress() -> None:
    retry = replace_retry(hardware=0)
    assert judge(Kind.HARDWARE, retry=retry, newest=commit(9)).action is Action.GIVE_UP


def replace_retry(**values: Any) -> RetrySpec:
    return RETRY.model_copy(update=values)


def test_time_costs_nothing_when_steps_were_gained_and_is_counted_when_not() -> None:
    history = failed(Kind.TIME)
    gained = judge(Kind.TIME, history=history, newest=commit(10))
    assert (gained.action, gained.delay_s) == (Action.RESUME, 0)
    assert judge(Kind.TIME, history=history).action is Action.GIVE_UP


def test_a_job_whose_time_was_up_goes_on_and_nothing_is_said_of_a_cause() -> None:
    reason = judge(Kind.TIME, newest=commit(90)).reason
    assert "time limit reached" in reason
    assert "goes on from what is committed" in reason
    assert "cause" not in reason


def test_preemption_and_loss_cost_nothing_however_often() -> None:
    for kind in (Kind.PREEMPTED, Kind.LOST):
        assert judge(kind, history=failed(*[kind] * 30)).action is Action.RESUME


def test_a_sites_limit_on_jobs_costs_nothing_and_is_asked_less_and_less_often() -> None:
    again = judge(Kind.LIMIT, history=failed(*[Kind.LIMIT] * 30))
    assert again.action is Action.RESUME
    assert RETRY.backoff_max_s / 2 <= again.delay_s <= RETRY.backoff_max_s


def test_the_same_error_twice_from_the_same_step_is_given_up() -> None:
    retry = replace_retry(unknown=9)
    before = ended(an_attempt(1, exit=an_exit(1, ODD)), Kind.UNKNOWN)
    again = an_attempt(2, exit=an_exit(1, ODD))
    other = an_attempt(2, exit=an_exit(1, ODD.replace("odd", "even")))
    for attempt, action in ((again, Action.GIVE_UP), (other, Action.RESUME)):
        judged = judge(Kind.UNKNOWN, history=(before,), attempt=attempt, retry=retry)
        assert judged.action is action
    moved = replace(again, intent=replace(again.intent, floor=commit(50)))
    later = judge(Kind.UNKNOWN, history=(before,), attempt=moved, retry=retry, newest=commit(80))
    assert later.action is Action.RESUME


def test_divergence_gets_one_step_back() -> None:
    before = ended(an_attempt(1), Kind.NUMERIC, Action.STEP_BACK)
    assert judge(Kind.NUMERIC, history=(before,)).action is Action.GIVE_UP


def test_output_that_two_nodes_cannot_write_is_the_paths_fault() -> None:
    decision = judge(Kind.OUTPUT, culprits=("n2",), history=failed(Kind.OUTPUT))
    assert decision.action is Action.GIVE_UP
    assert "workdir" in decision.reason


@pytest.mark.parametrize("kind", [Kind.UNKNOWN, Kind.CASCADE, Kind.NETWORK, Kind.HANG])
def test_an_attempt_that_had_got_on_is_followed_at_once_and_one_that_had_not_later(
    kind: Kind,
) -> None:
    assert judge(kind, newest=commit(100)).delay_s == 0
    assert judge(kind).delay_s > 0
    retry = replace_retry(unknown=9, hang=9)
    stuck = an_attempt(2, floor=100)
    again = judge(kind, history=failed(kind), attempt=stuck, newest=commit(100), retry=retry)
    assert again.action is Action.RESUME
    assert again.delay_s > 0


def test_a_store_or_a_site_that_failed_is_given_time_even_after_progress() -> None:
    for kind in (Kind.STORAGE, Kind.SITE, Kind.LIMIT):
        assert judge(kind, newest=commit(100)).delay_s > 0


def test_back_off_doubles_up_to_its_bound_and_is_the_same_for_every_engine() -> None:
    retry = replace_retry(storage=99, backoff_max_s=100)
    delays = [
        judge(Kind.STORAGE, history=failed(*[Kind.STORAGE] * n), retry=retry).delay_s
        for n in range(10)
    ]
    wholes = [min(10 * 2**n, 100) for n in range(10)]
    assert all(whole / 2 <= delay <= whole for delay, whole in zip(delays, wholes, strict=True))
    assert (
        delays[3] == judge(Kind.STORAGE, history=failed(*[Kind.STORAGE] * 3), retry=retry).delay_s
    )
    assert len({judge(Kind.STORAGE, retry=retry, seed=seed).delay_s for seed in range(9)}) > 1


@given(
    st.sampled_from(
        [Kind.HARDWARE, Kind.NETWORK, Kind.STORAGE, Kind.SITE, Kind.HANG, Kind.UNKNOWN]
    ),
    st.integers(0, 12),
)
def test_without_progress_every_counted_kind_comes_to_an_end(kind: Kind, budget: int) -> None:
    retry = replace_retry(**{kind.value: budget})
    actions = [
        judge(kind, history=failed(*[kind] * n), retry=retry).action for n in range(budget + 1)
    ]
    assert actions == [Action.RESUME] * budget + [Action.GIVE_UP]


def test_a_suspected_node_is_avoided_and_the_reason_says_that_it_is_only_suspected() -> None:
    for kind in (Kind.NETWORK, Kind.HANG):
        assert "suspected and not proven" in judge(kind, culprits=("n2",)).reason
    assert judge(Kind.HARDWARE, culprits=("n2",)).reason == "without n2"


def blaming(kind: Kind, *nodes: str) -> tuple[Attempt, ...]:
    """Attempts each of which blames another node."""
    return tuple(
        ended(an_attempt(n), kind, culprits=(node,)) for n, node in enumerate(nodes, start=1)
    )


def test_when_ever_new_nodes_are_blamed_it_is_not_the_nodes() -> None:
    retry = replace_retry(hardware=9)
    history = blaming(Kind.HARDWARE, "n1", "n2", "n3")
    decision = judge(Kind.HARDWARE, culprits=("n4",), history=history, retry=retry)
    assert (decision.action, decision.exclude_nodes) == (Action.RESUME, ())
    assert "n1, n2, n3, n4" in decision.reason
    assert decision.delay_s > 0
    same = judge(Kind.HARDWARE, culprits=("n1",), history=history, retry=retry)
    assert same.exclude_nodes == ("n1",)
    refilled = judge(
        Kind.HARDWARE, culprits=("n4",), history=history, retry=retry, newest=commit(9)
    )
    assert refilled.exclude_nodes == ("n4",)


def test_a_give_up_names_the_nodes_that_were_blamed() -> None:
    history = blaming(Kind.HARDWARE, "n1", "n2")
    assert judge(Kind.HARDWARE, culprits=("n2",), history=history).reason.endswith(
        "they blame n1, n2"
    )


def test_a_time_limit_that_leaves_no_time_for_a_commit_says_what_to_change() -> None:
    decision = judge(Kind.TIME, history=failed(Kind.TIME))
    assert decision.action is Action.GIVE_UP
    assert "cluster.time_limit_min" in decision.reason
    assert "train.checkpoint.every_steps" in decision.reason


def test_a_chain_of_time_limits_costs_nothing_of_what_a_crash_may_cost() -> None:
    chained = ended(an_attempt(1), Kind.TIME)
    crashed = an_attempt(2, floor=100)
    later = judge(Kind.UNKNOWN, history=(chained,), attempt=crashed, newest=commit(100))
    assert later.action is Action.RESUME


def told(number: int, step: int | None, **records: Any) -> Attempt:
    return an_attempt(number, heartbeats=(beat("n1", step=step), beat("n2", step=None)), **records)


def test_steps_told_count_as_progress_where_the_job_keeps_its_own_checkpoints() -> None:
    history = (ended(told(1, 40), Kind.UNKNOWN), ended(told(2, 90), Kind.UNKNOWN))
    further, stuck, silent = told(3, 91), told(3, 90), told(3, None)
    assert judge(Kind.UNKNOWN, history=history, attempt=further).action is Action.RESUME
    assert judge(Kind.UNKNOWN, history=history, attempt=stuck).action is Action.GIVE_UP
    assert judge(Kind.UNKNOWN, history=history, attempt=silent).action is Action.GIVE_UP


def test_steps_told_are_no_progress_where_headrace_commits() -> None:
    resume = Resume(source=None, world_size=2, nonce="0", at=NOW)
    history = (ended(told(1, 40, resume=resume), Kind.UNKNOWN),)
    attempt = told(2, 90, resume=resume)
    assert judge(Kind.UNKNOWN, history=history, attempt=attempt).action is Action.GIVE_UP


def test_the_same_error_is_given_up_though_a_preemption_came_between() -> None:
    before = ended(an_attempt(1, exit=an_exit(1, ODD)), Kind.UNKNOWN)
    between = ended(an_attempt(2), Kind.PREEMPTED)
    again = an_attempt(3, exit=an_exit(1, ODD))
    decision = judge(
        Kind.UNKNOWN, history=(before, between), attempt=again, retry=replace_retry(unknown=9)
    )
    assert decision.action is Action.GIVE_UP
    assert "attempt 1" in decision.reason


def test_waiting_for_the_site_lengthens_no_other_delay() -> None:
    history = failed(*[Kind.LIMIT] * 20)
    assert judge(Kind.HARDWARE, culprits=("n1",), history=history).delay_s == 0
    assert judge(Kind.STORAGE, history=history).delay_s <= RETRY.backoff_s


def test_the_page_on_attempts_names_every_kind_and_every_budget_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "attempts.md").read_text()
    # A fenced job is another attempt's, and is not diagnosed.
    unnamed = {kind for kind in Kind if f"`{kind.value}`" not in page} - {Kind.FENCED}
    assert not unnamed
    defaults = RetrySpec()
    for name in (*sorted(set(BUDGETS.values())), "exclude_h", "max_excluded_ratio", "backoff_s"):
        assert f"  {name}: {getattr(defaults, name):g}" in page
