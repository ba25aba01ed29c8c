"""USR2 and TERM ask the job to save and leave; the handler only notes that it was asked.

A save is collective, so it cannot happen in a handler, which runs on one rank at whatever moment:
the flag is summed over the ranks with the step's other numbers, and all leave at the same step.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


class StopFlag:
    """Whether this rank was asked to leave, and by what."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    @property
    def is_set(self) -> bool:
        return self.received is not None

    def __str__(self) -> str:
        """Who asked, as far as this rank knows: the wish of another one has no name here."""
        return "asked to leave" + ("" if self.received is None else f" by {self.received.name}")

    def set(self, number: int, _frame: FrameType | None = None) -> None:
        self.received = signal.Signals(number)


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Listens for the signals; the handlers from before are put back at the end."""
    flag = StopFlag()
    before = {number: signal.signal(number, flag.set) for number in SIGNALS}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
