"""How a stage ends without its result, as its callers and a person see it."""

from __future__ import annotations

from pathlib import Path

from storage.attempts import Attempt
from storage.errors import HeadraceError, StageFailed
from storage.records import Stage


class AttemptFailed(StageFailed):
    """A unit of a stage has no result. `attempt` decided it; None where none could be made."""

    def __init__(
        self, *, stage: Stage, unit: str, reason: str, attempt: Attempt | None, folder: Path | None
    ) -> None:
        self.stage = stage
        self.unit = unit
        self.attempt = attempt
        self.folder = folder
        told = f"{stage}: unit {unit} failed: {reason}"
        if attempt is not None and attempt.end is not None:
            told += f"\nattempt {attempt.number} ended as {attempt.end.diagnosis.message}"
        if folder is not None:
            told += f"\nits logs are in {folder}"
        super().__init__(told)


class RunCancelled(HeadraceError):
    """A person ended the run: no failure, and nothing to retry until it is asked for again."""
