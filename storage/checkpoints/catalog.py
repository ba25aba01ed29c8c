"""All checkpoints that a run's bucket shows, and what each is worth, in plain words.

`gather` reads, the rest is pure. Data without a commit are entries as well: whoever looks must see
every byte that is stored, whole or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from storage.attempts import Attempt
from storage.checkpoint_records import Commit, CommitRef, Quarantine
from storage.checkpoints.commits import UnreadableCommit, look_at_commit
from storage.checkpoints.lineage import (
    Lineage,
    Place,
    ceiling_of_next,
    journaled,
    trace,
)
from storage.checkpoints.pins import NamedPin, named_pins
from storage.checkpoints.quarantine import read_doubts
from storage.errors import SpecError
from storage.ledger import Ledger
from storage.object_store import ObjectInfo
from storage.retention.inventory import Inventory, take

READ_THREADS = 16
NEAREST_SHOWN = 4
UNKNOWN_SAVE = "?"


class State(StrEnum):
    """What a checkpoint is worth."""

    COUNTS = "counts"
    DOUBTED = "quarantined"
    STEPPED_BACK = "stepped back from"
    OFF_LINEAGE = "off the lineage"
    DAMAGED = "damaged commit"
    SWEPT = "swept"
    GONE = "gone"
    WRITING = "being written"
    ORPHANED = "orphaned"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One save. `size_bytes` and `objects` are of its data in the store now, committed or not.

    `at` is by the store's clock; `commit` is None where there is none, or none that can be read.
    `notes` say why its state is what it is, and what else is known of it.
    """

    ref: CommitRef
    state: State
    notes: tuple[str, ...]
    size_bytes: int
    objects: int
    at: datetime | None
    commit: Commit | None
    is_newest: bool = False
    pins: tuple[NamedPin, ...] = ()
    doubts: tuple[Quarantine, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.ref.step}.{self.ref.attempt}"

    @property
    def has_commit(self) -> bool:
        return self.commit is not None and self.state is not State.SWEPT

    @property
    def against(self) -> str | None:
        """Why no job may load it, where that is a fault and not its place: often a long text."""
        return self.notes[0] if self.state in (State.DOUBTED, State.DAMAGED) else None


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """All saves, newest first, and the looks that they were made from."""

    entries: tuple[Entry, ...]
    inventory: Inventory

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return self.inventory.attempts


def gather(ledger: Ledger) -> Catalog:
    """The run's checkpoints as the bucket shows them now."""
    now = ledger.store.now()
    inventory = take(ledger, now=now)
    readable = [(stored.ref.step, stored.ref.attempt) for stored in inventory.commits]

    def look(place: Place) -> Commit | UnreadableCommit | None:
        return look_at_commit(ledger, step=place[0], attempt=place[1])

    with ThreadPoolExecutor(READ_THREADS) as pool:
        found = list(pool.map(look, [*readable, *inventory.unreadable]))
    commits = {commit.ref: commit for commit in found if isinstance(commit, Commit)}
    return Catalog(
        entries=entries(
            inventory,
            now=now,
            commits=commits,
            faults={
                (one.step, one.attempt): one.fault
                for one in found
                if isinstance(one, UnreadableCommit)
            },
            pins=named_pins(ledger),
            doubts=read_doubts(ledger),
        ),
        inventory=inventory,
    )


def entries(
    inventory: Inventory,
    *,
    now: datetime,
    commits: Mapping[CommitRef, Commit],
    faults: Mapping[Place, str],
    pins: Sequence[NamedPin],
    doubts: Sequence[Quarantine],
) -> tuple[Entry, ...]:
    """An entry for each save that the store or a record names, newest first.

    `now` is when the inventory was begun, by the store's clock; `faults` are those of damaged
    commits.
    """
    lineage, swept = trace(inventory.attempts), journaled(inventory.journals)
    ceiling = ceiling_of_next(
        inventory.attempts, (stored.ref for stored in inventory.commits if stored.counts)
    )
    written_at = {stored.ref: stored.written_at for stored in inventory.commits}
    found: list[Entry] = []
    has_newest = False
    for ref in sorted({*commits, *inventory.saves, *swept, *_nameless(inventory)}, reverse=True):
        objects = inventory.saves.get(ref, ())
        state, reason = _state(
            ref, inventory, lineage=lineage, swept=swept, commits=commits, faults=faults
        )
        if state is State.COUNTS and ceiling is not None and ref.step > ceiling:
            state = State.STEPPED_BACK
            reason = f"the next attempt loads nothing beyond step {ceiling}"
        times = [written_at[ref]] if ref in written_at else [one.last_modified for one in objects]
        entry = Entry(
            ref=ref,
            state=state,
            notes=(reason,) if reason else (),
            size_bytes=sum(one.size_bytes for one in objects),
            objects=len(objects),
            at=max(times, default=None),
            commit=commits.get(ref),
            is_newest=state is State.COUNTS and not has_newest,
            pins=tuple(named for named in pins if _is_of(named.pin.ref, ref)),
            doubts=tuple(doubt for doubt in doubts if _is_of(doubt.ref, ref)),
        )
        has_newest |= entry.is_newest
        notes = [*entry.notes, *_notes(entry, inventory)]
        # All data of one that was committed before they were listed was there by then.
        if entry.has_commit and written_at.get(ref, now) < now:
            notes += _lacking(entry, objects)
        found.append(replace(entry, notes=tuple(notes)))
    return tuple(found)


def matching(catalog: Catalog, text: str) -> tuple[Entry, ...]:
    """The entries, of whatever state, that `text` may name.

    Raises:
        SpecError: it names neither a step nor a step and an attempt.
    """
    step, attempt = parse_place(text)
    return tuple(
        entry
        for entry in catalog.entries
        if entry.ref.step == step and attempt in (None, entry.ref.attempt)
    )


def parse_place(text: str) -> tuple[int, int | None]:
    """`4000` or `4000.3`, a step and perhaps an attempt.

    Raises:
        SpecError: it is neither.
    """
    step, dot, attempt = text.partition(".")
    if not (step.isdecimal() and (attempt.isdecimal() if dot else True)):
        raise SpecError(
            f"STEP {text!r} must be a step such as 4000, or a step and an attempt such as 4000.3; "
            "`headrace checkpoints ls` lists them"
        )
    return int(step), int(attempt) if dot else None


def find(catalog: Catalog, text: str | None, *, run: str, or_pinned: bool = False) -> Entry:
    """The committed checkpoint that `text` names, by default the newest that counts.

    With `or_pinned` a pinned one will do, too, whatever became of its commit.

    Raises:
        SpecError: there is none, or there are several.
    """

    def will_do(entry: Entry) -> bool:
        return entry.has_commit or (or_pinned and bool(entry.pins))

    committed = [entry for entry in catalog.entries if will_do(entry)]
    if text is None:
        newest = next((entry for entry in committed if entry.is_newest), None)
        if newest is None:
            raise SpecError(
                f"run {run!r} has no checkpoint that counts; "
                + (f"name another one: {_listed(committed)}" if committed else "none was committed")
            )
        return newest
    alike = matching(catalog, text)
    named = [entry for entry in alike if will_do(entry)]
    if len(named) > 1:
        raise SpecError(
            f"STEP {text} is ambiguous: {len(named)} attempts of run {run!r} committed it; name "
            "one: " + ", ".join(f"{entry.name} ({entry.state})" for entry in named)
        )
    if named:
        return named[0]
    told = "".join(f"; {_told(entry)}" for entry in alike)
    if not committed:
        raise SpecError(f"STEP {text}: run {run!r} has no committed checkpoint{told}")
    step, _ = parse_place(text)
    nearest = sorted(committed, key=lambda entry: abs(entry.ref.step - step))[:NEAREST_SHOWN]
    raise SpecError(
        f"STEP {text}: run {run!r} has no such checkpoint{told}; the nearest: {_listed(nearest)}"
    )


def _listed(found: Sequence[Entry]) -> str:
    shown = sorted(found[:NEAREST_SHOWN], key=lambda entry: entry.ref)
    return ", ".join(f"{entry.name} ({entry.state})" for entry in shown)


def _told(entry: Entry) -> str:
    if entry.state is State.DAMAGED:
        return f"{entry.name} cannot be read: {entry.against}"
    return f"{entry.name} is {entry.state}"


def _is_of(named: CommitRef, ref: CommitRef) -> bool:
    """Whether a record that names a commit is of this one, whose save may be unknown."""
    return named == ref or replace(named, save=UNKNOWN_SAVE) == ref


def _nameless(inventory: Inventory) -> set[CommitRef]:
    """Commits that cannot be read and that have no data: nothing tells the name of their save."""
    with_data = {(ref.step, ref.attempt) for ref in inventory.saves}
    return {
        CommitRef(step=step, attempt=attempt, save=UNKNOWN_SAVE)
        for step, attempt in inventory.unreadable - with_data
    }


def _state(
    ref: CommitRef,
    inventory: Inventory,
    *,
    lineage: Lineage,
    swept: frozenset[CommitRef],
    commits: Mapping[CommitRef, Commit],
    faults: Mapping[Place, str],
) -> tuple[State, str]:
    """What a save is worth, and why."""
    if ref in swept:
        is_left = ref in commits or ref in inventory.saves
        return (State.SWEPT, "the next sweep takes what is left") if is_left else (State.GONE, "")
    if ref not in commits:
        return _uncommitted(ref, inventory, faults)
    if not lineage.admits(attempt=ref.attempt, step=ref.step):
        return State.OFF_LINEAGE, _overtaken(ref, lineage)
    if ref in inventory.doubted:
        return State.DOUBTED, inventory.doubted[ref]
    return State.COUNTS, ""


def _uncommitted(
    ref: CommitRef, inventory: Inventory, faults: Mapping[Place, str]
) -> tuple[State, str]:
    place = (ref.step, ref.attempt)
    if place in inventory.unreadable:
        # Another look may find it mended, or gone.
        return State.DAMAGED, faults.get(place, "its commit was not as it was written")
    ended = {attempt.number for attempt in inventory.attempts if attempt.end is not None}
    if ref.attempt in ended:
        return State.ORPHANED, f"no commit, and attempt {ref.attempt} has ended"
    return State.WRITING, "no commit yet"


def _overtaken(ref: CommitRef, lineage: Lineage) -> str:
    """Why nothing descends from this commit: a zombie's, or later than where others went on."""
    last = lineage.last_steps.get(ref.attempt)
    chain = sorted(lineage.last_steps)
    later = next((number for number in chain if number > ref.attempt), None)
    if last is not None and later is not None:
        return f"attempt {later} went on from step {last}"
    if later is None:
        return f"attempt {ref.attempt} has not said what it began with"
    return f"attempt {later} went on without attempt {ref.attempt}"


def _lacking(entry: Entry, objects: Iterable[ObjectInfo]) -> list[str]:
    """What the listing alone tells of missing data."""
    assert entry.commit is not None
    sizes = {info.key: info.size_bytes for info in objects}
    files = (*entry.commit.files, entry.commit.metadata)
    lost = sum(sizes.get(file.key) != file.size_bytes for file in files)
    return [f"{lost} of {len(files)} objects gone or cut: verify it"] if lost else []


def _notes(entry: Entry, inventory: Inventory) -> tuple[str, ...]:
    notes = [
        f"attempt {attempt.number} resumed from it"
        for attempt in inventory.attempts
        if attempt.end is None and attempt.resume is not None and attempt.resume.source == entry.ref
    ]
    notes += [f"pinned: {named.told}" for named in entry.pins]
    notes += [
        f"{marker.reading.who} is reading it"
        for marker in inventory.markers
        if marker.holds and entry.ref in marker.reading.refs
    ]
    if entry.state is not State.DOUBTED:
        notes += [
            f"a verify on {doubt.host} found damage"
            if doubt.attempt is None
            else f"{doubt.host} could not read it (attempt {doubt.attempt})"
            for doubt in entry.doubts
        ]
    return tuple(notes)
