"""The loss of a run as one curve, put together from attempts that each know only their own part."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from storage.checkpoints.lineage import Lineage
from storage.errors import LedgerError


@dataclass(frozen=True, kw_only=True)
class Point:
    """What was measured at one step."""

    step: int
    attempt: int
    loss: float | None
    val_loss: float | None


def read_metrics(body: bytes) -> tuple[Mapping[str, Any], ...]:
    """The lines of one attempt's metrics object.

    Raises:
        LedgerError: a line is no JSON object.
    """
    lines = []
    for number, line in enumerate(body.splitlines(), start=1):
        try:
            found = json.loads(line)
        except ValueError as error:
            raise LedgerError(f"metrics line {number} is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise LedgerError(f"metrics line {number} is no JSON object: {line[:80]!r}")
        lines.append(found)
    return tuple(lines)


def stitch(
    metrics: Mapping[int, Iterable[Mapping[str, Any]]], lineage: Lineage
) -> tuple[Point, ...]:
    """The points that the run's state has really gone through, in the order of their steps.

    What an attempt did after the step at which its successor took over was lost with it, and is
    done again by that successor; so each step is there once.
    """
    points = [
        Point(
            step=int(line["step"]),
            attempt=attempt,
            loss=_number(line.get("loss")),
            val_loss=_number(line.get("val_loss")),
        )
        for attempt, lines in metrics.items()
        for line in lines
        if "step" in line and lineage.admits(attempt=attempt, step=int(line["step"]))
    ]
    return tuple(sorted(points, key=lambda point: (point.step, point.attempt)))


def resumes(points: Sequence[Point]) -> tuple[int, ...]:
    """The first steps after each change of attempt."""
    return tuple(
        after.step for before, after in pairwise(points) if before.attempt != after.attempt
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
