"""How long something takes, as people say it."""

from __future__ import annotations


def spell_duration(seconds: float) -> str:
    """In the largest unit of which there are two: `119 s`, `3 min`, `2 h`, `5 days`."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
