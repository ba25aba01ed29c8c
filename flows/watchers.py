"""Several eyes on one run, and who looks on beside Prefect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from storage.attempts import Attempt
from storage.records import Stage, StageRecord
from tasks.eyes import Eyes


class AllEyes:
    """Tells several eyes, or none, the same; any of them may ask for the end."""

    def __init__(self, *eyes: Eyes) -> None:
        self._eyes = eyes

    def stage_started(self, stage: Stage, units: Sequence[str]) -> None:
        for eyes in self._eyes:
            eyes.stage_started(stage, units)

    def stage_skipped(self, record: StageRecord) -> None:
        for eyes in self._eyes:
            eyes.stage_skipped(record)

    def stage_finished(self, record: StageRecord) -> None:
        for eyes in self._eyes:
            eyes.stage_finished(record)

    def attempt_opened(self, attempt: Attempt) -> None:
        for eyes in self._eyes:
            eyes.attempt_opened(attempt)

    def attempt_state(self, attempt: Attempt, *, state: str, detail: str) -> None:
        for eyes in self._eyes:
            eyes.attempt_state(attempt, state=state, detail=detail)

    def attempt_progress(
        self, attempt: Attempt, *, step: int, numbers: Mapping[str, float]
    ) -> None:
        for eyes in self._eyes:
            eyes.attempt_progress(attempt, step=step, numbers=numbers)

    def attempt_log(self, attempt: Attempt, lines: Sequence[str]) -> None:
        for eyes in self._eyes:
            eyes.attempt_log(attempt, lines)

    def attempt_closed(self, attempt: Attempt) -> None:
        for eyes in self._eyes:
            eyes.attempt_closed(attempt)

    def say(self, message: str) -> None:
        for eyes in self._eyes:
            eyes.say(message)

    def cancel_requested(self) -> bool:
        return any(eyes.cancel_requested() for eyes in self._eyes)

    def leave_requested(self) -> bool:
        return any(eyes.leave_requested() for eyes in self._eyes)


_LOOKING_ON: ContextVar[tuple[Eyes, ...]] = ContextVar("headrace_looking_on", default=())


@contextmanager
def looking_on(*eyes: Eyes) -> Iterator[None]:
    """Flows called in this block show themselves to `eyes` as well: a flow's parameters are data,
    so a terminal cannot be one of them."""
    token = _LOOKING_ON.set(eyes)
    try:
        yield
    finally:
        _LOOKING_ON.reset(token)


def onlookers() -> tuple[Eyes, ...]:
    return _LOOKING_ON.get()
