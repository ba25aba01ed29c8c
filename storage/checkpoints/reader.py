"""Reads one rank's part of a checkpoint: only the byte ranges it needs, neighbours joined."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from awscrt.checksums import crc64nvme
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from typing_extensions import override

from storage.checkpoint_records import Commit, FileRecord
from storage.checkpoints.layout import Chunk, Layout, ValueLayout, crc_text
from storage.checkpoints.metadata import to_metadata
from storage.checkpoints.writer import ALIGNMENT
from storage.errors import CheckpointError, ObjectMissing
from storage.object_store import ObjectStore
from storage.records import decode

READ_THREADS = 8
RANGE_BYTES = 64 * 2**20
JOIN_GAP_BYTES = 64 * 2**10


class DamagedCheckpointError(CheckpointError):
    """The store does not hold, or not unaltered, what the commit says: an older one may do."""


@dataclass(frozen=True)
class _Read:
    """The bytes `start:end` of a file that hold what one read item wants."""

    item: ReadItem
    chunk: Chunk
    start: int
    end: int

    @property
    def is_whole(self) -> bool:
        return self.end - self.start == self.chunk.size_bytes


class ObjectStoreReader(StorageReader):
    """torch's StorageReader on our object store, for the checkpoint of one commit."""

    def __init__(self, store: ObjectStore, commit: Commit) -> None:
        self.bytes_read = 0
        self._store = store
        self._commit = commit
        self._folder = commit.metadata.key.rpartition("/")[0] + "/"
        self._files = {file.key.removeprefix(self._folder): file for file in commit.files}
        self._stored: dict[MetadataIndex, Any] = {}

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._stored = {}

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds.

        Raises:
            DamagedCheckpointError: the metadata object is gone or altered.
        """
        record = self._commit.metadata
        body = self._get(record)
        if crc_text(crc64nvme(body)) != record.crc64nvme:
            raise DamagedCheckpointError(
                f"the checksum of {record.key!r} is not the one in its commit"
            )
        layout = decode(Layout, body)
        if layout.version != Layout().version:
            raise CheckpointError(
                f"{record.key!r} has format version {layout.version}, this program reads "
                f"{Layout().version}; load it with the version that wrote it"
            )
        return to_metadata(layout)

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._stored = metadata.storage_data

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the planner's tensors and values in place.

        Raises:
            DamagedCheckpointError: a file is gone or has another size, or a chunk another checksum.
        """
        by_file: dict[str, list[_Read]] = {}
        for item in plan.items:
            stored = self._stored[item.storage_index]
            if item.type is LoadItemType.BYTE_IO:
                assert isinstance(stored, ValueLayout)
                planner.load_bytes(item, io.BytesIO(stored.text.encode()))
            else:
                read = _locate(item, stored)
                by_file.setdefault(read.chunk.file, []).append(read)
        with ThreadPoolExecutor(READ_THREADS) as pool:
            for _ in pool.map(self._require_intact, by_file):
                pass
            groups = [group for reads in by_file.values() for group in _join(reads)]
            self.bytes_read += sum(pool.map(lambda group: self._fill(group, planner), groups))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _require_intact(self, file: str) -> None:
        record = self._files.get(file)
        if record is None:
            raise DamagedCheckpointError(f"{self._folder + file!r} is not named by its commit")
        found = self._store.head(record.key)
        if found is None or found.size_bytes != record.size_bytes:
            size = "is gone" if found is None else f"has {found.size_bytes} bytes"
            raise DamagedCheckpointError(f"{record.key!r} {size}; it was {record.size_bytes} bytes")

    def _get(self, record: FileRecord) -> bytes:
        try:
            return self._store.get(record.key)
        except ObjectMissing as error:
            raise DamagedCheckpointError(str(error)) from error

    def _fill(self, group: list[_Read], planner: LoadPlanner) -> int:
        # Aligned as in the file, so that every element stays aligned in memory.
        start = group[0].start // ALIGNMENT * ALIGNMENT
        buffer = self._fetch(group[0].chunk.file, start, max(read.end for read in group))
        for read in group:
            data = memoryview(buffer)[read.start - start : read.end - start]
            if read.is_whole and crc_text(crc64nvme(data)) != read.chunk.crc64nvme:
                raise DamagedCheckpointError(
                    f"the checksum of {read.item.storage_index.fqn!r} in "
                    f"{self._folder + read.chunk.file!r} is not the one in its metadata"
                )
            with torch.no_grad():
                target = planner.resolve_tensor(read.item).detach()
                flat = torch.frombuffer(data, dtype=target.dtype)
                strides = _strides(read.chunk.lengths)
                target.copy_(flat.as_strided(read.item.lengths, strides))
                planner.commit_tensor(read.item, target)
        return len(buffer)

    def _fetch(self, file: str, start: int, end: int) -> bytearray:
        buffer = bytearray()
        while start + len(buffer) < end:
            position = start + len(buffer)
            length = min(RANGE_BYTES, end - position)
            try:
                buffer += self._store.get_range(self._folder + file, start=position, length=length)
            except ObjectMissing as error:
                raise DamagedCheckpointError(str(error)) from error
        return buffer


def _locate(item: ReadItem, chunk: Chunk) -> _Read:
    """The smallest run of bytes that holds the box the item wants.

    Row-major: a box that is whole in all dimensions but the first is exactly that run.
    """
    strides = _strides(chunk.lengths)
    element_bytes = chunk.size_bytes // math.prod(chunk.lengths)
    first = _dot(item.storage_offsets, strides)
    last = first + _dot([length - 1 for length in item.lengths], strides)
    return _Read(
        item=item,
        chunk=chunk,
        start=chunk.start + first * element_bytes,
        end=chunk.start + (last + 1) * element_bytes,
    )


def _join(reads: Iterable[_Read]) -> Iterator[list[_Read]]:
    """Groups reads of one file that lie close together; each group becomes one request."""
    group: list[_Read] = []
    end = 0
    for read in sorted(reads, key=lambda read: (read.start, read.end)):
        far = read.start - end > JOIN_GAP_BYTES
        if group and (far or read.end - group[0].start > RANGE_BYTES):
            yield group
            group = []
        group.append(read)
        end = max(end, read.end)
    if group:
        yield group


def _strides(lengths: Iterable[int]) -> list[int]:
    strides: list[int] = []
    step = 1
    for length in reversed(tuple(lengths)):
        strides.append(step)
        step *= length
    return strides[::-1]


def _dot(left: Iterable[int], right: Iterable[int]) -> int:
    return sum(a * b for a, b in zip(left, right, strict=True))
