"""What the ledger shows of one attempt: its intent, and whatever records lie beside it by now.

No record itself: it is put together from them at each look, and the loop decides by it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage.checkpoint_records import Resume
from storage.records import Cancel, End, Exit, ExitCode, Heartbeat, Intent, Start, Submitted


@dataclass(frozen=True, kw_only=True)
class Element:
    """One element of an attempt's array, as far as it has come."""

    number: int
    start: Start | None = None
    exit: Exit | None = None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far an attempt says it is."""

    step: int
    numbers: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt as the ledger shows it: the intent and whatever records lie beside it."""

    intent: Intent
    submitted: Submitted | None = None
    start: Start | None = None
    resume: Resume | None = None
    cancel: Cancel | None = None
    exit: Exit | None = None
    end: End | None = None
    heartbeats: tuple[Heartbeat, ...] = ()
    elements: tuple[Element, ...] = ()

    @property
    def number(self) -> int:
        return self.intent.attempt

    @property
    def is_open(self) -> bool:
        return self.end is None

    @property
    def is_at_work(self) -> bool:
        """Whether it may have a job that waits or runs: none of its records says otherwise."""
        is_void = self.start is not None and self.start.job is None
        return self.end is None and self.exit is None and not is_void

    @property
    def is_array(self) -> bool:
        return self.intent.elements > 1

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where it says that it started: an array's elements each say so themselves."""
        starts = [self.start, *(one.start for one in self.elements)]
        return tuple(dict.fromkeys(node for one in starts if one is not None for node in one.nodes))

    @property
    def unfinished_heartbeats(self) -> tuple[Heartbeat, ...]:
        """Those of whoever has not said its last word."""
        finished = {one.number for one in self.elements if one.exit is not None}
        return tuple(beat for beat in self.heartbeats if beat.element not in finished)

    @property
    def first_failure(self) -> Exit | None:
        """The last word of the element that failed first, where one did.

        One that was only told to end says less than any other.
        """
        told_to_end = {ExitCode.RESUME, ExitCode.FENCED}
        words = [one.exit for one in self.elements if one.exit is not None]
        failures = [word for word in words if word.code != ExitCode.DONE]
        return min(failures, key=lambda word: (word.code in told_to_end, word.at), default=None)

    @property
    def progress(self) -> Progress | None:
        """What its ranks told last: all tell of the same steps, but elements each of their own."""
        told = [(beat.step, beat.numbers) for beat in self.heartbeats if beat.step is not None]
        if not told:
            return None
        if not self.is_array:
            step, numbers = max(told, key=lambda one: one[0])
            return Progress(step=step, numbers=numbers)
        sums: dict[str, float] = {}
        for _, numbers in told:
            sums |= {name: sums.get(name, 0) + value for name, value in numbers.items()}
        return Progress(step=sum(step for step, _ in told), numbers=sums)
