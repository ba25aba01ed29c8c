"""What a save holds and where: the JSON that takes the place of torch's pickled metadata.

A checkpoint that comes from a bucket must not be able to run code, so nothing in it is pickled:
tensors are raw bytes, everything else is a JSON value and lies in here. Each rank's `done` record
carries the layout of its own part; the checkpoint's metadata is nothing but their sum, so whoever
finds all the `done` records can finish a commit.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from awscrt.checksums import combine_crc64nvme, crc64nvme
from pydantic import TypeAdapter

from storage.checkpoint_records import RankDone
from storage.errors import CheckpointError

METADATA_NAME = "metadata.json"
VALUE_BYTES = 64 * 2**10
BLOCK_BYTES = 32 * 2**10

StatePath = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor, `lengths` from `offsets`: row-major bytes of `file` from `start`.

    `file` is a name within the save's folder; the CRC64-NVME is over this chunk's bytes alone.
    `blocks` holds those of its blocks of BLOCK_BYTES, the last of which may be shorter: eight
    big-endian bytes each, in base64, so that a rank can check the part of a chunk that it reads.
    It is empty for a chunk of one block.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    file: str
    start: int
    size_bytes: int
    crc64nvme: str
    blocks: str = ""


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """A whole tensor and the chunks that tile it. `path` is its place in the nested state."""

    dtype: str
    shape: tuple[int, ...]
    path: StatePath
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True)
class ValueLayout:
    """A JSON value, as the text that `json.dumps` gave: no second encoder may touch it."""

    text: str
    path: StatePath


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All tensors and values of a save, or of one rank's part of it, by their flat names."""

    version: int = 1
    tensors: Mapping[str, TensorLayout] = field(default_factory=dict)
    values: Mapping[str, ValueLayout] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankPart(RankDone):
    """`done.<rank>.json` in full: with it, this rank's part can be found again byte by byte."""

    layout: Layout


def merge(parts: Iterable[Layout]) -> Layout:
    """The layout of the whole save.

    Raises:
        CheckpointError: parts contradict each other, or do not tile every tensor.
    """
    tensors: dict[str, TensorLayout] = {}
    chunks: dict[str, list[Chunk]] = {}
    values: dict[str, ValueLayout] = {}
    for part in parts:
        values.update(part.values)
        for name, tensor in part.tensors.items():
            known = tensors.setdefault(name, tensor)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise CheckpointError(
                    f"ranks disagree on {name!r}: {known.dtype} {list(known.shape)} on one, "
                    f"{tensor.dtype} {list(tensor.shape)} on another; all must build one model"
                )
            chunks.setdefault(name, []).extend(tensor.chunks)
    for name, tensor in tensors.items():
        held = sum(math.prod(chunk.lengths) for chunk in chunks[name])
        if held != math.prod(tensor.shape):
            raise CheckpointError(
                f"the ranks wrote {held} elements of {name!r}, which has "
                f"{math.prod(tensor.shape)}; every element must be written exactly once"
            )
    whole = {name: replace(tensor, chunks=tuple(chunks[name])) for name, tensor in tensors.items()}
    return Layout(tensors=whole, values=values)


def value_text(name: str, value: object) -> str:
    """The JSON text of a value that is no tensor; a tuple is written as a list.

    Raises:
        CheckpointError: the value is not JSON, or too large to lie in the metadata.
    """
    if not _is_json(value):
        raise CheckpointError(
            f"cannot save {name!r} of type {type(value).__name__}: {_short(value)}; a checkpoint "
            "holds tensors and JSON values (None, bool, int, finite float, str, list, dict with "
            "string keys), make it one of these"
        )
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    if len(text) > VALUE_BYTES:
        raise CheckpointError(
            f"cannot save {name!r}: its JSON is {len(text)} bytes, more than {VALUE_BYTES}; "
            "make it a tensor"
        )
    return text


def compact(record: Layout | RankPart) -> bytes:
    """The record's JSON without white space: a layout grows with tensors times ranks."""
    return TypeAdapter(type(record)).dump_json(record)


def crc_text(crc: int) -> str:
    """A CRC64-NVME as S3 writes it: base64 of eight big-endian bytes."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def chunk_crcs(data: memoryview) -> tuple[int, str]:
    """The CRC64-NVME of a chunk's bytes, and `Chunk.blocks`; one pass serves for both."""
    crcs = [crc64nvme(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    if len(crcs) <= 1:
        return next(iter(crcs), 0), ""
    whole = crcs[0]
    for number, crc in enumerate(crcs[1:], start=1):
        whole = combine_crc64nvme(whole, crc, min(BLOCK_BYTES, len(data) - number * BLOCK_BYTES))
    return whole, base64.b64encode(b"".join(crc.to_bytes(8, "big") for crc in crcs)).decode()


def crc_number(text: str) -> int:
    """What `crc_text` was made from."""
    return int.from_bytes(base64.b64decode(text), "big")


def _is_json(value: object) -> bool:
    if value is None or isinstance(value, bool):
        return True
    # Exactly these types: a subclass (an enum, a NumPy scalar) would not come back as itself.
    if type(value) in (int, str):
        return True
    if type(value) is float:
        return math.isfinite(value)
    if type(value) in (list, tuple):
        return all(_is_json(entry) for entry in value)  # type: ignore[attr-defined]
    if type(value) is dict:
        return all(type(key) is str and _is_json(entry) for key, entry in value.items())
    return False


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
