"""Copies tensors of a checkpoint into safetensors files, without torch and in bounded memory.

Tensors are read in slabs of rows, ahead of the one that is written and in parallel. As all bytes of
a chunk come by, and in order, its checksum is compared at its end; the caller must not let a
file be taken for good before `write_tensors` has returned.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from awscrt.checksums import crc64nvme
from numpy.typing import NDArray

from storage.checkpoints.contents import ELEMENT_BYTES, DamagedContentsError, Fault
from storage.checkpoints.layout import Chunk, TensorLayout, crc_text
from storage.errors import CheckpointError, ObjectMissing
from storage.object_store import ObjectStore

SLAB_BYTES = 8 * 2**20
AHEAD_BYTES = 64 * 2**20
THREADS = 8
FILE_BYTES = 5 * 10**9
INDEX_NAME = "model.safetensors.index.json"

FloatType = Literal["float32", "bfloat16", "float16"]
CODES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_SOURCES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A tensor to be written: its name in the files, its name in the checkpoint, its layout."""

    name: str
    source: str
    layout: TensorLayout


@dataclass(frozen=True, kw_only=True)
class Written:
    """The files that were written, in order, and the bytes of tensors in them."""

    files: tuple[str, ...]
    tensor_bytes: int


def write_tensors(
    store: ObjectStore,
    save: str,
    wanted: Sequence[Wanted],
    folder: Path,
    *,
    dtype: FloatType,
    about: Mapping[str, str],
    told: Callable[[int], None],
    file_bytes: int = FILE_BYTES,
) -> Written:
    """Writes the tensors to files of at most `file_bytes`, with an index where there are several.

    `save` is the key prefix of the save's files; `told` hears of bytes read.

    Raises:
        DamagedContentsError: what was read is not what was saved.
        CheckpointError: a tensor holds no floats, or one beyond the range of `dtype`.
        StoreError: the store failed.
        OSError: a file cannot be written.
    """
    for tensor in wanted:
        if tensor.layout.dtype not in _SOURCES:
            raise CheckpointError(
                f"tensor {tensor.source!r} is {tensor.layout.dtype} and cannot become {dtype}; "
                f"only {', '.join(_SOURCES)} can"
            )
    groups = _groups(wanted, dtype=dtype, file_bytes=file_bytes)
    names = _file_names(len(groups))
    with ThreadPoolExecutor(THREADS) as pool:
        slabs = _Slabs(store, save, wanted, pool, told)
        for name, group in zip(names, groups, strict=True):
            with (folder / name).open("wb") as file:
                file.write(_header(group, dtype=dtype, about=about))
                for tensor in group:
                    _write(file, tensor, slabs, dtype=dtype)
                file.flush()
                os.fsync(file.fileno())
            _require_readable(folder / name, group)
    total = sum(output_bytes(tensor.layout, dtype) for tensor in wanted)
    if len(groups) > 1:
        places = {
            tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group
        }
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    return Written(files=tuple(names), tensor_bytes=total)


def output_bytes(tensor: TensorLayout, dtype: FloatType) -> int:
    """Bytes of a tensor as it is written."""
    return math.prod(tensor.shape) * ELEMENT_BYTES[dtype]


def _groups(wanted: Iterable[Wanted], *, dtype: FloatType, file_bytes: int) -> list[list[Wanted]]:
    """The tensors of each file; one that is larger than a file may be has its own."""
    groups: list[list[Wanted]] = [[]]
    size_bytes = 0
    for tensor in wanted:
        more = output_bytes(tensor.layout, dtype)
        if groups[-1] and size_bytes + more > file_bytes:
            groups.append([])
            size_bytes = 0
        groups[-1].append(tensor)
        size_bytes += more
    return groups


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _header(group: Iterable[Wanted], *, dtype: FloatType, about: Mapping[str, str]) -> bytes:
    """The length of a JSON text, the text, and spaces up to a multiple of eight bytes."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    start = 0
    for tensor in group:
        end = start + output_bytes(tensor.layout, dtype)
        described[tensor.name] = {
            "dtype": CODES[dtype],
            "shape": list(tensor.layout.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _require_readable(path: Path, group: Sequence[Wanted]) -> None:
    """The library that others read it with finds in it what we meant to write."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert found == {tensor.name: tensor.layout.shape for tensor in group}


@dataclass(frozen=True)
class _Part:
    """Bytes `start … end` of a chunk, which are `rows` of it: one request."""

    tensor: str
    chunk: Chunk
    rows: tuple[int, int]
    start: int
    end: int


class _Slabs:
    """The rows of the tensors in order, read ahead of their use."""

    def __init__(
        self,
        store: ObjectStore,
        save: str,
        wanted: Iterable[Wanted],
        pool: ThreadPoolExecutor,
        told: Callable[[int], None],
    ) -> None:
        self._store = store
        self._save = save
        self._pool = pool
        self._told = told
        self._planned = (part for tensor in wanted for part in _parts(tensor))
        self._ahead: deque[tuple[_Part, Future[bytes]]] = deque()
        self._ahead_bytes = 0
        self._crcs: dict[tuple[str, int], int] = {}

    def next(self) -> tuple[_Part, bytes]:
        """The next part, and its bytes.

        Raises:
            DamagedContentsError: the last bytes of its chunk came, and they are not as saved.
        """
        while self._ahead_bytes < AHEAD_BYTES and (part := next(self._planned, None)) is not None:
            self._ahead.append((part, self._pool.submit(self._read, part)))
            self._ahead_bytes += part.end - part.start
        part, future = self._ahead.popleft()
        data = future.result()
        self._ahead_bytes -= len(data)
        self._told(len(data))
        self._check(part, data)
        return part, data

    def _read(self, part: _Part) -> bytes:
        key = self._save + part.chunk.file
        start = part.chunk.start + part.start
        try:
            return self._store.get_range(key, start=start, length=part.end - part.start)
        except ObjectMissing:
            raise _damaged(key, part.tensor, "is gone") from None

    def _check(self, part: _Part, data: bytes) -> None:
        chunk = part.chunk
        place = (chunk.file, chunk.start)
        crc = crc64nvme(data, self._crcs.pop(place, 0))
        if part.end < chunk.size_bytes:
            self._crcs[place] = crc
        elif crc_text(crc) != chunk.crc64nvme:
            what = "the checksum of what was read is not the one in its metadata"
            raise _damaged(self._save + chunk.file, part.tensor, what)


def _parts(tensor: Wanted) -> Iterator[_Part]:
    """What has to be read for a tensor, slab after slab, and within a slab chunk after chunk."""
    chunks = sorted(
        (chunk for chunk in tensor.layout.chunks if chunk.size_bytes),
        key=lambda chunk: chunk.offsets,
    )
    rows, _ = _rows(tensor.layout)
    height = _slab_height(tensor.layout)
    waiting: deque[Chunk] = deque(chunks)
    live: list[Chunk] = []
    for first in range(0, rows, height):
        last = min(rows, first + height)
        live = [chunk for chunk in live if _span(chunk)[1] > first]
        while waiting and _span(waiting[0])[0] < last:
            live.append(waiting.popleft())
        for chunk in live:
            top, bottom = _span(chunk)
            begin, stop = max(first, top), min(last, bottom)
            row_bytes = chunk.size_bytes // (bottom - top)
            yield _Part(
                tensor=tensor.source,
                chunk=chunk,
                rows=(begin, stop),
                start=(begin - top) * row_bytes,
                end=(stop - top) * row_bytes,
            )


def _write(file: BinaryIO, tensor: Wanted, slabs: _Slabs, *, dtype: FloatType) -> None:
    rows, width = _rows(tensor.layout)
    height = _slab_height(tensor.layout)
    kind = np.dtype(f"<u{ELEMENT_BYTES[tensor.layout.dtype]}")
    inner = tensor.layout.shape[1:]
    for first in range(0, rows, height):
        last = min(rows, first + height)
        slab = np.empty((last - first, *inner), dtype=kind)
        left = (last - first) * width
        while left:
            part, data = slabs.next()
            chunk = part.chunk
            begin, stop = part.rows
            piece = np.frombuffer(data, dtype=kind).reshape(stop - begin, *chunk.lengths[1:])
            box = tuple(
                slice(offset, offset + length)
                for offset, length in zip(chunk.offsets[1:], chunk.lengths[1:], strict=True)
            )
            slab[(slice(begin - first, stop - first), *box)] = piece
            left -= piece.size
        file.write(_converted(slab, tensor, dtype).data)


def _rows(tensor: TensorLayout) -> tuple[int, int]:
    """How many rows a tensor has, and the elements of one: a scalar is one row of one."""
    if not tensor.shape:
        return 1, 1
    return tensor.shape[0], math.prod(tensor.shape[1:])


def _slab_height(tensor: TensorLayout) -> int:
    row_bytes = _rows(tensor)[1] * ELEMENT_BYTES[tensor.dtype]
    return max(1, SLAB_BYTES // max(1, row_bytes))


def _span(chunk: Chunk) -> tuple[int, int]:
    """The rows of the tensor that a chunk has a part of."""
    if not chunk.offsets:
        return 0, 1
    return chunk.offsets[0], chunk.offsets[0] + chunk.lengths[0]


def _converted(raw: NDArray[Any], tensor: Wanted, dtype: FloatType) -> NDArray[Any]:
    """Elements of the checkpoint's type, given as unsigned integers, as those of `dtype`."""
    source = tensor.layout.dtype
    if source == dtype:
        return raw
    if source == "bfloat16":
        values: NDArray[Any] = (raw.astype(np.uint32) << 16).view("<f4")
    else:
        values = raw.view(f"<f{ELEMENT_BYTES[source]}")
    if dtype == "bfloat16":
        return to_bfloat16(values.astype("<f4"))
    with np.errstate(over="ignore"):
        narrowed = values.astype(f"<f{ELEMENT_BYTES[dtype]}")
    lost = np.isinf(narrowed) & np.isfinite(values)
    if lost.any():
        raise CheckpointError(
            f"--dtype {dtype}: tensor {tensor.source!r} holds {float(values[lost][0]):g}, beyond "
            f"{np.finfo(narrowed.dtype).max:g}, the largest that {dtype} holds; choose bfloat16 "
            "or float32"
        )
    return narrowed


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of float32 numbers, rounded to the nearest, ties to even (IEEE 754)."""
    bits = values.view("<u4")
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    # Rounding could carry a NaN over into an infinity.
    quiet = (bits >> 16) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype("<u2")


def _damaged(key: str, tensor: str, what: str) -> DamagedContentsError:
    return DamagedContentsError([Fault(key=key, tensor=tensor, what=what)])
