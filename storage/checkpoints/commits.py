"""Reads what the bucket says about checkpoints; loads no torch, so that login nodes can ask.

There is no `latest` object. The newest commit is derived from the ledger each time, so that no
pointer can ever name half a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from storage.attempts import Attempt
from storage.checkpoint_records import Commit, CommitRef, Loading, SweepJournal
from storage.checkpoints.lineage import Place, counting, trace
from storage.checkpoints.sealing import DamagedRecordError, decode_sealed
from storage.ledger import Ledger
from storage.records import Stage, decode

_COMMIT_NAME = re.compile(r"(\d{12})\.(\d{4,})\.json")


@dataclass(frozen=True, kw_only=True)
class UnreadableCommit:
    """A commit object that stands and is not as it was written: it never counts, nor is it silent.

    Its save is not known, as only the object would tell.
    """

    step: int
    attempt: int
    fault: str


def newest_commit(ledger: Ledger) -> CommitRef | None:
    """The newest commit that counts, or None where there is none: the next intent's `floor`."""
    newest = next(iter_counting(ledger, ledger.outlines(Stage.TRAIN), read_journals(ledger)), None)
    return None if newest is None else newest.ref


def counting_commits(ledger: Ledger, *, ceiling: int | None = None) -> tuple[Commit, ...]:
    """All commits that count, newest first."""
    attempts = ledger.outlines(Stage.TRAIN)
    return tuple(iter_counting(ledger, attempts, read_journals(ledger), ceiling=ceiling))


def iter_counting(
    ledger: Ledger,
    attempts: Iterable[Attempt],
    journals: Iterable[SweepJournal],
    *,
    ceiling: int | None = None,
) -> Iterator[Commit]:
    """The commits that count, newest first, each read only when it is asked for.

    One that cannot be read is left out; `iter_commits` tells of it.
    """
    found = iter_commits(ledger, attempts, journals, ceiling=ceiling)
    return (commit for commit in found if isinstance(commit, Commit))


def iter_commits(
    ledger: Ledger,
    attempts: Iterable[Attempt],
    journals: Iterable[SweepJournal],
    *,
    ceiling: int | None = None,
    places: Iterable[Place] | None = None,
    also: Iterable[CommitRef] = (),
) -> Iterator[Commit | UnreadableCommit]:
    """The commits that count, and those that might if they could be read; newest first.

    `places` is what `commit_places` gave, where the caller has asked already. `also` names commits
    that are looked for by key even where a listing does not show them.
    """
    attempts, journals = tuple(attempts), tuple(journals)
    lineage = trace(attempts)
    listed = commit_places(ledger) if places is None else places
    for step, attempt in sorted(
        {*listed, *((ref.step, ref.attempt) for ref in also)}, reverse=True
    ):
        if not lineage.admits(attempt=attempt, step=step) or (
            ceiling is not None and step > ceiling
        ):
            continue
        commit = look_at_commit(ledger, attempt=attempt, step=step)
        if isinstance(commit, UnreadableCommit) or (
            commit is not None and counting([commit.ref], attempts, journals)
        ):
            yield commit


def readable_commits(ledger: Ledger) -> tuple[Commit, ...]:
    """Every commit that there is and that can be read, whether it counts or not, oldest first."""
    found = (look_at_commit(ledger, step=s, attempt=a) for s, a in sorted(commit_places(ledger)))
    return tuple(commit for commit in found if isinstance(commit, Commit))


def commit_places(ledger: Ledger) -> Iterator[Place]:
    """Step and attempt of every commit object there is, whether it counts or not."""
    places = (commit_place(ledger, info.key) for info in ledger.store.list(ledger.keys.commits))
    return (place for place in places if place is not None)


def commit_place(ledger: Ledger, key: str) -> Place | None:
    """Step and attempt of the commit at this key, or None where a key names no commit."""
    named = _COMMIT_NAME.fullmatch(key.removeprefix(ledger.keys.commits))
    return None if named is None else (int(named[1]), int(named[2]))


def read_commit(ledger: Ledger, *, attempt: int, step: int) -> Commit | None:
    """The commit of this attempt at this step, or None.

    Raises:
        DamagedRecordError: it is not as it was written, or lies where another one belongs.
    """
    key = ledger.keys.commit(attempt, step=step)
    body = ledger.store.get_if_exists(key)
    if body is None:
        return None
    try:
        commit = decode_sealed(Commit, body)
    except DamagedRecordError as fault:
        raise DamagedRecordError(f"the commit at {key!r} is damaged: {fault}") from None
    if (commit.run, commit.attempt, commit.step) != (ledger.keys.run, attempt, step):
        raise DamagedRecordError(
            f"the commit at {key!r} is that of run {commit.run!r}, attempt {commit.attempt}, step "
            f"{commit.step}: it was put there by mistake"
        )
    return commit


def look_at_commit(ledger: Ledger, *, attempt: int, step: int) -> Commit | UnreadableCommit | None:
    """As `read_commit`, but a damaged one is an answer like any other."""
    try:
        return read_commit(ledger, attempt=attempt, step=step)
    except DamagedRecordError as fault:
        return UnreadableCommit(step=step, attempt=attempt, fault=str(fault))


def read_journals(ledger: Ledger) -> tuple[SweepJournal, ...]:
    """The journals of all sweeps, finished or not."""
    return tuple(journal for _, journal in ledger.records(SweepJournal, ledger.keys.sweeps))


def read_pins(ledger: Ledger) -> tuple[CommitRef, ...]:
    """What the user asked to keep for good: each pin's object holds the commit it names."""
    return tuple(ref for _, ref in ledger.records(CommitRef, ledger.keys.pins))


def read_loading(ledger: Ledger, attempt: int) -> Loading | None:
    """What an attempt of the training stage means to read, or None before it said so."""
    body = ledger.store.get_if_exists(loading_key(ledger, attempt))
    return None if body is None else decode(Loading, body)


def loading_key(ledger: Ledger, attempt: int) -> str:
    """Key of the marker that a reader puts before it reads the sweep journals."""
    return ledger.keys.attempt_record(Stage.TRAIN, attempt, "loading")
