"""Reads what the bucket says about checkpoints; loads no torch, so that login nodes can ask.

There is no `latest` object. The newest commit is derived from the ledger each time, so that no
pointer can ever name half a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from storage.attempts import Attempt
from storage.checkpoint_records import Commit, CommitRef, Loading, SweepJournal
from storage.checkpoints.lineage import counting, trace
from storage.ledger import Ledger
from storage.records import Stage, decode

_COMMIT_NAME = re.compile(r"(\d{12})\.(\d{4,})\.json")


def newest_commit(ledger: Ledger) -> CommitRef | None:
    """The newest commit that counts, or None where there is none: the next intent's `floor`."""
    newest = next(iter_counting(ledger, ledger.attempts(Stage.TRAIN), read_journals(ledger)), None)
    return None if newest is None else newest.ref


def counting_commits(ledger: Ledger, *, ceiling: int | None = None) -> tuple[Commit, ...]:
    """All commits that count, newest first."""
    attempts = ledger.attempts(Stage.TRAIN)
    return tuple(iter_counting(ledger, attempts, read_journals(ledger), ceiling=ceiling))


def iter_counting(
    ledger: Ledger,
    attempts: Iterable[Attempt],
    journals: Iterable[SweepJournal],
    *,
    ceiling: int | None = None,
    also: Iterable[CommitRef] = (),
) -> Iterator[Commit]:
    """The commits that count, newest first, each read only when it is asked for.

    `also` names commits that are looked for by key even where a listing does not show them.
    """
    attempts, journals = tuple(attempts), tuple(journals)
    lineage = trace(attempts)
    places = {*commit_places(ledger), *((ref.step, ref.attempt) for ref in also)}
    for step, attempt in sorted(places, reverse=True):
        if not lineage.admits(attempt=attempt, step=step) or (
            ceiling is not None and step > ceiling
        ):
            continue
        commit = read_commit(ledger, attempt=attempt, step=step)
        if commit is not None and counting([commit.ref], attempts, journals):
            yield commit


def commit_places(ledger: Ledger) -> Iterator[tuple[int, int]]:
    """Step and attempt of every commit object there is, whether it counts or not."""
    places = (commit_place(ledger, info.key) for info in ledger.store.list(ledger.keys.commits))
    return (place for place in places if place is not None)


def commit_place(ledger: Ledger, key: str) -> tuple[int, int] | None:
    """Step and attempt of the commit at this key, or None where a key names no commit."""
    named = _COMMIT_NAME.fullmatch(key.removeprefix(ledger.keys.commits))
    return None if named is None else (int(named[1]), int(named[2]))


def read_commit(ledger: Ledger, *, attempt: int, step: int) -> Commit | None:
    """The commit of this attempt at this step, or None."""
    body = ledger.store.get_if_exists(ledger.keys.commit(attempt, step=step))
    return None if body is None else decode(Commit, body)


def read_journals(ledger: Ledger) -> tuple[SweepJournal, ...]:
    """The journals of all sweeps, finished or not."""
    return tuple(
        decode(SweepJournal, body)
        for info in ledger.store.list(ledger.keys.sweeps)
        if (body := ledger.store.get_if_exists(info.key)) is not None
    )


def read_pins(ledger: Ledger) -> tuple[CommitRef, ...]:
    """What the user asked to keep for good: each pin's object holds the commit it names."""
    return tuple(
        decode(CommitRef, body)
        for info in ledger.store.list(ledger.keys.pins)
        if (body := ledger.store.get_if_exists(info.key)) is not None
    )


def read_loading(ledger: Ledger, attempt: int) -> Loading | None:
    """What an attempt of the training stage means to read, or None before it said so."""
    body = ledger.store.get_if_exists(loading_key(ledger, attempt))
    return None if body is None else decode(Loading, body)


def loading_key(ledger: Ledger, attempt: int) -> str:
    """Key of the marker that a reader puts before it reads the sweep journals."""
    return ledger.keys.attempt_record(Stage.TRAIN, attempt, "loading")
