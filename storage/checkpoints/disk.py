"""The tier nearer than the object store: a folder of the nodes' own, or one that they share.

It has the keys of a bucket, so that a save is sent to it, and read from it, by the same code. What
is there under its name is complete and on the disk: it was written under another, synced, renamed.
Nothing here is a commit; whether all ranks' parts can be seen is found out by whoever resumes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from itertools import islice
from pathlib import Path

from storage.checkpoint_records import CommitRef
from storage.checkpoints.layout import RankPart
from storage.checkpoints.sealing import DamagedRecordError, decode_sealed
from storage.errors import ObjectMissing, StoreError
from storage.keys import RunKeys
from storage.object_store import Bytes, ObjectInfo

KEPT = 2
"""So many saves of a rank stay, and one more where none of them is seen to be whole: ranks that
lag behind may have none of either."""

_DONE = re.compile(r"done\.(\d+)\.json")
_PART = re.compile(r"(?:data|done)\.(\d+)\..+")
_SAVE = re.compile(r"(\d{12})\.(.+)")


class Disk:
    """A folder as a bucket. Its errors are those of a store, told with the path."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def upload(self, key: str, data: Bytes, *, executor: Executor | None = None) -> None:
        """Writes the object: all of it, on the disk, or nothing under that key."""
        del executor  # One writer keeps a disk busy.
        self.put(key, data)

    def put(self, key: str, body: Bytes) -> None:
        path = self.root / key
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            # Only below the folder: one that is not mounted is not made on the disk beneath.
            self.root.stat()
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_folder(path.parent)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise _failure("write", path, error) from error

    def get(self, key: str) -> bytes:
        path = self.root / key
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise ObjectMissing(f"{str(path)!r} is not there") from error
        except OSError as error:
            raise _failure("read", path, error) from error

    def head(self, key: str) -> ObjectInfo | None:
        path = self.root / key
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failure("look for", path, error) from error
        return ObjectInfo(
            key=key,
            size_bytes=found.st_size,
            etag="",
            last_modified=datetime.fromtimestamp(found.st_mtime, UTC),
        )

    def read_into(self, key: str, *into: memoryview, start: int) -> None:
        """Fills the views, one after the other, with the bytes from `start`.

        Raises StoreError when the file is shorter.
        """
        path = self.root / key
        end = start + sum(map(len, into))
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                for view in into:
                    _fill(view, file, path, end)
        except FileNotFoundError as error:
            raise ObjectMissing(f"{str(path)!r} is not there") from error
        except OSError as error:
            raise _failure("read", path, error) from error

    def parts(self, keys: RunKeys) -> Iterator[tuple[CommitRef, int]]:
        """The saves of a run of which this node sees parts, newest first, with each part's rank.

        Raises:
            StoreError: the disk does not let itself be read.
        """
        for ref, folder in sorted(self._saves(keys), reverse=True):
            for path in _entries(folder):
                if named := _DONE.fullmatch(path.name):
                    yield ref, int(named[1])

    def read_part(self, keys: RunKeys, ref: CommitRef, rank: int) -> RankPart | None:
        """The record of a part, or None where it is damaged or gone."""
        key = keys.done(ref.attempt, step=ref.step, save=ref.save, rank=rank)
        try:
            return decode_sealed(RankPart, self.get(key))
        except (ObjectMissing, StoreError, DamagedRecordError):
            return None

    def make_room(self, keys: RunKeys, *, attempt: int, rank: int, world_size: int) -> None:
        """Removes what newer saves of this attempt stand for, of this rank's parts.

        Those of ranks that there are no more go with them. What stays beside a first save of this
        attempt is the newest that an earlier one made up to it. The newest that can be seen to be
        whole stays in any case.

        Raises:
            StoreError: the disk does not let itself be read.
        """
        seen = [(ref, part) for ref, part in self.parts(keys) if ref.attempt <= attempt]
        own = [ref for ref, part in seen if part == rank and ref.attempt == attempt]
        if not own:
            return
        earlier = [ref for ref, _ in seen if ref.attempt < attempt and ref.step <= own[-1].step]
        newest = list(dict.fromkeys([*own, *earlier]))

        def is_whole(ref: CommitRef) -> bool:
            parts = {part for other, part in seen if other == ref}
            if ref.attempt == attempt:
                return parts.issuperset(range(world_size))
            record = self.read_part(keys, ref, min(parts))
            return record is not None and parts.issuperset(range(record.facts.world_size))

        kept = {*newest[:KEPT], *islice(filter(is_whole, newest), 1)}
        for ref, part in seen:
            if ref not in kept and (part == rank or part >= world_size):
                self.remove_part(keys, ref, part)

    def remove_torn(self, keys: RunKeys, *, attempt: int, rank: int, world_size: int) -> None:
        """Removes what was begun and not completed, by this rank or one that there is no more.

        Whoever wrote it died with its node, or is a zombie. To be called before this rank's part of
        a save is written, and not meanwhile.

        Raises:
            StoreError: the disk does not let itself be read.
        """
        for ref, folder in self._saves(keys):
            names = [path.name for path in _entries(folder)] if ref.attempt <= attempt else []
            begun = {int(named[1]) for name in names if (named := _PART.fullmatch(name))}
            done = {int(named[1]) for name in names if (named := _DONE.fullmatch(name))}
            for part in begun - done:
                if part == rank or part >= world_size:
                    self.remove_part(keys, ref, part)

    def remove_part(self, keys: RunKeys, ref: CommitRef, rank: int) -> None:
        """A part is gone with its record, which therefore goes first."""
        folder = self.root / keys.save(ref.attempt, step=ref.step, save=ref.save)
        with suppress(OSError):
            (folder / f"done.{rank}.json").unlink(missing_ok=True)
            for pattern in (f"done.{rank}.json.*", f"data.{rank}.*"):
                for path in folder.glob(pattern):
                    path.unlink(missing_ok=True)
            folder.rmdir()

    def _saves(self, keys: RunKeys) -> Iterator[tuple[CommitRef, Path]]:
        for attempt in _entries(self.root / keys.checkpoints / "data"):
            for folder in _entries(attempt) if attempt.name.isdigit() else ():
                if named := _SAVE.fullmatch(folder.name):
                    ref = CommitRef(step=int(named[1]), attempt=int(attempt.name), save=named[2])
                    yield ref, folder


def _entries(folder: Path) -> list[Path]:
    """What is in a folder that another rank may be removing."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _failure("list", folder, error) from error


def _fill(view: memoryview, file: FileIO, path: Path, end: int) -> None:
    while view:
        count = file.readinto(view)
        if not count:
            raise StoreError(
                f"{str(path)!r} ends at {file.tell()}, and bytes up to {end} were asked for"
            )
        view = view[count:]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failure(what: str, path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"could not {what} {str(path)!r} of the checkpoints' disk tier: {error.strerror or error}; "
        "look at train.checkpoint.disk and at that file system"
    )
