"""Pins: checkpoints that a person, or a fork, asked to keep for good.

A pin is an object that names the commit, and so it is to whoever prunes. Those that a person puts
say who, when and why besides; `headrace run --fork` puts its own (docs/decisions/0008).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from storage.checkpoint_records import Commit, CommitRef
from storage.checkpoints.commits import look_at_commit, read_journals
from storage.checkpoints.lineage import journaled
from storage.errors import CheckpointError, StoreError
from storage.keys import RECORD_SUFFIX
from storage.ledger import Ledger
from storage.records import decode, encode


@dataclass(frozen=True, kw_only=True)
class Pin:
    """`pins/<name>.json`. A reader of `CommitRef` finds one in it."""

    step: int
    attempt: int
    save: str
    who: str = ""
    why: str = ""
    at: datetime | None = None

    @property
    def ref(self) -> CommitRef:
        return CommitRef(step=self.step, attempt=self.attempt, save=self.save)


@dataclass(frozen=True, kw_only=True)
class NamedPin:
    """A pin, and the name of its object."""

    name: str
    pin: Pin

    @property
    def is_of_a_person(self) -> bool:
        return self.name == _name(self.pin.ref)

    @property
    def told(self) -> str:
        """`ann, 2026-11-30: for the paper`, or the name where nobody says who."""
        if not self.pin.who:
            return self.name
        when = "" if self.pin.at is None else f", {self.pin.at:%Y-%m-%d}"
        return f"{self.pin.who}{when}{f': {self.pin.why}' if self.pin.why else ''}"


def named_pins(ledger: Ledger) -> tuple[NamedPin, ...]:
    """All pins of the run."""
    return tuple(
        NamedPin(
            name=info.key.removeprefix(ledger.keys.pins).removesuffix(RECORD_SUFFIX), pin=found
        )
        for info, found in ledger.records(Pin, ledger.keys.pins)
    )


def pin(ledger: Ledger, ref: CommitRef, *, who: str, why: str, at: datetime) -> NamedPin:
    """Keep a checkpoint from every pruning to come; the pin that stands, which may be older.

    It stands before the journals are read: of a sweeper and us, one sees the other.

    Raises:
        CheckpointError: it is not there, or a sweep has named it; nothing is pinned then.
    """
    wanted = Pin(step=ref.step, attempt=ref.attempt, save=ref.save, who=who, why=why, at=at)
    key = _key(ledger, _name(ref))
    created = ledger.store.create(key, encode(wanted))
    lost = _lost(ledger, ref)
    if lost is not None:
        if created.won:
            _delete(ledger, [key])
        raise CheckpointError(f"the checkpoint {ref.step}.{ref.attempt} {lost}; pin another one")
    return NamedPin(name=_name(ref), pin=decode(Pin, created.body))


def unpin(ledger: Ledger, pins: tuple[NamedPin, ...]) -> None:
    """Remove these pins."""
    _delete(ledger, [_key(ledger, named.name) for named in pins])


def _lost(ledger: Ledger, ref: CommitRef) -> str | None:
    """Why it is not there to be kept."""
    if ref in journaled(read_journals(ledger)):
        return "was swept: its data are gone or going"
    commit = look_at_commit(ledger, attempt=ref.attempt, step=ref.step)
    is_there = isinstance(commit, Commit) and commit.ref == ref
    return None if is_there else "is not there any more"


def _name(ref: CommitRef) -> str:
    return f"{ref.step:012d}.{ref.attempt:04d}.{ref.save}"


def _key(ledger: Ledger, name: str) -> str:
    return f"{ledger.keys.pins}{name}.json"


def _delete(ledger: Ledger, keys: list[str]) -> None:
    failures = ledger.store.delete(keys)
    if failures:
        raise StoreError(
            f"the store would not delete {failures[0].key!r}: {failures[0].message}; the pin "
            "stands, remove the object by hand or ask for the right to delete"
        )
