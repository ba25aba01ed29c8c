import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trainer.interval import (
    FIRST_STEPS,
    Pace,
    SaveCost,
    best_interval_s,
    mean_cost,
    mttf_s,
    slowed_s,
    spell,
)
from trainer.spec import EVERY_STEPS, CheckpointSpec

SECONDS = st.floats(1e-6, 1e4)


def cost(*, blocked_s: float, slowed_s: float = 0.0, durable_s: float = 0.0) -> SaveCost:
    return SaveCost(blocked_s=blocked_s, slowed_s=slowed_s, durable_s=durable_s)


def pace(spec: CheckpointSpec, *, nodes: int = 1) -> Pace:
    return Pace(spec, nodes=nodes, now_s=0.0)


def lost_part(interval_s: float, *, lost_s: float, mttf_s: float) -> float:
    """Of a run's time: what saves take, and what a failure costs, half an interval on average."""
    return lost_s / interval_s + interval_s / (2 * mttf_s)


@given(lost_s=SECONDS, mttf=st.floats(1e4, 1e8), other=st.floats(0.01, 100))
def test_no_other_interval_loses_less(lost_s: float, mttf: float, other: float) -> None:
    best = best_interval_s(cost(blocked_s=lost_s), mttf_s=mttf)
    assert best <= mttf
    if best < mttf:
        loss = lost_part(best, lost_s=lost_s, mttf_s=mttf)
        assert loss <= lost_part(best * other, lost_s=lost_s, mttf_s=mttf) * (1 + 1e-9)


@given(blocked_s=SECONDS, slowed=SECONDS, durable_s=SECONDS, mttf=SECONDS)
def test_an_interval_is_never_shorter_than_a_flush(
    blocked_s: float, slowed: float, durable_s: float, mttf: float
) -> None:
    measured = cost(blocked_s=blocked_s, slowed_s=slowed, durable_s=durable_s)
    assert best_interval_s(measured, mttf_s=mttf) >= durable_s


@given(nodes=st.integers(1, 10_000), rate=st.floats(1e-4, 10))
def test_twice_the_nodes_fail_twice_as_often(nodes: int, rate: float) -> None:
    one = mttf_s(nodes=nodes, failures_per_node_day=rate)
    assert mttf_s(nodes=2 * nodes, failures_per_node_day=rate) == pytest.approx(one / 2)


def test_steps_beside_a_flush_are_compared_by_the_median_and_noise_is_no_gain() -> None:
    assert slowed_s([1.5, 1.5, 9.0], [1.0, 1.0, 1.0]) == pytest.approx(1.5)
    assert slowed_s([], [1.0]) == slowed_s([1.0], []) == 0
    noisy = [cost(blocked_s=1, slowed_s=-5), cost(blocked_s=3, slowed_s=1)]
    assert mean_cost(noisy) == cost(blocked_s=2, slowed_s=0)


@given(every=st.integers(1, 50), busy=st.sets(st.integers(1, 100)))
def test_by_steps_a_save_that_had_to_wait_stays_due_and_no_other_step_is(
    every: int, busy: set[int]
) -> None:
    saves = pace(CheckpointSpec(every_steps=every))
    waiting = False
    for step in range(1, 101):
        waiting = waiting or step % every == 0
        assert saves.is_due(step, now_s=0.0) == waiting
        if waiting and step not in busy:
            saves.begun(now_s=0.0)
            waiting = False


@given(
    every_s=st.floats(0.5, 100),
    steps=st.lists(st.floats(0.01, 10), min_size=1, max_size=100),
)
def test_by_time_a_save_is_due_once_the_interval_is_over(
    every_s: float, steps: list[float]
) -> None:
    saves, now_s, begun_s = pace(CheckpointSpec(every_s=every_s)), 0.0, 0.0
    for step, step_s in enumerate(steps, start=1):
        now_s += step_s
        is_due = saves.is_due(step, now_s=now_s)
        assert is_due == (now_s - begun_s >= every_s)
        if is_due:
            saves.begun(now_s=now_s)
            begun_s = now_s


def test_auto_saves_early_once_and_then_by_what_that_cost() -> None:
    """Two nodes with 4 failures a node-day: one in 3 h; √(2 · 0.5 s · 10,800 s) is 104 s."""
    saves = pace(CheckpointSpec(auto=True, failures_per_node_day=4), nodes=2)
    due = [step for step in range(1, 40) if saves.is_due(step, now_s=step) and step == FIRST_STEPS]
    assert due == [FIRST_STEPS]
    saves.begun(now_s=40)
    assert not saves.is_due(41, now_s=1e6), "not again before it is known what the first one cost"
    for step_s, is_flushing in [(2.0, False), (2.1, True), (2.1, True), (2.0, False)]:
        saves.stepped(step_s, is_flushing=is_flushing)
    saves.measured(blocked_s=0.3, durable_s=4.2)
    assert saves.news() == (
        "checkpoints every 52 steps (1 min 44 s): Young/Daly from 0.5 s a save and one failure in "
        "3 h 0 min"
    )
    assert saves.news() is None
    assert not saves.is_due(42, now_s=140)
    assert saves.is_due(43, now_s=144)
    saves.begun(now_s=144)
    saves.measured(blocked_s=0.3, durable_s=500)
    assert "no shorter than a save takes to be committed" in (saves.news() or "")


def test_a_save_that_failed_is_made_up_for_at_once() -> None:
    saves = pace(CheckpointSpec(every_steps=100))
    assert not saves.is_due(1, now_s=0)
    saves.failed()
    assert saves.is_due(2, now_s=0)


@pytest.mark.parametrize(
    ("duration_s", "told"),
    [(0.021, "0.021 s"), (250, "4 min 10 s"), (7_260, "2 h 1 min"), (276_480, "3.2 days")],
)
def test_durations_are_told_in_the_units_that_matter(duration_s: float, told: str) -> None:
    assert spell(duration_s) == told


def test_exactly_one_interval_is_given_and_500_steps_where_none_is() -> None:
    assert CheckpointSpec().every_steps == EVERY_STEPS
    assert CheckpointSpec(every_s=60).every_steps is None
    assert CheckpointSpec(auto=True).every_steps is None
    for spec in (CheckpointSpec(), CheckpointSpec(every_s=60), CheckpointSpec(auto=True)):
        assert CheckpointSpec.model_validate(spec.model_dump(mode="json")) == spec
    with pytest.raises(ValidationError, match=r"every_steps 5 and every_s 60\.0 exclude each"):
        CheckpointSpec(every_steps=5, every_s=60)
    with pytest.raises(ValidationError, match=r"every_s 60\.0 and auto True exclude each other"):
        CheckpointSpec(every_s=60, auto=True)
    with pytest.raises(ValidationError, match="must be an absolute path"):
        CheckpointSpec.model_validate({"buffer_dir": "shm"})
    assert math.isclose(CheckpointSpec().failures_per_node_day * 1000, 6.5)
