"""Where a step's time goes, as far as it can be measured without inventing anything."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from trainer.parallel.clock import CollectiveClock


class Part(StrEnum):
    """What a rank does in a step.

    On the CPU, collectives hold the caller, so `COMPUTE` and `COMM` are told apart; `COMM` includes
    waiting for slower peers. On an accelerator both run asynchronously and their sum is reported as
    `COMPUTE_AND_COMM`.
    """

    DATA = "data_s"
    COMPUTE = "compute_s"
    COMM = "comm_s"
    COMPUTE_AND_COMM = "compute_and_comm_s"
    VALIDATE = "validate_s"
    CHECKPOINT = "checkpoint_s"
    OTHER = "other_s"


@dataclass(frozen=True, kw_only=True)
class Window:
    """The steps since the last reading: how many, their mean time, and the mean of each part."""

    steps: int
    step_s: float
    split: dict[str, float]


class StepClock:
    """Adds up the parts of the steps between two readings."""

    def __init__(self, collectives: CollectiveClock, *, separable: bool) -> None:
        self._collectives = collectives
        self._separable = separable
        self._spent: dict[Part, float] = {}
        self._inner = 0.0
        self._since = time.perf_counter()

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """What happens inside counts as this part, but for parts within; `COMPUTE` is split."""
        start, waited = time.perf_counter(), self._collectives.seconds
        around, self._inner = self._inner, 0.0
        yield
        whole = time.perf_counter() - start
        elapsed, self._inner = whole - self._inner, around + whole
        if part is Part.COMPUTE:
            if self._separable:
                comm = self._collectives.seconds - waited
                self._add(Part.COMM, comm)
                elapsed -= comm
            else:
                part = Part.COMPUTE_AND_COMM
        self._add(part, elapsed)

    def read(self, *, steps: int) -> Window:
        """The window that ends now; the next one begins here."""
        now = time.perf_counter()
        whole = now - self._since
        spent = {**self._spent, Part.OTHER: whole - sum(self._spent.values())}
        self._since, self._spent = now, {}
        return Window(
            steps=steps,
            step_s=whole / steps,
            split={part.value: seconds / steps for part, seconds in spent.items()},
        )

    def _add(self, part: Part, seconds: float) -> None:
        self._spent[part] = self._spent.get(part, 0.0) + seconds
