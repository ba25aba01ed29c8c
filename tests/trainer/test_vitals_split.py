import time

import pytest

from trainer.parallel.clock import CollectiveClock
from trainer.vitals.split import Part, StepClock


def test_the_parts_of_a_window_add_up_to_its_steps() -> None:
    collectives = CollectiveClock()
    clock = StepClock(collectives, separable=True)
    for _ in range(2):
        with clock.part(Part.DATA):
            time.sleep(0.01)
        with clock.part(Part.COMPUTE), collectives.measured():
            time.sleep(0.01)
    window = clock.read(steps=2)
    assert sum(window.split.values()) == pytest.approx(window.step_s)
    assert window.split[Part.DATA] >= 0.01
    assert window.split[Part.COMM] >= 0.01
    assert clock.read(steps=1).split.keys() == {Part.OTHER}


def test_a_part_within_another_counts_once() -> None:
    clock = StepClock(CollectiveClock(), separable=True)
    with clock.part(Part.COMPUTE):
        for _ in range(2):
            with clock.part(Part.CHECKPOINT):
                time.sleep(0.01)
    window = clock.read(steps=1)
    assert window.split[Part.CHECKPOINT] >= 0.02
    assert sum(window.split.values()) == pytest.approx(window.step_s)


def test_nothing_is_claimed_where_it_cannot_be_told_apart() -> None:
    clock = StepClock(CollectiveClock(), separable=False)
    with clock.part(Part.COMPUTE):
        pass
    assert clock.read(steps=1).split.keys() == {Part.COMPUTE_AND_COMM, Part.OTHER}
