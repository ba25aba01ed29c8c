"""What `headrace checkpoints` prints: tables that 80 columns hold, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from storage.attempts import Attempt
    from storage.checkpoints.catalog import Catalog, Entry
    from storage.checkpoints.contents import Fault

SAVE_SHOWN = 8
FAULTS_SHOWN = 10
_UNITS = ("B", "kB", "MB", "GB", "TB")


def overview(shown: Sequence[Entry], *, now: datetime, zone: tzinfo) -> Table:
    """A row for each checkpoint; the state has what room the others leave."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("step.try", "save", "when"):
        table.add_column(name, no_wrap=True)
    for name in ("size", "loss", "val", "ranks"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("state", overflow="fold")
    for entry in shown:
        commit = entry.commit
        metrics = {} if commit is None else commit.metrics
        table.add_row(
            entry.name,
            entry.ref.save[:SAVE_SHOWN],
            spell_time(entry.at, now=now, zone=zone),
            spell_bytes(entry.size_bytes) if entry.objects else "–",
            _figure(metrics.get("loss")),
            _figure(metrics.get("val_loss")),
            "–" if commit is None else str(commit.world_size),
            escape(_spoken(entry, entry.notes if entry.against is None else entry.notes[1:])),
            style=_style(entry),
        )
    return table


def told_state(entry: Entry) -> str:
    """`newest; pinned: ann, 2026-11-30: for the paper`."""
    return _spoken(entry, entry.notes)


def remarks(shown: Sequence[Entry]) -> list[str]:
    """What stands below the table: the reasons for which it has no room, and what prune does."""
    from storage.checkpoints.catalog import State

    lines = [f"{entry.name}: {entry.against}" for entry in shown if entry.against is not None]
    states = {entry.state for entry in shown if entry.objects and not entry.pins}
    if states & {State.WRITING, State.ORPHANED}:
        lines += [
            "Data without a commit are swept by the prune stage once their attempt ended",
            "and they are older than retention.grace_s.",
        ]
    if State.DAMAGED in states:
        lines.append("The prune stage keeps the data of a damaged commit.")
    return lines


def told_faults(faults: Sequence[Fault]) -> list[str]:
    """The first few: two swapped files are wrong in every tensor, and say the same of each."""
    told = [str(fault) for fault in faults[:FAULTS_SHOWN]]
    return (
        told if len(faults) <= FAULTS_SHOWN else [*told, f"and {len(faults) - FAULTS_SHOWN} more"]
    )


def totals(catalog: Catalog) -> str:
    """Bytes by what they are worth: nobody has to find out what a bucket is full of."""
    by_state: dict[str, tuple[int, int]] = {}
    for entry in catalog.entries:
        count, size_bytes = by_state.get(entry.state.value, (0, 0))
        by_state[entry.state.value] = count + 1, size_bytes + entry.size_bytes
    parts = [
        f"{state} {count}" + (f" ({spell_bytes(size_bytes)})" if size_bytes else "")
        for state, (count, size_bytes) in by_state.items()
    ]
    return f"{spell_bytes(catalog.inventory.size_bytes)} in all: {', '.join(parts)}"


def as_json(entry: Entry) -> dict[str, Any]:
    """All that is known of a checkpoint but its files."""
    commit = entry.commit
    return {
        "step": entry.ref.step,
        "attempt": entry.ref.attempt,
        "save": entry.ref.save,
        "state": entry.state.value,
        "newest": entry.is_newest,
        "notes": list(entry.notes),
        "size_bytes": entry.size_bytes,
        "objects": entry.objects,
        "at": None if entry.at is None else entry.at.isoformat(),
        "world_size": None if commit is None else commit.world_size,
        "mesh": None if commit is None else dict(commit.mesh),
        "metrics": None if commit is None else dict(commit.metrics),
        "samples_consumed": None if commit is None else commit.samples_consumed,
        "dataset_id": None if commit is None else commit.dataset_id,
        "pins": [
            {"name": named.name, "who": named.pin.who, "why": named.pin.why} for named in entry.pins
        ],
        "doubts": [
            {"host": doubt.host, "attempt": doubt.attempt, "fault": doubt.fault}
            for doubt in entry.doubts
        ],
    }


def details(
    entry: Entry, attempts: Iterable[Attempt], *, now: datetime, zone: tzinfo
) -> list[tuple[str, str]]:
    """What is known of one checkpoint, as names and texts."""
    from flows.names import end_text

    commit = entry.commit
    assert commit is not None
    mesh = " × ".join(f"{axis} {size}" for axis, size in commit.mesh.items())
    rows = [
        ("checkpoint", f"step {commit.step}, attempt {commit.attempt}, save {commit.save}"),
        ("state", told_state(entry)),
        ("when", spell_time(entry.at, now=now, zone=zone)),
        ("size", f"{spell_bytes(entry.size_bytes)} in {entry.objects} objects"),
        ("ranks", f"{commit.world_size}, as {mesh}"),
        *((name.replace("_", " "), _figure(value)) for name, value in commit.metrics.items()),
        ("data", f"{commit.samples_consumed:,} samples of data set {commit.dataset_id}"),
        ("their hash", commit.samples_hash or "–"),
        ("model", commit.model_hash),
    ]
    loaders = [
        attempt
        for attempt in attempts
        if attempt.resume is not None and attempt.resume.source == entry.ref
    ]
    rows += [
        ("loaded by", f"attempt {attempt.number}: {end_text(attempt)}") for attempt in loaders
    ] or [("loaded by", "no attempt")]
    rows += [("pin", named.told) for named in entry.pins]
    rows += [
        (
            "doubt",
            f"{doubt.host}, "
            + ("a verify" if doubt.attempt is None else f"attempt {doubt.attempt}")
            + f": {doubt.fault}",
        )
        for doubt in entry.doubts
    ]
    return rows


def details_table(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, escape(text))
    return table


def files_table(entry: Entry) -> Table:
    """Every object that the commit names, by its name in the folder of the save."""
    assert entry.commit is not None
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("file", overflow="fold")
    table.add_column("bytes", no_wrap=True, justify="right")
    table.add_column("CRC64-NVME", no_wrap=True)
    for file in (entry.commit.metadata, *entry.commit.files):
        table.add_row(file.key.rpartition("/")[2], f"{file.size_bytes:,}", file.crc64nvme)
    return table


def spell_bytes(size_bytes: int) -> str:
    """`1.23 GB`: three digits, decimal units."""
    size, unit = float(size_bytes), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size_bytes} B" if unit == 0 else f"{_three_digits(size)} {_UNITS[unit]}"


def spell_time(at: datetime | None, *, now: datetime, zone: tzinfo) -> str:
    """`Nov 30 08:46`, and with the year where it is not this one."""
    if at is None:
        return "–"
    there = at.astimezone(zone)
    is_this_year = there.year == now.astimezone(zone).year
    return f"{there:%b %d %H:%M}" if is_this_year else f"{there:%Y-%m-%d}"


def _spoken(entry: Entry, notes: Iterable[str]) -> str:
    first = "newest" if entry.is_newest else entry.state.value
    return "; ".join((first, *notes))


def _three_digits(size: float) -> str:
    if size < 9.995:
        return f"{size:.2f}"
    return f"{size:.1f}" if size < 99.95 else f"{size:.0f}"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _style(entry: Entry) -> str:
    from storage.checkpoints.catalog import State

    if entry.state is State.COUNTS:
        return "green" if entry.is_newest else ""
    return "red" if entry.state in (State.DOUBTED, State.DAMAGED) else "dim"
