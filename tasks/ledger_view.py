"""One engine's view of a stage's attempts: read once, then kept fresh where things can change."""

from __future__ import annotations

from collections.abc import Collection

from storage.attempts import Attempt
from storage.ledger import Ledger
from storage.records import Stage


class LedgerView:
    """All attempts of a stage in order; those of `units` are read in full, the others by intent."""

    def __init__(self, ledger: Ledger, stage: Stage, units: Collection[str]) -> None:
        self._ledger = ledger
        self._stage = stage
        self._units = frozenset(units)
        self._attempts: list[Attempt] = []

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return tuple(self._attempts)

    @property
    def open_attempts(self) -> tuple[Attempt, ...]:
        return tuple(one for one in self._attempts if self._is_watched(one))

    def refresh(self) -> None:
        """Read what may have changed: open attempts, and numbers that were not there before."""
        for index, attempt in enumerate(self._attempts):
            if self._is_watched(attempt):
                self._attempts[index] = self._ledger.refreshed(attempt)
        while (found := self._ledger.intent(self._stage, len(self._attempts) + 1)) is not None:
            attempt = Attempt(intent=found)
            if found.unit in self._units:
                attempt = self._ledger.refreshed(attempt)
            self._attempts.append(attempt)

    def _is_watched(self, attempt: Attempt) -> bool:
        return attempt.is_open and attempt.intent.unit in self._units
