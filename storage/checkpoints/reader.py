"""Reads one rank's part of a checkpoint: only what it needs, and no byte that is not verified."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from typing_extensions import override

from storage.checkpoint_records import Commit
from storage.checkpoints.contents import DamagedContentsError, Source, folder_of, read_layout
from storage.checkpoints.layout import BLOCK_BYTES, Chunk, ValueLayout
from storage.checkpoints.metadata import to_metadata
from storage.checkpoints.ranges import (
    RANGE_BYTES,
    Piece,
    Request,
    Requests,
    Stored,
    box_strides,
)
from storage.errors import CheckpointError, ObjectMissing, StoreError
from storage.transfers import transfers_at_once

READS_AT_ONCE = 8


class DamagedCheckpointError(CheckpointError):
    """The store does not hold, or not unaltered, what the commit says: an older one may do."""


class ObjectStoreReader(StorageReader):
    """torch's StorageReader on our object store, for the checkpoint of one commit.

    Beside the tensors themselves it holds at most `READS_AT_ONCE` buffers of `RANGE_BYTES`.
    `bytes_read` counts what came over the wire, the metadata included.
    """

    def __init__(self, store: Source, commit: Commit) -> None:
        self.bytes_read = 0
        self.num_requests = 0
        self._store = store
        self._commit = commit
        self._folder = folder_of(commit)
        self._files = {file.key.removeprefix(self._folder): file for file in commit.files}
        self._values: dict[MetadataIndex, ValueLayout] = {}
        self._chunks: dict[MetadataIndex, Stored] = {}
        self._buffers = threading.local()

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._values, self._chunks = {}, {}

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds.

        Raises:
            DamagedCheckpointError: the metadata object is gone, altered, or contradicts itself.
        """
        try:
            layout = read_layout(self._store, self._commit)
        except DamagedContentsError as error:
            raise DamagedCheckpointError(str(error)) from error
        self.bytes_read += self._commit.metadata.size_bytes
        self.num_requests += 1
        return to_metadata(layout)

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        stored: dict[MetadataIndex, Any] = metadata.storage_data
        self._values = {
            index: value for index, value in stored.items() if isinstance(value, ValueLayout)
        }
        chunks = {index: chunk for index, chunk in stored.items() if isinstance(chunk, Chunk)}
        self._chunks = _with_padding(
            chunks, {file: record.size_bytes for file, record in self._files.items()}
        )

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
            DamagedCheckpointError: a file is gone or has another size, or bytes of it another
                checksum. Some of the tensors are filled then, and all need to be filled anew.
        """
        wanted = Requests()
        targets: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                text = self._values[item.storage_index].text
                planner.load_bytes(item, io.BytesIO(text.encode()))
            else:
                target = planner.resolve_tensor(item).detach()
                wanted.add(item, self._chunks[item.storage_index], _memory(target))
                targets.append((item, target))
        requests = wanted.all()
        files = list(dict.fromkeys(request.file for request in requests))
        pool = ThreadPoolExecutor(transfers_at_once(READS_AT_ONCE))
        try:
            tasks = [pool.submit(self._require_intact, file) for file in files]
            tasks += [pool.submit(partial(self._carry_out, each, planner)) for each in requests]
            for task in wait(tasks, return_when=FIRST_EXCEPTION).done:
                task.result()
        finally:
            pool.shutdown(cancel_futures=True)
        self.bytes_read += sum(request.end - request.start for request in requests)
        self.num_requests += len(tasks)
        for item, target in targets:
            planner.commit_tensor(item, target)
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

    def _carry_out(self, request: Request, planner: LoadPlanner) -> None:
        buffer = self._buffer(request.end - request.start)
        memory, landings = _land(request, buffer)
        self._fetch(request, memory)
        for landing in landings:
            self._require_sound(landing)
            if not landing.is_in_place:
                _deliver(landing.piece, landing.data, planner)

    def _fetch(self, request: Request, memory: list[memoryview]) -> None:
        key, start = self._folder + request.file, request.start
        try:
            for views in _ranges(memory):
                self._store.read_into(key, *views, start=start)
                start += sum(map(len, views))
        except ObjectMissing as error:
            raise DamagedCheckpointError(str(error)) from error
        except StoreError:
            # A file that has become shorter is no failure of the store.
            self._require_intact(request.file)
            raise

    def _buffer(self, size_bytes: int) -> memoryview:
        """The thread's own, used again: fresh pages cost more than what is copied through them."""
        held: memoryview | None = getattr(self._buffers, "held", None)
        if held is None or len(held) < size_bytes:
            held = self._buffers.held = torch.empty(size_bytes, dtype=torch.uint8).numpy().data
        return held[:size_bytes]

    def _require_sound(self, landing: _Landing) -> None:
        piece, padding = landing.piece, landing.padding
        if not piece.agrees(landing.data):
            what = "the checksum"
        elif padding != bytes(len(padding)):
            what = "what follows"
        else:
            return
        chunk = piece.stored.chunk
        raise DamagedCheckpointError(
            f"{what} of the bytes {piece.file_start:,} to {piece.file_end - piece.padding:,} of "
            f"{self._folder + chunk.file!r}, tensor {piece.stored.name!r}, is not as it was saved"
        )


def _with_padding(
    chunks: dict[MetadataIndex, Chunk], file_bytes: dict[str, int]
) -> dict[MetadataIndex, Stored]:
    """Every chunk with the bytes that follow it and belong to none: a few, so that items align."""
    by_place = sorted((chunk.file, chunk.start, chunk.size_bytes) for chunk in chunks.values())
    following: dict[tuple[str, int], int] = {}
    for (file, start, size_bytes), after in pairwise([*by_place, ("", 0, 0)]):
        next_start = after[1] if after[0] == file else file_bytes.get(file, 0)
        following[file, start] = max(0, next_start - start - size_bytes)
    return {
        index: Stored(
            name=index.fqn,
            chunk=chunk,
            padding=padding if (padding := following[chunk.file, chunk.start]) < BLOCK_BYTES else 0,
        )
        for index, chunk in chunks.items()
    }


@dataclass(frozen=True)
class _Landing:
    """Where a piece and its padding are once they are read; `is_in_place` if that is for good."""

    piece: Piece
    data: memoryview
    padding: memoryview
    is_in_place: bool


def _land(request: Request, buffer: memoryview) -> tuple[list[memoryview], list[_Landing]]:
    """The memory for all bytes of a request, in their order; and where in it the pieces are.

    A piece goes to its place unless another one needs bytes of it, too. `buffer` is as long as the
    request, and used for the rest: what is not used of fresh memory costs nothing.
    """
    memory: list[memoryview] = []
    landings: list[_Landing] = []
    taken = covered = 0
    following = [*(piece.file_start for piece in request.pieces[1:]), request.end]
    for piece, next_start in zip(request.pieces, following, strict=True):
        start = piece.file_start - request.start
        end = start + piece.end - piece.start
        is_alone = covered <= start and end <= next_start - request.start
        covered = max(covered, end)
        place = piece.place if is_alone else None
        if place is not None:
            memory += [buffer[taken:start], place]
            taken = end
        data = buffer[start:end] if place is None else place
        padding = buffer[end : end + piece.padding]
        landings.append(_Landing(piece, data, padding, is_in_place=place is not None))
    return [*memory, buffer[taken:]], landings


def _ranges(memory: list[memoryview]) -> Iterator[list[memoryview]]:
    """All of it at once, unless it is longer than a range: then it is one piece."""
    if sum(map(len, memory)) <= RANGE_BYTES:
        yield memory
        return
    for view in memory:
        for at in range(0, len(view), RANGE_BYTES):
            yield [view[at : at + RANGE_BYTES]]


def _memory(target: torch.Tensor) -> memoryview | None:
    """The memory of a tensor whose elements lie there in order, in one run."""
    if target.device.type != "cpu" or not target.is_contiguous() or target.is_conj():
        return None
    # A dimension of one element may have any stride, which a view as bytes does not accept.
    flat = target.as_strided((target.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy().data)


def _deliver(piece: Piece, data: memoryview, planner: LoadPlanner) -> None:
    """Copies what is wanted of a piece to where it belongs."""
    if piece.view is not None:
        first, last = max(piece.first, piece.start), min(piece.last, piece.end)
        piece.view[first - piece.first : last - piece.first] = data[
            first - piece.start : last - piece.start
        ]
        return
    _copy_box(piece.item, data[piece.first - piece.start :], piece.stored.chunk, planner)


def _copy_box(item: ReadItem, data: memoryview, chunk: Chunk, planner: LoadPlanner) -> None:
    """`data` begins with the first element of the item's box."""
    with torch.no_grad():
        target = planner.resolve_tensor(item).detach()
        usable = len(data) // target.element_size() * target.element_size()
        flat = torch.frombuffer(data[:usable], dtype=target.dtype)
        target.copy_(flat.as_strided(item.lengths, box_strides(chunk)))
