"""What error texts say: of the rank that spoke first, or of another that fell before it did.

The first exit record is often a victim's: a rank that fails takes its peers' connections with it.
So where a record only complains of others, every rank's log is searched for the error before it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from slurm.diagnosis.facts import (
    absent_nodes,
    down_nodes,
    node_words,
    stepped,
    testimony,
    where,
    words,
)
from slurm.evidence import Evidence
from slurm.log_evidence import LogPart
from slurm.log_patterns import PEER_SIGNS, Sign, find_sign, sign_of
from slurm.tracebacks import TRACEBACK, logged_root, root_of
from storage.records import Diagnosis, Kind

_KIND_OF_SIGN = {
    Sign.OUT_OF_MEMORY: Kind.MEMORY,
    Sign.STORAGE: Kind.STORAGE,
    Sign.HARDWARE: Kind.HARDWARE,
    Sign.OUTPUT: Kind.OUTPUT,
}
_CAUSES = frozenset(_KIND_OF_SIGN)
_CHOSEN = re.compile(r"([\w.]+\.)?(JobExit|SystemExit|KeyboardInterrupt)\b")
"""How a rank leaves on purpose, or is told to: a consequence, not a cause."""


def lost_peer(evidence: Evidence) -> Diagnosis | None:
    """Ranks that fell over a peer's silence: the node that went is to blame, not they."""
    found = find_sign(testimony(evidence), among=PEER_SIGNS)
    if found is None:
        return None
    absent = absent_nodes(evidence)
    if not absent and (root := earliest_error(evidence)) is not None:
        return root
    said = words(f"{where(evidence.attempt.exit)}{found.line}", *node_words(evidence, absent))
    if any(name in absent for name in down_nodes(evidence)):
        return Diagnosis(kind=Kind.HARDWARE, culprit_nodes=absent, evidence=said)
    kind = Kind.CASCADE if found.sign is Sign.PEER_TIMEOUT and not absent else Kind.NETWORK
    return Diagnosis(kind=kind, culprit_nodes=absent, evidence=said)


def signs(evidence: Evidence) -> Diagnosis | None:
    """A cause that the testimony itself names."""
    word = evidence.attempt.exit
    found = find_sign(testimony(evidence), among=_CAUSES)
    if found is None:
        return None
    kind = _KIND_OF_SIGN[found.sign]
    culprits = (word.node,) if kind is Kind.HARDWARE and word is not None else ()
    return Diagnosis(
        kind=kind,
        culprit_nodes=tuple(node for node in evidence.nodes if node in culprits),
        evidence=words(f"{where(word)}{found.line}"),
    )


@dataclass(frozen=True, kw_only=True)
class _Error:
    """An error in a log that complains of nobody else. `sign` is None for a traceback's root."""

    part: LogPart
    sign: Sign | None
    line: str
    at: datetime | None

    @property
    def weight(self) -> int:
        """A cause that a pattern names says more than a traceback."""
        return 1 if self.sign is None else 0


def earliest_error(evidence: Evidence, *, cut_off: Collection[str] = ()) -> Diagnosis | None:
    """The first error in the logs that blames no peer, and what kind of end it makes.

    Lines are put in order by the times that they carry, where all of them do. That a node which is
    `cut_off` does not reach the store either is a consequence.
    """
    errors = [
        one
        for part in evidence.logs
        for one in _errors(part)
        if not (one.sign is Sign.STORAGE and part.node in cut_off)
    ]
    if not errors:
        return None
    times = [one.at for one in errors if one.at is not None]
    if len(times) == len(errors):
        first = min(errors, key=lambda one: (one.at is None, one.at, one.weight))
    else:
        first = min(errors, key=lambda one: one.weight)
    return _verdict(evidence, first)


def _errors(part: LogPart) -> Iterator[_Error]:
    lines = part.text.splitlines()
    for line in lines:
        sign = sign_of(line)
        if sign in _CAUSES:
            yield _Error(part=part, sign=sign, line=line, at=_time_of(line))
            break
    root = logged_root(part.text)
    if root and sign_of(root) is None and not _CHOSEN.match(root):
        stamped = (at for line in lines if (at := _time_of(line)) is not None)
        yield _Error(part=part, sign=None, line=root, at=next(stamped, None))


def _verdict(evidence: Evidence, error: _Error) -> Diagnosis:
    part = error.part
    place = f"{part.name}: " if part.name else ""
    said = words(f"{place}{error.line.strip()}")
    if error.sign is None:
        kind = Kind.CODE if is_bug(error.line) and not stepped(evidence) else Kind.UNKNOWN
        return Diagnosis(kind=kind, evidence=said)
    found = Diagnosis(kind=_KIND_OF_SIGN[error.sign], evidence=said)
    if found.kind is not Kind.HARDWARE or part.node is None:
        return found
    # A log may be named by its node's short name.
    short = part.node.partition(".")[0]
    culprits = tuple(node for node in evidence.nodes if node.partition(".")[0] == short)
    return replace(found, culprit_nodes=culprits)


_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")


def _time_of(line: str) -> datetime | None:
    """The time at which a line was written, where it begins with one; clocks agree to a second."""
    found = _TIME.search(line[:60])
    if found is None:
        return None
    day, clock, fraction = found.groups()
    try:
        return datetime.fromisoformat(f"{day}T{clock}.{(fraction or '0'):0<6}")
    except ValueError:
        return None


_BUG = re.compile(
    r"^(?:[\w.]*\.)?(ArithmeticError|AssertionError|AttributeError|ImportError|IndentationError|"
    r"IndexError|KeyError|LookupError|ModuleNotFoundError|NameError|NotImplementedError|"
    r"SyntaxError|TypeError|UnboundLocalError|ValidationError|ValueError|ZeroDivisionError)\b"
)
_SHAPE = re.compile(
    r"size mismatch|shapes? .*(cannot|mismatch|incompatible)|mat1 and mat2|must match the size|"
    r"expected .* dimension",
    re.IGNORECASE,
)


def is_bug(root: str) -> bool:
    """Whether an error is of a kind that no other node and no other hour would change."""
    return bool(_BUG.match(root) or _SHAPE.search(root))


def bug_before_the_first_step(evidence: Evidence) -> Diagnosis | None:
    word = evidence.attempt.exit
    if word is None or TRACEBACK not in word.error:
        return None
    root = root_of(word.error)
    if stepped(evidence) or not is_bug(root):
        return None
    return Diagnosis(kind=Kind.CODE, evidence=words(f"{where(word)}{root}"))
