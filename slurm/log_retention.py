"""Which attempts' folders and which copies of the code may leave the workdir, and their leaving.

A run that goes on for months writes more than anybody reads. What goes is decided in `outdated`;
nothing that an open attempt has is ever touched, and what cannot be removed is told and left.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from storage.records import Stage
from storage.spec import LogsSpec

ALWAYS_KEPT = 8
"""So many of a stage's newest attempts keep their logs, however old or large they are."""
CODE = "code"
SWEEP_EVERY_S = 3600.0
_MARKER = ".swept"
_GONE = ".gone-"
_DAY_S = 86_400.0
_GB = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class AttemptFolder:
    """An attempt's folder in the workdir. `written_at_s` is when a file in it last changed."""

    path: Path
    stage: Stage
    attempt: int
    size_bytes: int
    written_at_s: float
    is_closed: bool = True


@dataclass(frozen=True, kw_only=True)
class Removed:
    """What a sweep did, as the engine tells it."""

    folders: int = 0
    size_bytes: int = 0
    snapshots: int = 0
    faults: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """One line, or "" where nothing was to be done."""
        parts = []
        if self.folders:
            size = f"{self.size_bytes / _GB:.2g} GB"
            parts.append(f"removed the logs of {self.folders} old attempts ({size})")
        if self.snapshots:
            parts.append(f"removed {self.snapshots} copies of the code that no job needs")
        if self.faults:
            parts.append(f"could not remove {len(self.faults)} old folders: {self.faults[0]}")
        return "; ".join(parts)


def outdated(
    folders: Iterable[AttemptFolder], logs: LogsSpec, *, now_s: float
) -> tuple[AttemptFolder, ...]:
    """The folders that go, oldest first: those past their age, then what is too much in all."""
    known = sorted(folders, key=lambda one: one.written_at_s)
    newest = {
        one.path
        for stage in {one.stage for one in known}
        for one in sorted(
            (other for other in known if other.stage is stage), key=lambda other: -other.attempt
        )[:ALWAYS_KEPT]
    }
    oldest_s = now_s - logs.keep_days * _DAY_S if logs.keep_days else float("-inf")
    bound_bytes = logs.max_gb * _GB if logs.max_gb else float("inf")
    total_bytes = sum(one.size_bytes for one in known)
    gone = []
    for one in known:
        if not one.is_closed or one.path in newest:
            continue
        if one.written_at_s < oldest_s or total_bytes > bound_bytes:
            gone.append(one)
            total_bytes -= one.size_bytes
    return tuple(gone)


def sweep_logs(
    workdir: Path,
    run: str,
    logs: LogsSpec,
    *,
    code: Path,
    closed_tokens: Callable[[], Collection[str]],
    now_s: float | None = None,
) -> Removed:
    """Removes what is outdated of a run, at most once in `SWEEP_EVERY_S`.

    `closed_tokens` gives the tokens of the run's attempts that have an end; it is only asked when
    there is something to remove. `code` is the copy that the caller uses.
    """
    now_s = time.time() if now_s is None else now_s
    try:
        if not _is_due(workdir / run / _MARKER, now_s=now_s):
            return Removed()
        removed = _sweep_attempts(workdir / run, logs, closed_tokens, now_s=now_s)
        if logs.keep_days:
            oldest_s = now_s - logs.keep_days * _DAY_S
            removed = _sweep_code(workdir, removed, code=code, oldest_s=oldest_s)
    except OSError as error:
        # Room that was not made is no reason to train nothing; whoever needs it will say so.
        return Removed(faults=(str(error),))
    return removed


def _is_due(marker: Path, *, now_s: float) -> bool:
    if marker.exists() and now_s - marker.stat().st_mtime < SWEEP_EVERY_S:
        return False
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    return True


def _sweep_attempts(
    folder: Path, logs: LogsSpec, closed_tokens: Callable[[], Collection[str]], *, now_s: float
) -> Removed:
    for left in folder.glob(f"*/{_GONE}*"):
        shutil.rmtree(left)
    found = tuple(attempt_folders(folder))
    if not outdated(found, logs, now_s=now_s):
        return Removed()
    closed = closed_tokens()
    known = [replace(one, is_closed=_token(one.path) in closed) for one in found]
    removed = Removed()
    for one in outdated(known, logs, now_s=now_s):
        fault = _remove(one.path)
        if fault:
            removed = replace(removed, faults=(*removed.faults, fault))
        else:
            removed = replace(
                removed,
                folders=removed.folders + 1,
                size_bytes=removed.size_bytes + one.size_bytes,
            )
    return removed


def attempt_folders(folder: Path) -> Iterator[AttemptFolder]:
    """The folders of a run's attempts that are in the workdir, with what is in them."""
    for stage in Stage:
        for path in sorted((folder / stage.value).glob("[0-9]*")):
            if path.is_dir() and path.name.isdecimal():
                size_bytes, written_at_s = _measure(path)
                yield AttemptFolder(
                    path=path,
                    stage=stage,
                    attempt=int(path.name),
                    size_bytes=size_bytes,
                    written_at_s=written_at_s,
                )


def _measure(path: Path) -> tuple[int, float]:
    """Size and last change of all files below; what vanishes meanwhile counts nothing."""
    size_bytes, written_at_s = 0, 0.0
    for folder, _, names in os.walk(path):
        for file in (Path(folder), *(Path(folder, name) for name in names)):
            try:
                seen = file.lstat()
            except FileNotFoundError:
                continue
            written_at_s = max(written_at_s, seen.st_mtime)
            size_bytes += seen.st_size
    return size_bytes, written_at_s


def _sweep_code(workdir: Path, removed: Removed, *, code: Path, oldest_s: float) -> Removed:
    """Copies of the code that are old and that no job.json left in the workdir names."""
    old = [
        path
        for path in (workdir / CODE).glob("[0-9a-f]*")
        if path != code and path.stat().st_mtime < oldest_s
    ]
    if not old:
        return removed
    jobs = [_job(path) for path in workdir.glob("*/*/*/job.json")]
    if not all(jobs):
        # Which code a job runs whose description cannot be read, nobody knows.
        return removed
    used = {str(job["code"]) for job in jobs}
    for path in old:
        if str(path) in used:
            continue
        if fault := _remove(path):
            removed = replace(removed, faults=(*removed.faults, fault))
        else:
            removed = replace(removed, snapshots=removed.snapshots + 1)
    return removed


def _token(folder: Path) -> str | None:
    job = _job(folder / "job.json")
    return str(job["intent"]["token"]) if job else None


def _job(path: Path) -> dict[str, Any]:
    """What is asked here of any version's job.json; nothing where it is not there, or broken."""
    try:
        job = json.loads(path.read_bytes())
        return {"code": job["code"], "intent": {"token": job["intent"]["token"]}}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _remove(path: Path) -> str:
    """Removes a folder as a whole, out of sight first; what hindered it, or ""."""
    gone = path.with_name(f"{_GONE}{path.name}")
    try:
        path.rename(gone)
        shutil.rmtree(gone)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return ""
