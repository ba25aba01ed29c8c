"""What error texts mean: a table of patterns, most telling first.

Data, apart from the code that reads it, so that a pattern seen on a new cluster is one more line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Sign(StrEnum):
    """What a text is a sign of."""

    OUT_OF_MEMORY = "out of memory"
    PEER_TIMEOUT = "a collective timed out"
    PEER_LOST = "a peer was lost"
    STORAGE = "storage failed"
    HARDWARE = "hardware failed"


@dataclass(frozen=True)
class Pattern:
    """One row: what is looked for, and what it is a sign of."""

    sign: Sign
    regex: re.Pattern[str]


def _rows(sign: Sign, *patterns: str) -> tuple[Pattern, ...]:
    return tuple(Pattern(sign, re.compile(pattern, re.IGNORECASE)) for pattern in patterns)


PATTERNS: tuple[Pattern, ...] = (
    *_rows(
        Sign.OUT_OF_MEMORY,
        r"\bout of memory\b",
        r"\bMemoryError\b",
        r"oom-kill event",
        r"\bcannot allocate memory\b",
        r"DefaultCPUAllocator: can't allocate memory",
    ),
    *_rows(
        Sign.HARDWARE,
        r"uncorrectable (ECC|NVLink) error",
        r"\bXid\b.*\b(48|63|64|74|79|94|95)\b",
        r"GPU has fallen off the bus",
        r"CUDA error: unspecified launch failure",
    ),
    *_rows(
        Sign.STORAGE,
        r"no space left on device",
        r"\binput/output error\b",
        r"stale (NFS )?file handle",
        r"disk quota exceeded",
        r"read-only file system",
    ),
    *_rows(
        Sign.PEER_LOST,
        r"connection (closed by peer|reset by peer|refused)",
        r"ncclRemoteError|ncclSystemError",
        r"broken pipe",
        r"(no route to host|network is unreachable|link (is )?down)",
        r"gloo.*(connect|pair|unbound_buffer|transport).*(error|fail)",
        r"(software caused connection abort|connection timed out)",
        r"(node failure on|heartbeat.*(lost|timed? ?out))",
        r"DistNetworkError|DistBackendError",
    ),
    *_rows(
        Sign.PEER_TIMEOUT,
        r"watchdog caught collective operation timeout",
        r"timed? ?out waiting",
        r"application timeout caused pair closure",
        r"(store|rendezvous).*timed? ?out|timed? ?out.*(store|rendezvous)",
    ),
)


@dataclass(frozen=True)
class Found:
    """A sign and the line that shows it."""

    sign: Sign
    line: str


def find_sign(text: str, *, among: frozenset[Sign] = frozenset(Sign)) -> Found | None:
    """The most telling sign in a text, with the last line that shows it."""
    lines = text.splitlines()
    for pattern in PATTERNS:
        if pattern.sign in among:
            for line in reversed(lines):
                if pattern.regex.search(line):
                    return Found(pattern.sign, line.strip()[:300])
    return None


PEER_SIGNS = frozenset({Sign.PEER_LOST, Sign.PEER_TIMEOUT})


def is_peer_loss(text: str) -> bool:
    """Whether an error only says that another rank went away."""
    return find_sign(text, among=PEER_SIGNS) is not None
