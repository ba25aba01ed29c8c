"""What watches a run: Prefect, a terminal, or nobody. The loop tells; eyes never decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from storage.attempts import Attempt
from storage.records import Stage, StageRecord


class Eyes(Protocol):
    """Told of everything that happens in a run, in order, by the thread that makes it happen."""

    def stage_started(self, stage: Stage, units: Sequence[str]) -> None: ...

    def stage_skipped(self, record: StageRecord) -> None: ...

    def stage_finished(self, record: StageRecord) -> None: ...

    def attempt_opened(self, attempt: Attempt) -> None:
        """An attempt is being watched from now on, whether made here or adopted."""
        ...

    def attempt_state(self, attempt: Attempt, *, state: str, detail: str) -> None:
        """Its job's state changed: pending with a reason, running on nodes, and so on."""
        ...

    def attempt_progress(
        self, attempt: Attempt, *, step: int, numbers: Mapping[str, float]
    ) -> None: ...

    def attempt_log(self, attempt: Attempt, lines: Sequence[str]) -> None: ...

    def attempt_closed(self, attempt: Attempt) -> None: ...

    def say(self, message: str) -> None: ...

    def cancel_requested(self) -> bool:
        """Whether a person asked for this run to be cancelled; polled every few seconds."""
        ...

    def leave_requested(self) -> bool:
        """Whether the engine was asked to go, and to leave its jobs to whoever carries on."""
        ...


class Unseen(Eyes):
    """Eyes that see nothing, for `tick`-like uses and tests."""

    def cancel_requested(self) -> bool:
        return False

    def leave_requested(self) -> bool:
        return False
