"""What a run's bucket holds of checkpoints, and what of it is in use: one look, as plain data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from storage.attempts import Attempt
from storage.checkpoint_records import Commit, CommitRef, Loading, Reading, SweepJournal
from storage.checkpoints.commits import (
    UnreadableCommit,
    commit_place,
    look_at_commit,
    read_journals,
    read_loading,
    read_pins,
)
from storage.checkpoints.lineage import Place, ceiling_of_next, counting, poisoned
from storage.checkpoints.quarantine import quarantined
from storage.ledger import Ledger
from storage.object_store import ObjectInfo
from storage.records import Stage
from storage.retention.policy import ALWAYS_KEPT, StoredCommit

_SAVE_OBJECT = re.compile(r"(\d{4,})/(\d{12})\.([^/]+)/.+")


@dataclass(frozen=True, kw_only=True)
class Marker:
    """What a reader outside a job put, and whether it still holds."""

    key: str
    reading: Reading
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Commits, the objects of every save, and the records that say what they are worth.

    `doubted` are commits that stand in quarantine or may be poison, `unreadable` the places of
    those that were damaged themselves.
    """

    commits: tuple[StoredCommit, ...]
    saves: Mapping[CommitRef, tuple[ObjectInfo, ...]]
    attempts: tuple[Attempt, ...]
    journals: tuple[SweepJournal, ...]
    pins: tuple[CommitRef, ...]
    loading: Mapping[int, Loading]
    markers: tuple[Marker, ...] = ()
    doubted: Mapping[CommitRef, str] = field(default_factory=dict)
    unreadable: frozenset[Place] = frozenset()

    @property
    def size_bytes(self) -> int:
        return sum(info.size_bytes for objects in self.saves.values() for info in objects)


def take(ledger: Ledger, *, now: datetime, without_sweep: str | None = None) -> Inventory:
    """Looks once. `without_sweep` leaves out the journal of a sweep that is still deciding.

    Data are listed before commits are read: so a save seen here without its commit was not
    committed even later than that. `now` is by the store's clock.
    """
    saves = _saves(ledger)
    attempts = ledger.attempts(Stage.TRAIN)
    loading = {
        attempt.number: marker
        for attempt in attempts
        if (marker := read_loading(ledger, attempt.number)) is not None
    }
    markers = tuple(_markers(ledger, now=now))
    journals = tuple(journal for journal in read_journals(ledger) if journal.sweep != without_sweep)
    written_at, found = {}, []
    for info in ledger.store.list(ledger.keys.commits):
        place = commit_place(ledger, info.key)
        commit = None if place is None else look_at_commit(ledger, step=place[0], attempt=place[1])
        if place is not None and commit is not None:
            written_at[place] = info.last_modified
            found.append(commit)
    doubted = {**poisoned(attempts, written_at), **quarantined(ledger)}
    return Inventory(
        commits=tuple(
            StoredCommit(
                ref=commit.ref,
                written_at=written_at[commit.step, commit.attempt],
                size_bytes=commit.size_bytes,
                counts=commit.ref not in doubted
                and bool(counting([commit.ref], attempts, journals)),
            )
            for commit in found
            if isinstance(commit, Commit)
        ),
        saves=saves,
        attempts=attempts,
        journals=journals,
        pins=read_pins(ledger),
        loading=loading,
        markers=markers,
        doubted=doubted,
        unreadable=frozenset(
            (commit.step, commit.attempt)
            for commit in found
            if isinstance(commit, UnreadableCommit)
        ),
    )


def protected(inventory: Inventory) -> dict[CommitRef, str]:
    """Every checkpoint that must stay, with the reason; pure.

    A reader is done with what it might have read once its resume record is there. What somebody
    doubts stays until somebody decides: a suspicion deletes nothing.
    """
    reasons: dict[CommitRef, str] = {
        ref: "its commit is damaged"
        for ref in inventory.saves
        if (ref.step, ref.attempt) in inventory.unreadable
    }
    reasons |= {ref: f"in doubt: {told}" for ref, told in inventory.doubted.items()}
    for marker in inventory.markers:
        if marker.holds:
            who = marker.reading.who
            reasons |= dict.fromkeys(marker.reading.refs, f"{who} is reading it")
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
    valid = sorted((commit.ref for commit in inventory.commits if commit.counts), reverse=True)
    ceiling = ceiling_of_next(inventory.attempts, valid)
    if ceiling is not None:
        below = [ref for ref in valid if ref.step <= ceiling][:ALWAYS_KEPT]
        reasons |= dict.fromkeys(below, f"a step back has its ceiling at step {ceiling}")
    newest = max(
        (
            attempt
            for attempt in inventory.attempts
            if attempt.resume is not None and not attempt.resume.from_disk
        ),
        key=lambda attempt: attempt.number,
        default=None,
    )
    if newest is not None and newest.resume is not None and newest.resume.source is not None:
        reasons.setdefault(newest.resume.source, "the newest that was loaded and verified")
    return reasons | dict.fromkeys(inventory.pins, "pinned")


def _markers(ledger: Ledger, *, now: datetime) -> Iterator[Marker]:
    for info, reading in ledger.records(Reading, ledger.keys.readers):
        expires_at = info.last_modified + timedelta(seconds=reading.valid_s)
        yield Marker(key=info.key, reading=reading, holds=now <= expires_at)


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
