"""The buffers through which a save leaves a rank: files in shared memory, and who may touch them.

A rank fills a buffer and seals it; the flusher, a process of its own, sends what is sealed and
frees it. A buffer is sealed as long as its `sealed` record exists, which is put there whole by a
rename. So whoever is killed, and when: what is sealed is complete, and what is not is nobody's.
Loads no torch, for the flusher has no use for it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from storage.checkpoint_records import SaveFacts
from storage.checkpoints.layout import Layout, TensorLayout, ValueLayout
from storage.checkpoints.settings import BUFFER_ROOT, buffer_root
from storage.errors import CheckpointError
from storage.job import JobDescription
from storage.records import decode, encode

_SEALED = re.compile(r"(\d+)\.(\d+)\.sealed\.json")
_WAITING = re.compile(r"commit\.(\d+)\.json")
_OUTCOME = re.compile(r"outcome\.(\d+)\.json")


@dataclass(frozen=True, kw_only=True)
class StagedFile:
    """One object of the save: the bytes `start … start + size_bytes` of the buffer."""

    name: str
    start: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class BufferPlan:
    """What lies where in a rank's buffer, the same for every save of a job.

    The chunks of `tensors` say their file and their start in it; their checksums are still empty.
    """

    rank: int
    size_bytes: int
    files: tuple[StagedFile, ...]
    tensors: Mapping[str, TensorLayout] = field(default_factory=dict)


class Tier(StrEnum):
    """Where a snapshot goes: to a nearer disk, or to the object store, where it is committed."""

    DISK = "disk"
    STORE = "store"


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A snapshot that is complete: what it is of, and those of its values that are no tensors."""

    rank: int
    slot: int
    facts: SaveFacts
    values: Mapping[str, ValueLayout]
    tiers: tuple[Tier, ...] = (Tier.STORE,)

    def layout(self, plan: BufferPlan) -> Layout:
        """All of this rank's part, the checksums still empty."""
        return Layout(tensors=plan.tensors, values=self.values)


class Result(StrEnum):
    """What became of a save."""

    COMMITTED = "committed"
    FENCED = "fenced"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Told to rank 0 by the flusher of its node. `durable_s` is from the seal to the commit."""

    step: int
    save: str
    result: Result
    message: str = ""
    durable_s: float = 0.0


class BufferFolder:
    """The shared memory of one job on one node."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, *, token: str, node: str, root: Path = BUFFER_ROOT) -> BufferFolder:
        """The folder of the job with this token; nodes may be simulated ones of one host."""
        return cls(root / f"headrace-{os.getuid()}" / token / node)

    @classmethod
    def of_job(cls, job: JobDescription, *, node: str) -> BufferFolder:
        """The same for the ranks and for the flusher, below the folder that the payload names."""
        return cls.of(token=job.intent.token, node=node, root=buffer_root(job))

    def make(self) -> None:
        """Makes the folder, but not the memory that it lies in: a wrong path is often on a disk.

        Raises:
            OSError: that memory is not there, or not for this user.
        """
        root = self.path.parents[2]
        if not root.is_dir():
            raise NotADirectoryError(f"there is no folder {str(root)!r}")
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextmanager
    def held(self) -> Iterator[None]:
        """While somebody holds the folder it is not taken for a leftover."""
        with self._locked("held.lock", fcntl.LOCK_SH):
            yield

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """Of all flushers of this node one at a time: two would free each other's buffers."""
        with self._locked("flusher.lock", fcntl.LOCK_EX):
            yield

    @contextmanager
    def _locked(self, name: str, kind: int) -> Iterator[None]:
        while True:
            try:
                self.make()
                lock = (self.path / name).open("a")
            except FileNotFoundError:  # Another job removes what is left over.
                continue
            with lock:
                fcntl.flock(lock, kind)
                # Whoever had it may have removed the folder; then this lock keeps nobody out.
                if self._is_in_place(lock.fileno(), name):
                    yield
                    return

    def buffer(self, rank: int, slot: int) -> Path:
        return self.path / f"{rank}.{slot}.buffer"

    def write_plan(self, plan: BufferPlan) -> None:
        self._write(self._plan(plan.rank), plan)

    def plan(self, rank: int) -> BufferPlan:
        return decode(BufferPlan, self._plan(rank).read_bytes())

    def is_free(self, rank: int, slot: int) -> bool:
        """Whether this rank may fill the buffer."""
        return not self._sealed(rank, slot).exists()

    def seal(self, sealed: Sealed) -> None:
        """Hands a complete snapshot to the flusher."""
        self._write(self._sealed(sealed.rank, sealed.slot), sealed)

    def sealed(self) -> list[Sealed]:
        """The snapshots that wait for the flusher, those of the earliest step first."""
        found = [decode(Sealed, body) for body in self._bodies(_SEALED)]
        return sorted(found, key=lambda one: (one.facts.step, one.rank))

    def free(self, sealed: Sealed) -> None:
        """Gives a buffer back. What rank 0 knows of the save stays until the save is committed."""
        record = self._sealed(sealed.rank, sealed.slot)
        if sealed.rank == 0 and Tier.STORE in sealed.tiers:
            record.replace(self._waiting(sealed.facts.step))
        else:
            record.unlink(missing_ok=True)

    def waiting(self) -> list[Sealed]:
        """The saves of which rank 0's part is in the store and the commit is not."""
        found = [decode(Sealed, body) for body in self._bodies(_WAITING)]
        return sorted(found, key=lambda one: one.facts.step)

    def waiting_since(self, sealed: Sealed) -> float:
        """When it was sealed: renaming a record does not change its time."""
        return self._waiting(sealed.facts.step).stat().st_mtime

    def settle(self, sealed: Sealed, outcome: Outcome) -> None:
        """Tells rank 0 what became of a save, and forgets it."""
        self._write(self.path / f"outcome.{outcome.step}.json", outcome)
        self._waiting(sealed.facts.step).unlink(missing_ok=True)

    def take_outcomes(self) -> list[Outcome]:
        """What has become of saves since the last call, in the order of their steps."""
        outcomes = []
        for path in self._matching(_OUTCOME):
            outcomes.append(decode(Outcome, path.read_bytes()))
            path.unlink()
        return sorted(outcomes, key=lambda one: one.step)

    def remove(self) -> None:
        """Gives the memory back."""
        shutil.rmtree(self.path, ignore_errors=True)
        _remove_if_empty(self.path.parent)

    def remove_leftovers(self) -> list[Path]:
        """Removes what other jobs of this user left on this host and nobody holds any more."""
        others = (
            BufferFolder(folder)
            for token in _entries(self.path.parent.parent)
            for folder in _entries(token)
            if folder != self.path
        )
        return [other.path for other in others if other._remove_if_left()]

    def _remove_if_left(self) -> bool:
        with ExitStack() as locks:
            try:
                for name in ("held.lock", "flusher.lock"):
                    lock = locks.enter_context((self.path / name).open("a"))
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            self.remove()
        return True

    def _is_in_place(self, opened: int, name: str) -> bool:
        try:
            return os.path.samestat(os.fstat(opened), (self.path / name).stat())
        except FileNotFoundError:
            return False

    def _plan(self, rank: int) -> Path:
        return self.path / f"{rank}.plan.json"

    def _sealed(self, rank: int, slot: int) -> Path:
        return self.path / f"{rank}.{slot}.sealed.json"

    def _waiting(self, step: int) -> Path:
        return self.path / f"commit.{step}.json"

    def _matching(self, pattern: re.Pattern[str]) -> list[Path]:
        return [path for path in self.path.iterdir() if pattern.fullmatch(path.name)]

    def _bodies(self, pattern: re.Pattern[str]) -> Iterator[bytes]:
        for path in self._matching(pattern):
            try:
                yield path.read_bytes()
            except FileNotFoundError:
                continue

    def _write(self, path: Path, record: object) -> None:
        temporary = path.with_suffix(f".tmp{os.getpid()}")
        temporary.write_bytes(encode(record))
        temporary.replace(path)


def allocate(path: Path, size_bytes: int) -> mmap.mmap:
    """A buffer whose pages are all there, so that the first save is no slower than the others.

    Raises:
        CheckpointError: the memory does not hold it.
    """
    with path.open("w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(size_bytes, 1))
        except OSError as error:
            path.unlink()
            free_bytes = shutil.disk_usage(path.parent).free
            raise CheckpointError(
                f"a checkpoint buffer of {size_bytes / 2**20:,.1f} MiB does not fit into "
                f"{path.parent}, which has {free_bytes / 2**20:,.1f} MiB left: {error.strerror}; "
                "give the nodes more memory there, name another train.checkpoint.buffer_dir, set "
                "train.checkpoint.buffers to 1, or spread the model over more ranks"
            ) from error
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return mmap.mmap(file.fileno(), max(size_bytes, 1), flags=flags)


def open_buffer(path: Path) -> mmap.mmap:
    """A buffer as the flusher sees it: read only."""
    with path.open("rb") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return


def _entries(folder: Path) -> list[Path]:
    """What is in a folder that another job may remove at any moment."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
