"""What an engine remembers that no record tells: how long it has watched in vain, and what was over
when it was asked.

An engine that stays keeps it while it lives. One that does not stay, a tick, is given what the
tick before it knew, so that both decide as one engine would have. All of it may be lost at any
time: then an engine waits as long again as one that was just started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from storage.attempts import Attempt
from storage.records import Stage
from tasks.context import Unit
from tasks.situation import Watch

GAP_S = 60.0
"""The most seconds between two engines that count as watched: nobody looked in a night without
ticks, and what was silent then may have been asleep like everything else."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """An open attempt as last seen; `cancelled_s` is how long ago its job was cancelled then."""

    attempt: Attempt
    watch: Watch
    cancelled_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Sights:
    """The last look at a stage. `at` is None where an outage followed, which counts for nothing."""

    stage: Stage
    at: datetime | None
    attempts: tuple[Sight, ...] = ()

    def watched_s(self, now: datetime) -> float:
        """Seconds from then to now, as far as they count."""
        if self.at is None:
            return 0.0
        return min(GAP_S, max(0.0, (now - self.at).total_seconds()))


class Memory:
    """One request's memory, for all engines that serve it. `changed` hears of what must last."""

    def __init__(
        self,
        *,
        past: Mapping[str, Iterable[int]] | None = None,
        cancels: Iterable[str] | None = None,
        sights: Sights | None = None,
        changed: Callable[[Memory], None] = lambda _: None,
    ) -> None:
        self.past = {key: tuple(numbers) for key, numbers in (past or {}).items()}
        self.cancels = None if cancels is None else frozenset(cancels)
        self.sights = sights
        self._changed = changed

    def past_of(
        self, stage: Stage, units: Sequence[Unit], attempts: Iterable[Attempt]
    ) -> frozenset[int]:
        """The numbers of the units' attempts that had ended when each unit was first asked for."""
        ended = [one for one in attempts if one.end is not None]
        asked = {_key(stage, unit): unit for unit in units}
        new = {
            key: tuple(one.number for one in ended if one.intent.unit == unit.name)
            for key, unit in asked.items()
            if key not in self.past
        }
        if new:
            self.past |= new
            self._changed(self)
        return frozenset(number for key in asked for number in self.past[key])

    def cancels_before(self, read: Callable[[], frozenset[str]]) -> frozenset[str]:
        """The wishes for the end that were there when the request was made: they meant others."""
        if self.cancels is None:
            self.cancels = read()
            self._changed(self)
        return self.cancels

    def recall(self, stage: Stage) -> Sights | None:
        """The last look at the stage, handed out once."""
        if self.sights is None or self.sights.stage is not stage:
            return None
        found, self.sights = self.sights, None
        return found


def _key(stage: Stage, unit: Unit) -> str:
    """A unit that is asked for on other nodes, after some have failed it, is asked for anew."""
    return f"{stage}/{unit.name}@{','.join(unit.node_list)}"
