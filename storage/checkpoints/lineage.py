"""Which commits count: fencing by lineage instead of by locks.

An attempt writes only below its own number, so a zombie can never overwrite what a newer attempt
relies on. Whether its commits mean anything is decided here, by whoever reads: pure, and the same
for resuming and for pruning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storage.attempts import Attempt
from storage.checkpoint_records import CommitRef, SweepJournal
from storage.errors import LedgerError
from storage.records import Action, Kind

Place = tuple[int, int]
"""Step and attempt of a commit: all of its key that is the run's own."""

POISONED_AFTER = 3
POISONING = frozenset({Kind.CODE, Kind.NUMERIC, Kind.HANG})
"""Ends that what was loaded may have caused. Lost nodes and preemptions say nothing about it."""


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """The chain of attempts that the newest one descends from.

    `last_steps` gives, for each attempt of the chain, the step at which its successor took over;
    None for the newest, which nobody has taken over from.
    """

    last_steps: Mapping[int, int | None]

    def admits(self, *, attempt: int, step: int) -> bool:
        """Whether a commit of this attempt at this step lies on the chain."""
        if attempt not in self.last_steps:
            return False
        last = self.last_steps[attempt]
        return last is None or step <= last


def trace(attempts: Iterable[Attempt]) -> Lineage:
    """Follows the resume records back from the newest attempt that has one.

    An attempt without a resume record still queues, or died before it loaded: it changes nothing.

    Raises:
        LedgerError: a resume record names a source that cannot have been committed.
    """
    resumes = {attempt.number: attempt.resume for attempt in attempts if attempt.resume is not None}
    last_steps: dict[int, int | None] = {}
    number = max(resumes, default=None)
    last: int | None = None
    while number is not None:
        last_steps[number] = last
        source = resumes[number].source
        if source is None:
            break
        if source.attempt >= number or source.attempt not in resumes:
            raise LedgerError(
                f"attempt {number} says it resumed from attempt {source.attempt}, which "
                + ("is not older" if source.attempt >= number else "never wrote a resume record")
                + "; the run's ledger has been altered, restore it or start a run under a new name"
            )
        number, last = source.attempt, source.step
    return Lineage(last_steps=last_steps)


def journaled(journals: Iterable[SweepJournal]) -> frozenset[CommitRef]:
    """All saves that some sweeper has named; none of them ever counts again."""
    return frozenset(ref for journal in journals for ref in journal.refs)


def counting(
    commits: Iterable[CommitRef],
    attempts: Iterable[Attempt],
    journals: Iterable[SweepJournal],
    *,
    ceiling: int | None = None,
) -> tuple[CommitRef, ...]:
    """The commits that count, newest first.

    `attempts` are those of the training stage. `ceiling` is the highest step that a rollback left
    standing.
    """
    lineage = trace(attempts)
    swept = journaled(journals)
    found = {
        ref
        for ref in commits
        if lineage.admits(attempt=ref.attempt, step=ref.step)
        and ref not in swept
        and (ceiling is None or ref.step <= ceiling)
    }
    return tuple(sorted(found, reverse=True))


def owed(attempts: Iterable[Attempt]) -> Attempt | None:
    """The last of `attempts` where it carries a step back that none of them has honoured.

    An order, which the end of an attempt gives, is carried on by each later intent until one of
    these attempts has resumed; whichever does, does so at or below the ceiling.
    """
    last: Attempt | None = None
    for attempt in sorted(attempts, key=lambda each: each.number, reverse=True):
        if last is not None and _orders_step_back(attempt):
            break
        if attempt.resume is not None:
            return None
        last = last or attempt
    return last


def ceiling_of_next(attempts: Iterable[Attempt], commits: Iterable[CommitRef]) -> int | None:
    """The step beyond which the attempt that follows `attempts` may load nothing, if any.

    `commits` are those that count.
    """
    known = tuple(attempts)
    carrier = owed(known)
    carried = None if carrier is None else carrier.intent.ceiling
    last = max(known, key=lambda each: each.number, default=None)
    if last is None or not _orders_step_back(last):
        return carried
    standing = sorted(commits, reverse=True)
    ordered = standing[1].step if len(standing) > 1 else 0
    return ordered if carried is None else min(ordered, carried)


def _orders_step_back(attempt: Attempt) -> bool:
    return attempt.end is not None and attempt.end.decision.action is Action.STEP_BACK


def poisoned(
    attempts: Iterable[Attempt], places: Iterable[Place], *, fingerprint: str | None = None
) -> dict[CommitRef, str]:
    """Checkpoints after whose loading nothing ever went well, with the reason.

    One is so when `POISONED_AFTER` attempts that resumed from it came to an end that it may have
    caused, and none of those that resumed from it has committed anything. With a `fingerprint`,
    only the ends of attempts made from that spec and code count: a bug that was mended since is no
    reason to throw work away.
    """
    committed = {attempt for _, attempt in places}
    loads: dict[CommitRef, list[Attempt]] = {}
    for attempt in attempts:
        if attempt.resume is not None and attempt.resume.source is not None:
            loads.setdefault(attempt.resume.source, []).append(attempt)
    reasons = {}
    for ref, loaders in loads.items():
        bad = sorted(
            (each.number, each.end.diagnosis.kind.value)
            for each in loaders
            if each.end is not None
            and each.end.diagnosis.kind in POISONING
            and fingerprint in (None, each.intent.fingerprint)
        )
        if len(bad) >= POISONED_AFTER and not any(each.number in committed for each in loaders):
            told = ", ".join(f"{number} ({kind})" for number, kind in bad)
            reasons[ref] = f"attempts {told} loaded it and failed without a newer commit"
    return reasons
