"""Sends one rank's part of a save from where it lies in memory to the store. Loads no torch.

Every chunk gets its checksums here, once, for all who read it later. The part is there when its
`done` record is: that names the objects, their sizes and all checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from awscrt.checksums import crc64nvme

from storage.checkpoint_records import FileRecord, SaveFacts
from storage.checkpoints.buffers import StagedFile
from storage.checkpoints.layout import Layout, RankPart, TensorLayout, block_crcs, crc_text
from storage.checkpoints.sealing import encode_sealed
from storage.errors import StoreError
from storage.keys import RunKeys
from storage.object_store import Bytes, ObjectInfo

UPLOAD_THREADS = 4


class Destination(Protocol):
    """What a part is sent to: the object store, or what stands in for one nearer to the node."""

    def upload(self, key: str, data: Bytes, *, threads: int = ...) -> None: ...

    def put(self, key: str, body: Bytes) -> None: ...

    def head(self, key: str) -> ObjectInfo | None: ...


def send_part(
    store: Destination,
    keys: RunKeys,
    *,
    attempt: int,
    facts: SaveFacts,
    rank: int,
    files: Iterable[StagedFile],
    layout: Layout,
    data: memoryview,
) -> RankPart:
    """Sends the objects of a rank's part, and then its `done` record.

    `data` is the rank's whole buffer. Doing it again sends the same bytes to the same keys.

    Raises:
        StoreError: an object is not in the store, or not with its size.
    """
    folder = keys.save(attempt, step=facts.step, save=facts.save)
    files = tuple(files)
    part = RankPart(
        facts=facts,
        rank=rank,
        files=tuple(send_file(store, folder, file, data) for file in files),
        layout=with_checksums(layout, files, data),
    )
    key = keys.done(attempt, step=facts.step, save=facts.save, rank=rank)
    store.put(key, encode_sealed(part))
    return part


def send_file(store: Destination, folder: str, file: StagedFile, data: memoryview) -> FileRecord:
    """Sends one object and looks whether the store has it whole."""
    body = data[file.start : file.start + file.size_bytes]
    key = folder + file.name
    store.upload(key, body, threads=UPLOAD_THREADS)
    found = store.head(key)
    if found is None or found.size_bytes != file.size_bytes:
        raise StoreError(
            f"{key!r} was sent with {file.size_bytes} bytes, and the store has "
            + ("no such object" if found is None else f"{found.size_bytes}")
            + "; it does not keep what it acknowledges, do not use it for checkpoints"
        )
    return FileRecord(key=key, size_bytes=file.size_bytes, crc64nvme=crc_text(crc64nvme(body)))


def with_checksums(layout: Layout, files: Iterable[StagedFile], data: memoryview) -> Layout:
    """The layout with the checksums of every chunk and of its blocks, read from the buffer."""
    starts = {file.name: file.start for file in files}
    return replace(
        layout,
        tensors={
            name: _with_checksums(tensor, starts, data) for name, tensor in layout.tensors.items()
        },
    )


def _with_checksums(
    tensor: TensorLayout, starts: Mapping[str, int], data: memoryview
) -> TensorLayout:
    chunks = []
    for chunk in tensor.chunks:
        start = starts[chunk.file] + chunk.start
        body = data[start : start + chunk.size_bytes]
        crc = crc_text(crc64nvme(body))
        chunks.append(replace(chunk, crc64nvme=crc, blocks=block_crcs(body)))
    return replace(tensor, chunks=tuple(chunks))
