"""Which bytes of which file a rank has to read, and in which requests; pure.

What is read must be verified, and there are checksums of a chunk and of each of its blocks: so what
is wanted is widened to whole blocks. Neighbours share a request. A run of bytes goes straight from
there to where it belongs; all else goes through a buffer.
"""

from __future__ import annotations

import base64
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from awscrt.checksums import combine_crc64nvme, crc64nvme
from torch import Size
from torch.distributed.checkpoint.planner import ReadItem

from storage.checkpoints.layout import BLOCK_BYTES, Chunk, crc_text

RANGE_BYTES = 32 * 2**20
"""No request is longer."""
BOX_BYTES = RANGE_BYTES - 3 * BLOCK_BYTES
"""No box that is read in one request is longer: it has to be widened, and padding may follow."""
REQUEST_BYTES = 2 * 2**20
"""A request costs about as much as so many bytes: no longer gap is read to save one."""
SPARE = 32
"""One byte in so many that a rank wants may be read beside them, to save requests."""
SPARE_BYTES = 64 * 2**10
"""A rank that wants next to nothing may read so much beside it all the same."""


@dataclass(frozen=True, eq=False)
class Stored:
    """A chunk as it lies in its file, with the bytes between it and the next one, all zero."""

    name: str
    chunk: Chunk
    padding: int

    @cached_property
    def blocks(self) -> bytes:
        """Eight bytes for each block; empty where only the whole chunk can be verified."""
        return base64.b64decode(self.chunk.blocks)

    def is_whole(self, start: int, end: int) -> bool:
        return start == 0 and end == self.chunk.size_bytes

    def widened(self, start: int, end: int) -> tuple[int, int]:
        """The smallest part that holds `start:end` and that there are checksums for."""
        size_bytes = self.chunk.size_bytes
        if not self.blocks:
            return 0, size_bytes
        return start // BLOCK_BYTES * BLOCK_BYTES, min(_rounded_up(end), size_bytes)

    def agrees(self, start: int, data: memoryview) -> bool:
        """Whether `data`, whole blocks of the chunk from `start`, has the blocks' checksums."""
        crcs = (crc64nvme(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES))
        found = b"".join(crc.to_bytes(8, "big") for crc in crcs)
        first = start // BLOCK_BYTES * 8
        return found == self.blocks[first : first + len(found)]


class WholeChunk:
    """The checksum of a chunk that is read in several parts, in any order, by several threads."""

    def __init__(self, stored: Stored) -> None:
        self._expected = stored.chunk.crc64nvme
        self._missing = stored.chunk.size_bytes
        self._parts: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def agrees(self, start: int, data: memoryview) -> bool:
        """False for the part that completes a chunk whose checksum is another."""
        crc = crc64nvme(data)
        with self._lock:
            self._parts[start] = crc, len(data)
            self._missing -= len(data)
            if self._missing:
                return True
        whole = 0
        for _, (part, size_bytes) in sorted(self._parts.items()):
            whole = combine_crc64nvme(whole, part, size_bytes)
        return crc_text(whole) == self._expected


@dataclass(frozen=True, eq=False)
class Piece:
    """The bytes `start:end` of a chunk, verified as they come; `first:last` of them are wanted.

    `view` is where the wanted bytes go, as they are; None where they have to be copied as a box.
    """

    item: ReadItem
    stored: Stored
    first: int
    last: int
    start: int
    end: int
    view: memoryview | None
    whole: WholeChunk | None

    @property
    def place(self) -> memoryview | None:
        """Where its bytes go as they are, if all of them are wanted, and there in one run."""
        if self.view is None or self.start < self.first or self.last < self.end:
            return None
        return self.view[self.start - self.first : self.end - self.first]

    @property
    def padding(self) -> int:
        """Bytes that follow in the file and belong to no chunk."""
        return self.stored.padding if self.end == self.stored.chunk.size_bytes else 0

    @property
    def file_start(self) -> int:
        return self.stored.chunk.start + self.start

    @property
    def file_end(self) -> int:
        return self.stored.chunk.start + self.end + self.padding

    def agrees(self, data: memoryview) -> bool:
        """Whether the bytes `start:end` are the ones that were saved."""
        if self.whole is not None:
            return self.whole.agrees(self.start, data)
        return self.stored.agrees(self.start, data)


@dataclass(frozen=True, eq=False)
class Request:
    """The bytes `start:end` of a file, and the pieces that lie in them."""

    file: str
    start: int
    end: int
    pieces: tuple[Piece, ...]


@dataclass
class Requests:
    """Collects what is wanted, item for item; then says what to ask for."""

    _pieces: dict[str, list[Piece]] = field(default_factory=dict)
    _wanted_bytes: int = 0

    def add(self, item: ReadItem, stored: Stored, view: memoryview | None) -> None:
        """`view` is the memory of the item's target, where its elements lie in one run there."""
        chunk = stored.chunk
        first, last = _extent(item, chunk)
        is_run = last - first == math.prod(item.lengths) * _element_bytes(chunk)
        if view is not None and is_run:
            self._add_run(item, stored, first, last, view)
            return
        if not stored.blocks or (stored.is_whole(first, last) and last <= BOX_BYTES):
            self._add_box(item, stored)
            return
        for box in boxes(item, chunk):
            self._add_box(box, stored)

    def all(self) -> list[Request]:
        """Every request, in the order of files and bytes."""
        requests = join(self._pieces, wanted_bytes=self._wanted_bytes)
        return sorted(requests, key=lambda request: (request.file, request.start))

    def _add_run(
        self, item: ReadItem, stored: Stored, first: int, last: int, view: memoryview
    ) -> None:
        start, end = stored.widened(first, last)
        whole = WholeChunk(stored) if stored.is_whole(start, end) else None
        # A block that is wanted in part is a piece of its own, so that the rest needs no buffer.
        inner_start, inner_end = _inner(stored, first, last)
        parts = [(start, end)]
        if inner_start < inner_end:
            parts = [(start, inner_start), *_parts(inner_start, inner_end), (inner_end, end)]
        for at, to in parts:
            if at < to:
                self._add(Piece(item, stored, first, last, at, to, view, whole))
        self._wanted_bytes += last - first

    def _add_box(self, item: ReadItem, stored: Stored) -> None:
        first, last = _extent(item, stored.chunk)
        start, end = stored.widened(first, last)
        whole = WholeChunk(stored) if stored.is_whole(start, end) else None
        self._add(Piece(item, stored, first, last, start, end, None, whole))
        self._wanted_bytes += math.prod(item.lengths) * _element_bytes(stored.chunk)

    def _add(self, piece: Piece) -> None:
        self._pieces.setdefault(piece.stored.chunk.file, []).append(piece)


def boxes(item: ReadItem, chunk: Chunk) -> Iterator[ReadItem]:
    """The item cut along its outer dimensions, until no part has a gap that is dear to read.

    A box of some columns is a run of bytes for each row, and reading over short gaps costs less
    than a request for each row. So a rank that wants a part of the columns of a chunk reads the
    chunk's rows whole, unless they are of several MiB.
    """
    first, last = _extent(item, chunk)
    dim = next((dim for dim, length in enumerate(item.lengths) if length > 1), None)
    if dim is None:
        yield item
        return
    step = _strides(chunk.lengths)[dim] * _element_bytes(chunk)
    row = last - first - (item.lengths[dim] - 1) * step
    # No gap of an inner dimension is longer than that of the outermost.
    is_near = step - row <= REQUEST_BYTES
    if is_near and last - first <= BOX_BYTES:
        yield item
        return
    rows = max(1, (BOX_BYTES - row) // step + 1) if is_near else 1
    for at in range(0, item.lengths[dim], rows):
        part = _cut(item, dim, at, min(rows, item.lengths[dim] - at))
        yield from boxes(part, chunk) if rows == 1 else (part,)


def join(pieces: dict[str, list[Piece]], *, wanted_bytes: int) -> Iterator[Request]:
    """Requests for pieces, by file.

    Neighbours share a request as long as what is read for nothing stays a small part of what the
    rank wants; the shortest gaps go first, for each saves one request.
    """
    ordered = {
        file: sorted(each, key=lambda piece: (piece.file_start, piece.file_end))
        for file, each in pieces.items()
    }
    gaps: list[tuple[int, str, int]] = []
    for file, each in ordered.items():
        end = each[0].file_end
        for number, piece in enumerate(each[1:], 1):
            gaps.append((max(0, piece.file_start - end), file, number))
            end = max(end, piece.file_end)
    read = sum(piece.file_end - piece.file_start for each in pieces.values() for piece in each)
    budget = max(wanted_bytes // SPARE - (read - wanted_bytes), SPARE_BYTES)
    bridged: set[tuple[str, int]] = set()
    for gap, file, number in sorted(gaps):
        budget -= gap
        if budget < 0 or gap > REQUEST_BYTES:
            break
        bridged.add((file, number))
    for file, each in ordered.items():
        group: list[Piece] = []
        end = 0
        for number, piece in enumerate(each):
            is_far = (file, number) not in bridged
            if group and (is_far or piece.file_end - group[0].file_start > RANGE_BYTES):
                yield Request(file, group[0].file_start, end, tuple(group))
                group, end = [], 0
            group.append(piece)
            end = max(end, piece.file_end)
        yield Request(file, group[0].file_start, end, tuple(group))


def box_strides(chunk: Chunk) -> list[int]:
    """Of the chunk's elements, in elements."""
    return _strides(chunk.lengths)


def _extent(item: ReadItem, chunk: Chunk) -> tuple[int, int]:
    """The smallest run of the chunk's bytes that holds the box that the item wants."""
    strides, element_bytes = _strides(chunk.lengths), _element_bytes(chunk)
    first = _dot(item.storage_offsets, strides)
    last = first + _dot([length - 1 for length in item.lengths], strides)
    return first * element_bytes, (last + 1) * element_bytes


def _inner(stored: Stored, first: int, last: int) -> tuple[int, int]:
    """The part of `first:last` that can be verified without a byte beside it; may be none."""
    if not stored.blocks and not stored.is_whole(first, last):
        return first, first
    is_to_the_end = last == stored.chunk.size_bytes
    return _rounded_up(first), last if is_to_the_end else last // BLOCK_BYTES * BLOCK_BYTES


def _parts(start: int, end: int) -> Iterator[tuple[int, int]]:
    """About equal parts, of whole blocks but for the last, none longer than a range."""
    count = -(-(end - start) // RANGE_BYTES)
    size_bytes = _rounded_up(-(-(end - start) // count))
    for at in range(start, end, size_bytes):
        yield at, min(at + size_bytes, end)


def _cut(item: ReadItem, dim: int, at: int, length: int) -> ReadItem:
    def moved(offsets: Size) -> Size:
        return Size([*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]])

    return replace(
        item,
        dest_offsets=moved(item.dest_offsets),
        storage_offsets=moved(item.storage_offsets),
        lengths=Size([*item.lengths[:dim], length, *item.lengths[dim + 1 :]]),
    )


def _element_bytes(chunk: Chunk) -> int:
    return chunk.size_bytes // math.prod(chunk.lengths)


def _rounded_up(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _strides(lengths: Sequence[int]) -> list[int]:
    strides: list[int] = []
    step = 1
    for length in reversed(lengths):
        strides.append(step)
        step *= length
    return strides[::-1]


def _dot(left: Iterable[int], right: Iterable[int]) -> int:
    return sum(a * b for a, b in zip(left, right, strict=True))
