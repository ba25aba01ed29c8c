"""Reads every byte of a checkpoint and compares it with what its commit says, without torch.

A file is read in pieces, several files at a time, so that memory is bounded whatever their sizes:
`THREADS` pieces of `PIECE_BYTES`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from awscrt.checksums import crc64nvme

from storage.checkpoint_records import Commit, FileRecord
from storage.checkpoints.contents import (
    DamagedContentsError,
    Fault,
    chunks_by_file,
    folder_of,
    read_layout,
)
from storage.checkpoints.layout import BLOCK_BYTES, Chunk, crc_text
from storage.errors import ObjectMissing
from storage.object_store import ObjectStore

PIECE_BYTES = 8 * 2**20
THREADS = 8

Parts = Sequence[tuple[str, Chunk]]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is wrong with a checkpoint, nothing where it is whole.

    `unsteady` are the objects that were read wrong once and right the second time: not they are
    at fault, but this host, its network or the store.
    """

    faults: tuple[Fault, ...] = ()
    unsteady: tuple[str, ...] = ()


def verify(store: ObjectStore, commit: Commit, *, told: Callable[[int], None]) -> Verdict:
    """Compares all that is stored of a commit with its checksums; `told` hears of bytes read.

    Raises:
        StoreError: the store failed, as against not having an object: nothing is known then.
        CheckpointError: a later version of this program wrote the checkpoint.
    """
    try:
        layout = read_layout(store, commit)
    except DamagedContentsError as error:
        return Verdict(faults=error.faults)
    told(commit.metadata.size_bytes)
    parts, folder = chunks_by_file(layout), folder_of(commit)

    def check(file: FileRecord) -> tuple[list[Fault], list[str]]:
        chunks = parts.get(file.key.removeprefix(folder), ())
        faults = _faults(store, file, chunks, told)
        if not faults or faults == _faults(store, file, chunks, lambda _: None):
            return faults, []
        # Once more: two reads that differ say nothing of what is stored.
        again = _faults(store, file, chunks, lambda _: None)
        return again, [] if again else [file.key]

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(check, commit.files))
    return Verdict(
        faults=tuple(fault for faults, _ in found for fault in faults),
        unsteady=tuple(key for _, keys in found for key in keys),
    )


def _faults(
    store: ObjectStore, file: FileRecord, parts: Parts, told: Callable[[int], None]
) -> list[Fault]:
    """What is wrong with one file."""
    info = store.head(file.key)
    if info is None:
        return [_of_all(file, parts, "is gone")]
    if info.size_bytes != file.size_bytes:
        what = f"has {info.size_bytes:,} bytes, and its commit says {file.size_bytes:,}"
        return [_of_all(file, parts, what)]
    checks = _Checks(file.key, parts)
    crc = 0
    for start in range(0, file.size_bytes, PIECE_BYTES):
        length = min(PIECE_BYTES, file.size_bytes - start)
        try:
            piece = store.get_range(file.key, start=start, length=length)
        except ObjectMissing:
            return [_of_all(file, parts, "went while it was read")]
        crc = crc64nvme(piece, crc)
        checks.feed(memoryview(piece))
        told(length)
    checks.finish()
    if crc_text(crc) != file.crc64nvme and not checks.faults:
        what = "its checksum is not the one in its commit, though every tensor's is"
        return [Fault(key=file.key, what=what)]
    return checks.faults


class _Checks:
    """The checksums of a file's chunks, and of their blocks, while its bytes come by in order."""

    def __init__(self, key: str, parts: Parts) -> None:
        self.faults: list[Fault] = []
        self._key = key
        self._parts = parts
        self._next = 0
        self._position = 0
        self._crc = 0
        self._block_crc = 0
        self._bad_block: int | None = None

    def feed(self, piece: memoryview) -> None:
        end = self._position + len(piece)
        while self._next < len(self._parts):
            name, chunk = self._parts[self._next]
            chunk_end = chunk.start + chunk.size_bytes
            if chunk.start >= end and chunk.size_bytes:
                break
            first = max(chunk.start, self._position)
            data = piece[first - self._position : max(chunk_end - self._position, 0)]
            self._take(chunk, first - chunk.start, data)
            if chunk_end > end:
                break
            self._close(name, chunk)
        self._position = end

    def finish(self) -> None:
        """Chunks without a byte may be left, where the file ends."""
        self.feed(memoryview(b""))

    def _take(self, chunk: Chunk, at: int, data: memoryview) -> None:
        """Bytes of the chunk from its byte `at`."""
        self._crc = crc64nvme(data, self._crc)
        if not chunk.blocks or self._bad_block is not None:
            return
        expected = base64.b64decode(chunk.blocks)
        while data:
            block = at // BLOCK_BYTES
            part = data[: (block + 1) * BLOCK_BYTES - at]
            self._block_crc = crc64nvme(part, self._block_crc)
            at += len(part)
            data = data[len(part) :]
            if at % BLOCK_BYTES and at < chunk.size_bytes:
                return
            if self._block_crc != int.from_bytes(expected[8 * block : 8 * block + 8], "big"):
                self._bad_block = block
                return
            self._block_crc = 0

    def _close(self, name: str, chunk: Chunk) -> None:
        what = None
        if crc_text(self._crc) != chunk.crc64nvme:
            start, end = chunk.start, chunk.start + chunk.size_bytes
            if self._bad_block is not None:
                start += self._bad_block * BLOCK_BYTES
                end = min(end, start + BLOCK_BYTES)
            what = f"the checksum of its bytes {start:,} to {end:,} is not the one in its metadata"
        elif self._bad_block is not None:
            what = f"its metadata says a wrong checksum of its block {self._bad_block}"
        if what is not None:
            self.faults.append(Fault(key=self._key, tensor=name, what=what))
        self._next += 1
        self._crc = self._block_crc = 0
        self._bad_block = None


def _of_all(file: FileRecord, parts: Parts, what: str) -> Fault:
    """What is wrong with a file that is lost as a whole, and every tensor in it."""
    first, *others = dict.fromkeys(name for name, _ in parts) or (None,)
    return Fault(key=file.key, tensor=first, more_tensors=len(others), what=what)
