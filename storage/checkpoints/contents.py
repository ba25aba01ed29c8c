"""What the save of a commit holds, found out without torch: for who checks or copies it elsewhere.

A layout is believed only when it fits its commit: every element of every tensor lies in exactly one
chunk, and every chunk within one of the commit's files.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

from awscrt.checksums import crc64nvme

from storage.checkpoint_records import Commit
from storage.checkpoints.layout import (
    BLOCK_BYTES,
    Chunk,
    Layout,
    TensorLayout,
    ValueLayout,
    crc_text,
)
from storage.errors import CheckpointError, LedgerError, ObjectMissing
from storage.object_store import ObjectInfo
from storage.records import decode

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint64": 8,
        "uint32": 4,
        "uint16": 2,
        "uint8": 1,
        "bool": 1,
        "complex64": 8,
        "complex128": 16,
    }
)
"""Of each dtype that a checkpoint may hold, by its name there."""


class Source(Protocol):
    """Where a save is read from: the object store, or a disk that has its keys."""

    def get(self, key: str) -> bytes: ...

    def head(self, key: str) -> ObjectInfo | None: ...

    def read_into(self, key: str, *into: memoryview, start: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that is not as the commit says: in which object, and of which tensor.

    `more_tensors` counts the others, where it is of several.
    """

    key: str
    what: str
    tensor: str | None = None
    more_tensors: int = 0

    def __str__(self) -> str:
        whose = "" if self.tensor is None else f", tensor {self.tensor!r}"
        if self.more_tensors:
            whose += f" and {self.more_tensors} more"
        return f"{self.key!r}{whose}: {self.what}"


class DamagedContentsError(CheckpointError):
    """A checkpoint is not what its commit says."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(map(str, faults)))
        self.faults = tuple(faults)


def read_layout(store: Source, commit: Commit) -> Layout:
    """The layout of a commit's save, checked against the commit.

    Raises:
        DamagedContentsError: the metadata object is gone or altered, or contradicts the commit.
        CheckpointError: a later version of this program wrote it.
    """
    record = commit.metadata

    def damaged(what: str) -> DamagedContentsError:
        return DamagedContentsError([Fault(key=record.key, what=what)])

    try:
        body = store.get(record.key)
    except ObjectMissing:
        raise damaged("is gone") from None
    if len(body) != record.size_bytes:
        raise damaged(f"has {len(body):,} bytes, and its commit says {record.size_bytes:,}")
    if crc_text(crc64nvme(body)) != record.crc64nvme:
        raise damaged("its checksum is not the one in its commit")
    try:
        layout = decode(Layout, body)
    except LedgerError as error:
        raise damaged(f"holds no layout ({error})") from None
    if layout.version != Layout().version:
        raise CheckpointError(
            f"{record.key!r} has format version {layout.version}, this program reads "
            f"{Layout().version}; use the version that wrote it"
        )
    if faults := tuple(layout_faults(layout, commit)):
        raise DamagedContentsError(faults)
    return layout


def layout_faults(layout: Layout, commit: Commit) -> Iterator[Fault]:
    """Where a layout contradicts itself or its commit; pure."""
    folder = folder_of(commit)
    sizes = {file.key.removeprefix(folder): file.size_bytes for file in commit.files}
    key = commit.metadata.key
    for name, value in layout.values.items():
        if not _is_json(value):
            yield Fault(key=key, tensor=name, what="its value is no JSON")
    for name, tensor in layout.tensors.items():
        problems = list(_chunk_problems(tensor, sizes)) or list(_tile_problems(tensor))
        yield from (Fault(key=key, tensor=name, what=problem) for problem in problems)
    for file, parts in chunks_by_file(layout).items():
        for (_, before), (name, after) in pairwise(parts):
            if after.start < before.start + before.size_bytes:
                what = f"its bytes from {after.start:,} are said to be another tensor's, too"
                yield Fault(key=folder + file, tensor=name, what=what)


def folder_of(commit: Commit) -> str:
    """Key prefix of the commit's save, with its trailing slash."""
    return commit.metadata.key.rpartition("/")[0] + "/"


def chunks_by_file(layout: Layout) -> dict[str, list[tuple[str, Chunk]]]:
    """The chunks of each file, with their tensor's name, in the order of their bytes."""
    found: dict[str, list[tuple[str, Chunk]]] = {}
    for name, tensor in layout.tensors.items():
        for chunk in tensor.chunks:
            found.setdefault(chunk.file, []).append((name, chunk))
    for parts in found.values():
        parts.sort(key=lambda part: (part[1].start, part[1].size_bytes))
    return found


def _is_json(value: ValueLayout) -> bool:
    try:
        json.loads(value.text)
    except ValueError:
        return False
    return True


def _chunk_problems(tensor: TensorLayout, sizes: Mapping[str, int]) -> Iterator[str]:
    element_bytes = ELEMENT_BYTES.get(tensor.dtype)
    if element_bytes is None:
        yield f"its dtype {tensor.dtype!r} is not known"
        return
    for chunk in tensor.chunks:
        box = f"the box {list(chunk.lengths)} at {list(chunk.offsets)}"
        fits = len(chunk.offsets) == len(chunk.lengths) == len(tensor.shape) and all(
            min(offset, length) >= 0 and offset + length <= size
            for offset, length, size in zip(
                chunk.offsets, chunk.lengths, tensor.shape, strict=False
            )
        )
        if not fits:
            yield f"{box} is no part of its shape {list(tensor.shape)}"
            continue
        if chunk.size_bytes != math.prod(chunk.lengths) * element_bytes:
            yield f"{box} of {tensor.dtype} cannot have {chunk.size_bytes:,} bytes"
        file_bytes = sizes.get(chunk.file)
        if file_bytes is None:
            yield f"{box} is in the file {chunk.file!r}, which the commit does not name"
        elif chunk.start < 0 or chunk.start + chunk.size_bytes > file_bytes:
            yield f"{box} goes beyond the {file_bytes:,} bytes of {chunk.file!r}"
        if chunk.blocks and not _are_blocks(chunk.blocks, chunk.size_bytes):
            yield f"{box} has not one checksum for each {BLOCK_BYTES // 1024} KiB"


def _are_blocks(text: str, size_bytes: int) -> bool:
    """Whether it is base64 of eight bytes for each block."""
    try:
        return len(base64.b64decode(text, validate=True)) == 8 * -(-size_bytes // BLOCK_BYTES)
    except ValueError:
        return False


def _tile_problems(tensor: TensorLayout) -> Iterator[str]:
    """Every element lies in one chunk: the counts agree, and no two boxes meet."""
    held = sum(math.prod(chunk.lengths) for chunk in tensor.chunks)
    if held != math.prod(tensor.shape):
        yield f"its chunks hold {held:,} elements of {math.prod(tensor.shape):,}"
    elif _do_meet(tensor.chunks):
        yield "two of its chunks hold the same elements"


def _do_meet(chunks: Iterable[Chunk]) -> bool:
    """Whether any two boxes share an element: a sweep along the first dimension."""
    open_boxes: list[Chunk] = []
    full = (chunk for chunk in chunks if math.prod(chunk.lengths))
    for chunk in sorted(full, key=lambda chunk: chunk.offsets):
        if not chunk.offsets:
            if open_boxes:
                return True
            open_boxes.append(chunk)
            continue
        first = chunk.offsets[0]
        open_boxes = [box for box in open_boxes if box.offsets[0] + box.lengths[0] > first]
        if any(_meets(box, chunk) for box in open_boxes):
            return True
        open_boxes.append(chunk)
    return False


def _meets(one: Chunk, other: Chunk) -> bool:
    return all(
        a < b + d and b < a + c
        for a, b, c, d in zip(one.offsets, other.offsets, one.lengths, other.lengths, strict=True)
    )
