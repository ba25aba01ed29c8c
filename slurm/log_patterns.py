"""What error texts mean: a table of patterns, most telling first.

Data, apart from the code that reads it, so that a pattern seen on a new cluster is one more line.
A line is a sign of the first row that it matches: a store's refused connection is no lost peer.
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
    OUTPUT = "the job's folder cannot be written"


@dataclass(frozen=True)
class Pattern:
    """One row: what is looked for, and what it is a sign of."""

    sign: Sign
    regex: re.Pattern[str]


def _rows(sign: Sign, *patterns: str) -> tuple[Pattern, ...]:
    return tuple(Pattern(sign, re.compile(pattern, re.IGNORECASE)) for pattern in patterns)


# Those of NVIDIA's numbers after which the GPU wants a reset, the node a reboot or a repair:
# memory errors and rows that cannot be remapped, NVLink, a GPU off the bus, a dead GSP.
_FATAL_XIDS = "48|63|64|74|79|92|94|95|110|119|120|121|136|140|143|144|145|149|151|154"

PATTERNS: tuple[Pattern, ...] = (
    *_rows(
        Sign.OUT_OF_MEMORY,
        r"\bout of memory\b",
        r"\bMemoryError\b",
        r"oom[-_ ]kill",
        r"\bcannot allocate memory\b",
        r"DefaultCPUAllocator: can't allocate memory",
    ),
    *_rows(
        Sign.HARDWARE,
        r"uncorrectable (ECC|NVLink) error",
        rf"\bXid\b[^:\n]*(\([^)]*\))?: *({_FATAL_XIDS})\b",
        rf"\bXid\b[ =:]*({_FATAL_XIDS})\b",
        r"row[- ]remap\w*.*(fail|pending)",
        r"GPU (has fallen off the bus|is lost|requires (a )?reset)|reboot the system to recover",
        r"unable to determine the device handle for GPU",
        r"no CUDA-capable device is detected|CUDA-capable device\(s\) is/are busy or unavailable",
        r"\[Hardware Error\]|machine check (exception|event)",
        r"node unexpectedly rebooted",
    ),
    *_rows(
        Sign.OUTPUT,
        r"could not open (stdout|stderr|output|std\w+ file)",
        r"launch failed: .*(\bIO\b|I/O|permission denied|no such file)",
    ),
    *_rows(
        Sign.STORAGE,
        r"no space left on device",
        r"\b(input/output|remote I/O) error\b",
        r"stale (NFS )?file handle",
        r"disk quota exceeded",
        r"read-only file system",
        r"cannot send after transport endpoint shutdown",
        r"\bStoreError\b",
        r"an error occurred \((5\d\d|SlowDown|InternalError|ServiceUnavailable|RequestTimeout)\)",
        r"\b(EndpointConnectionError|ConnectTimeoutError|ReadTimeoutError|HTTPConnectionPool|"
        r"HTTPSConnectionPool|could not connect to the endpoint)\b",
        r"\bHTTP[ /0-9.]*(status )?(code )?50[0-4]\b",
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

_ANY = re.compile("|".join(f"(?:{one.regex.pattern})" for one in PATTERNS), re.IGNORECASE)
_RANKING = {sign: place for place, sign in enumerate(dict.fromkeys(p.sign for p in PATTERNS))}


@dataclass(frozen=True)
class Found:
    """A sign and the line that shows it."""

    sign: Sign
    line: str

    @property
    def ranking(self) -> int:
        """How telling it is: the lower, the more."""
        return _RANKING[self.sign]


def sign_of(line: str) -> Sign | None:
    """What a line is a sign of."""
    if not _ANY.search(line):
        return None
    return next((one.sign for one in PATTERNS if one.regex.search(line)), None)


def find_sign(text: str, *, among: frozenset[Sign] = frozenset(Sign)) -> Found | None:
    """The most telling sign in a text, with the last line that shows it."""
    best: Found | None = None
    for line in reversed(text.splitlines()):
        sign = sign_of(line)
        if sign is None or sign not in among:
            continue
        found = Found(sign, line.strip()[:300])
        if best is None or found.ranking < best.ranking:
            best = found
    return best


PEER_SIGNS = frozenset({Sign.PEER_LOST, Sign.PEER_TIMEOUT})


def is_peer_loss(text: str) -> bool:
    """Whether an error only says that another rank went away."""
    return find_sign(text, among=PEER_SIGNS) is not None
