import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.schedule import learning_rate
from trainer.spec import ScheduleSpec

SCHEDULE = ScheduleSpec(peak_lr=1e-3, warmup_steps=10, min_ratio=0.1)


def rate(step: int) -> float:
    return learning_rate(step, schedule=SCHEDULE, steps=100)


def test_rises_to_the_peak_and_falls_to_the_floor() -> None:
    assert rate(1) == pytest.approx(1e-4)
    assert rate(10) == pytest.approx(1e-3)
    assert rate(55) == pytest.approx(1e-3 * (0.1 + 0.9 / 2))
    assert rate(100) == pytest.approx(1e-4)


@given(
    warmup=st.integers(0, 50),
    extra=st.integers(0, 50),
    ratio=st.floats(0, 1),
)
def test_climbs_then_falls_and_never_passes_the_peak(warmup: int, extra: int, ratio: float) -> None:
    steps = max(1, warmup + extra)
    schedule = ScheduleSpec(peak_lr=1.0, warmup_steps=warmup, min_ratio=ratio)
    rates = [learning_rate(step, schedule=schedule, steps=steps) for step in range(1, steps + 1)]
    assert all(0 <= value <= 1 for value in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
