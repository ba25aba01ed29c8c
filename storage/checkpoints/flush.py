"""Sends one rank's part of a save from where it lies in memory to the store. Loads no torch.

Every chunk gets its checksums here, once, for all who read it later. The part is there when its
`done` record is: that names the objects, their sizes and all checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Protocol

from awscrt.checksums import combine_crc64nvme, crc64nvme

from storage.checkpoint_records import FileRecord, SaveFacts
from storage.checkpoints.buffers import StagedFile
from storage.checkpoints.layout import (
    Chunk,
    Layout,
    RankPart,
    chunk_crcs,
    crc_number,
    crc_text,
)
from storage.checkpoints.sealing import encode_sealed
from storage.errors import StoreError
from storage.keys import RunKeys
from storage.object_store import Bytes, ObjectInfo


class Destination(Protocol):
    """What a part is sent to: the object store, or what stands in for one nearer to the node."""

    def upload(self, key: str, data: Bytes, *, executor: Executor | None = ...) -> None: ...

    def put(self, key: str, body: Bytes) -> None: ...

    def head(self, key: str) -> ObjectInfo | None: ...


def send_part(
    store: Destination,
    keys: RunKeys,
    *,
    attempt: int,
    facts: SaveFacts,
    rank: int,
    files: Sequence[StagedFile],
    layout: Layout,
    data: memoryview,
    executor: Executor | None = None,
) -> RankPart:
    """Sends the objects of a rank's part, through `executor`, and then its `done` record.

    `data` is the rank's whole buffer. Doing it again sends the same bytes to the same keys.

    Raises:
        StoreError: an object is not in the store, or not with its size.
    """
    folder = keys.save(attempt, step=facts.step, save=facts.save)
    sent, layout = send_files(
        store, folder, files=files, layout=layout, data=data, executor=executor
    )
    part = RankPart(facts=facts, rank=rank, files=sent, layout=layout)
    key = keys.done(attempt, step=facts.step, save=facts.save, rank=rank)
    store.put(key, encode_sealed(part))
    return part


def send_files(
    store: Destination,
    folder: str,
    *,
    files: Sequence[StagedFile],
    layout: Layout,
    data: memoryview,
    executor: Executor | None = None,
) -> tuple[tuple[FileRecord, ...], Layout]:
    """Sends the objects of a part and looks whether the store has them whole.

    Returns what was sent, and the layout with the checksums of every chunk and of its blocks.

    Raises:
        StoreError: an object is not in the store, or not with its size.
    """
    chunks: dict[str, list[Chunk]] = {file.name: [] for file in files}
    starts = {file.name: file.start for file in files}
    tensors = {}
    for name, tensor in layout.tensors.items():
        summed = tuple(_summed(chunk, starts[chunk.file], data) for chunk in tensor.chunks)
        tensors[name] = replace(tensor, chunks=summed)
        for chunk in summed:
            chunks[chunk.file].append(chunk)
    sent = tuple(
        _send_file(store, folder + file.name, _body(file, data), chunks[file.name], executor)
        for file in files
    )
    return sent, replace(layout, tensors=tensors)


def _send_file(
    store: Destination,
    key: str,
    body: memoryview,
    chunks: Iterable[Chunk],
    executor: Executor | None,
) -> FileRecord:
    store.upload(key, body, executor=executor)
    found = store.head(key)
    if found is None or found.size_bytes != len(body):
        raise StoreError(
            f"{key!r} was sent with {len(body)} bytes, and the store has "
            + ("no such object" if found is None else f"{found.size_bytes}")
            + "; it does not keep what it acknowledges, do not use it for checkpoints"
        )
    return FileRecord(key=key, size_bytes=len(body), crc64nvme=crc_text(_crc_of_file(body, chunks)))


def _body(file: StagedFile, data: memoryview) -> memoryview:
    return data[file.start : file.start + file.size_bytes]


def _summed(chunk: Chunk, file_start: int, data: memoryview) -> Chunk:
    start = file_start + chunk.start
    crc, blocks = chunk_crcs(data[start : start + chunk.size_bytes])
    return replace(chunk, crc64nvme=crc_text(crc), blocks=blocks)


def _crc_of_file(body: memoryview, chunks: Iterable[Chunk]) -> int:
    """Put together from those of its chunks and of the few bytes between them."""
    crc, position = 0, 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.start):
        crc = crc64nvme(body[position : chunk.start], crc)
        crc = combine_crc64nvme(crc, crc_number(chunk.crc64nvme), chunk.size_bytes)
        position = chunk.start + chunk.size_bytes
    rest: int = crc64nvme(body[position:], crc)
    return rest
