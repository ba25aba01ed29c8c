"""What a traceback comes down to: the line that names the error, and when two are the same."""

from __future__ import annotations

import re

from storage.records import Exit

TRACEBACK = "Traceback (most recent call last)"

_ROOT_NOISE = re.compile(r"0x[0-9a-fA-F]+|\d{3,}|\[[0-9a-fA-F:.]+\]:\d+|\d+(\.\d+){3}(:\d+)?")
_RANK_LABEL = re.compile(r"^\[rank\d+\]: ?")


def root_of(error: str) -> str:
    """The exception's own line of a traceback, or the first line of anything else."""
    lines = [line for line in error.splitlines() if line.strip()]
    if TRACEBACK not in error:
        return lines[0].strip() if lines else ""
    own = [
        line
        for line in lines
        if not line.startswith(" ") and re.match(r"^[A-Za-z_][\w.]*(:|$)", line)
    ]
    return own[-1].strip() if own else lines[-1].strip()


def logged_root(log: str) -> str:
    """The exception's own line of the last traceback in a log, whatever was written after it.

    Nothing where there is no traceback, or its end is not in the log.
    """
    _, found, rest = log.rpartition(TRACEBACK)
    if not found:
        return ""
    lines = [_RANK_LABEL.sub("", line) for line in rest.splitlines()[1:]]
    return next((line.strip() for line in lines if line.strip() and not line[0].isspace()), "")


def same_root(one: Exit, other: Exit) -> bool:
    """Whether two exits fell over the same thing; addresses and long numbers may differ."""
    first, second = (_ROOT_NOISE.sub("#", root_of(word.error)) for word in (one, other))
    return bool(first) and first == second
