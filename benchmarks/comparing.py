"""Runs ours and its peers in turn and prints medians, spread and ratios, never a bare absolute."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison. `ratio` is ours ÷ theirs in the row's unit; `goal` bounds it from above."""

    name: str
    unit: str
    ours: float
    peer: str
    theirs: float
    ratio: float
    goal: float | None
    met: bool | None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one contestant, one for each round."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread_s(self) -> float:
        return max(self.seconds) - min(self.seconds)


def alternate(
    contestants: dict[str, Callable[[], object]], *, rounds: int, warmups: int = 1
) -> dict[str, Timing]:
    """Time each contestant once a round, in turn, so that a slow minute hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + warmups):
        for name, act in contestants.items():
            begin = time.perf_counter()
            act()
            if number >= warmups:
                seconds[name].append(time.perf_counter() - begin)
    return {name: Timing(seconds=tuple(taken)) for name, taken in seconds.items()}


def compare(
    name: str, timings: dict[str, Timing], *, ours: str, goal: float | None = None
) -> list[Row]:
    """A row for each peer."""
    mine = timings[ours].median_s
    rows = []
    for peer, timing in timings.items():
        if peer == ours:
            continue
        ratio = mine / timing.median_s
        met = None if goal is None else ratio <= goal
        rows.append(
            Row(
                name=name,
                unit="s",
                ours=mine,
                peer=peer,
                theirs=timing.median_s,
                ratio=ratio,
                goal=goal,
                met=met,
            )
        )
    return rows


def show(rows: Sequence[Row], timings: dict[str, dict[str, Timing]], *, ours: str) -> None:
    table = Table("what", "unit", "peer", "ours", "theirs", "ratio", "goal")
    for row in rows:
        mine, theirs = timings[row.name][ours], timings[row.name][row.peer]
        table.add_row(
            row.name,
            row.unit,
            row.peer,
            f"{row.ours:.3f} ± {mine.spread_s / 2:.3f}",
            f"{row.theirs:.3f} ± {theirs.spread_s / 2:.3f}",
            f"{row.ratio:.2f}",
            "-" if row.goal is None else f"≤ {row.goal:.2f} {'met' if row.met else 'MISSED'}",
        )
    # Where it is no terminal, rich takes a width at which every cell would be broken.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def write_json(rows: Sequence[Row], path: Path) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
