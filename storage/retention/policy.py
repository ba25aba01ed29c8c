"""Which checkpoints stay, and why: pure, from data to verdicts.

Whatever the spec says, the newest two that count stay, and so does what is pinned, in use or young.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from storage.checkpoint_records import CommitRef
from storage.spec import KeepSpec

ALWAYS_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class StoredCommit:
    """A checkpoint as the store shows it.

    `written_at` is by the store's clock. `counts` says whether it could be resumed from: a commit
    off the lineage, or one that a sweep has named, never can be again.
    """

    ref: CommitRef
    written_at: datetime
    size_bytes: int
    counts: bool = True


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of one checkpoint, with every reason that applies."""

    ref: CommitRef
    size_bytes: int
    keep: bool
    reason: str


def plan(
    commits: Iterable[StoredCommit],
    *,
    protected: Mapping[CommitRef, str],
    keep: KeepSpec,
    grace_s: float,
    now: datetime,
) -> tuple[Verdict, ...]:
    """A verdict for each checkpoint, newest first; the order of `commits` does not matter.

    `protected` gives the reason for each checkpoint that must stay, whether it counts or not.
    `now` is by the store's clock, as the times of the commits are.
    """
    ordered = sorted(commits, key=lambda commit: commit.ref, reverse=True)
    ranking = [commit.ref for commit in ordered if commit.counts]
    places = {ref: place for place, ref in enumerate(ranking, start=1)}
    verdicts = []
    for commit in ordered:
        place = places.get(commit.ref)
        reasons = []
        if place is not None and place <= ALWAYS_KEPT:
            reasons.append(f"newest {ALWAYS_KEPT}")
        if commit.ref in protected:
            reasons.append(protected[commit.ref])
        if now - commit.written_at < timedelta(seconds=grace_s):
            reasons.append("younger than the grace")
        if place is not None and place <= keep.last:
            reasons.append(f"keep.last {keep.last}")
        fallback = "it can never be resumed from" if place is None else "no rule keeps it"
        verdicts.append(
            Verdict(
                ref=commit.ref,
                size_bytes=commit.size_bytes,
                keep=bool(reasons),
                reason=", ".join(reasons) or fallback,
            )
        )
    return tuple(verdicts)
