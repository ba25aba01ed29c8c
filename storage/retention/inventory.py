"""What a run's bucket holds of checkpoints, and what of it is in use: one look, as plain data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from storage.attempts import Attempt
from storage.checkpoint_records import Commit, CommitRef, Loading, SweepJournal
from storage.checkpoints.commits import (
    commit_place,
    look_at_commit,
    read_journals,
    read_loading,
    read_pins,
)
from storage.checkpoints.lineage import counting
from storage.ledger import Ledger
from storage.object_store import ObjectInfo
from storage.records import Stage
from storage.retention.policy import StoredCommit

_SAVE_OBJECT = re.compile(r"(\d{4,})/(\d{12})\.([^/]+)/.+")


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Commits, the objects of every save, and the records that say what they are worth."""

    commits: tuple[StoredCommit, ...]
    saves: Mapping[CommitRef, tuple[ObjectInfo, ...]]
    attempts: tuple[Attempt, ...]
    journals: tuple[SweepJournal, ...]
    pins: tuple[CommitRef, ...]
    loading: Mapping[int, Loading]

    @property
    def size_bytes(self) -> int:
        return sum(info.size_bytes for objects in self.saves.values() for info in objects)


def take(ledger: Ledger, *, without_sweep: str | None = None) -> Inventory:
    """Looks once. `without_sweep` leaves out the journal of a sweep that is still deciding.

    Data are listed before commits are read: so a save seen here without its commit was not
    committed even later than that.
    """
    saves = _saves(ledger)
    attempts = ledger.attempts(Stage.TRAIN)
    loading = {
        attempt.number: marker
        for attempt in attempts
        if (marker := read_loading(ledger, attempt.number)) is not None
    }
    journals = tuple(journal for journal in read_journals(ledger) if journal.sweep != without_sweep)
    return Inventory(
        commits=tuple(_commits(ledger, attempts, journals)),
        saves=saves,
        attempts=attempts,
        journals=journals,
        pins=read_pins(ledger),
        loading=loading,
    )


def protected(inventory: Inventory) -> dict[CommitRef, str]:
    """Every checkpoint that must stay, with the reason; pure.

    A reader is done with what it might have read once its resume record is there.
    """
    reasons: dict[CommitRef, str] = {}
    for attempt in inventory.attempts:
        number = attempt.number
        if attempt.end is not None:
            continue
        if attempt.resume is not None:
            if attempt.resume.source is not None:
                reasons[attempt.resume.source] = f"attempt {number} resumed from it"
            continue
        if number in inventory.loading:
            candidates = inventory.loading[number].candidates
            reasons |= dict.fromkeys(candidates, f"attempt {number} may be reading it")
        if attempt.intent.floor is not None:
            reasons[attempt.intent.floor] = f"the floor of attempt {number}"
    newest = max(
        (attempt for attempt in inventory.attempts if attempt.resume is not None),
        key=lambda attempt: attempt.number,
        default=None,
    )
    if newest is not None and newest.resume is not None and newest.resume.source is not None:
        reasons.setdefault(newest.resume.source, "the newest that was loaded and verified")
    return reasons | dict.fromkeys(inventory.pins, "pinned")


def _commits(
    ledger: Ledger, attempts: tuple[Attempt, ...], journals: tuple[SweepJournal, ...]
) -> Iterator[StoredCommit]:
    for info in ledger.store.list(ledger.keys.commits):
        place = commit_place(ledger, info.key)
        commit = None if place is None else look_at_commit(ledger, step=place[0], attempt=place[1])
        if isinstance(commit, Commit):
            yield StoredCommit(
                ref=commit.ref,
                written_at=info.last_modified,
                size_bytes=commit.size_bytes,
                counts=bool(counting([commit.ref], attempts, journals)),
            )


def _saves(ledger: Ledger) -> dict[CommitRef, tuple[ObjectInfo, ...]]:
    """The objects of every save, whole or not; a key of any other form is nobody's to delete."""
    saves: dict[CommitRef, list[ObjectInfo]] = {}
    root = f"{ledger.keys.checkpoints}data/"
    for info in ledger.store.list(root):
        named = _SAVE_OBJECT.fullmatch(info.key.removeprefix(root))
        if named is not None:
            ref = CommitRef(step=int(named[2]), attempt=int(named[1]), save=named[3])
            saves.setdefault(ref, []).append(info)
    return {ref: tuple(objects) for ref, objects in saves.items()}
