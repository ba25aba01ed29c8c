"""Checkpoints put together by hand: any cut of any tensors, without a save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from awscrt.checksums import crc64nvme
from numpy.typing import NDArray

from storage.checkpoint_records import Commit, FileRecord
from storage.checkpoints.layout import (
    Chunk,
    Layout,
    TensorLayout,
    ValueLayout,
    chunk_crcs,
    compact,
    crc_text,
)
from storage.object_store import ObjectStore
from tests.storage.checkpoints.facts import make_commit

Box = tuple[tuple[int, ...], tuple[int, ...]]
FOLDER = "r/checkpoints/data/0001/000000000010.s/"


def put_tensors(
    store: ObjectStore, tensors: Mapping[str, tuple[NDArray[Any], str, list[Box]]]
) -> tuple[Commit, Layout]:
    """Stores tensors, each cut into boxes, the boxes dealt out to two files; and their commit."""
    bodies = [bytearray(), bytearray()]
    layouts = {}
    for name, (array, dtype, boxes) in tensors.items():
        chunks = []
        for number, (offsets, lengths) in enumerate(boxes):
            which = number % 2
            inside = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            data = np.ascontiguousarray(array[inside]).tobytes()
            bodies[which] += bytes(-len(bodies[which]) % 64)
            chunks.append(
                Chunk(
                    offsets=offsets,
                    lengths=lengths,
                    file=f"data.{which}.0.bin",
                    start=len(bodies[which]),
                    size_bytes=len(data),
                    crc64nvme=crc_text(crc64nvme(data)),
                    blocks=chunk_crcs(memoryview(data))[1],
                )
            )
            bodies[which] += data
        layouts[name] = TensorLayout(
            dtype=dtype, shape=array.shape, path=(name,), chunks=tuple(chunks)
        )
    layout = Layout(tensors=layouts, values={"seed": ValueLayout(text="0", path=("seed",))})
    files = [put_file(store, f"data.{n}.0.bin", bytes(body)) for n, body in enumerate(bodies)]
    return commit_of(store, layout, tuple(files)), layout


def put_file(store: ObjectStore, name: str, body: bytes) -> FileRecord:
    store.put(FOLDER + name, body)
    return file_record(name, body)


def file_record(name: str, body: bytes) -> FileRecord:
    return FileRecord(key=FOLDER + name, size_bytes=len(body), crc64nvme=crc_text(crc64nvme(body)))


def commit_of(store: ObjectStore, layout: Layout, files: tuple[FileRecord, ...]) -> Commit:
    metadata = put_file(store, "metadata.json", compact(layout))
    return make_commit(10, metadata=metadata, files=files)


def example() -> dict[str, tuple[NDArray[Any], str, list[Box]]]:
    """Quarters of a matrix of several blocks, rows of another, a scalar, and nothing at all."""
    matrix = np.arange(300 * 200, dtype="<f4").reshape(300, 200)
    quarters = [((r, c), (150, 100)) for r in (0, 150) for c in (0, 100)]
    return {
        "a": (matrix, "float32", quarters),
        "b": (np.arange(35, dtype="<u2").reshape(5, 7), "bfloat16", [((0, 0), (5, 7))]),
        "c": (np.array(3, dtype="<f8"), "float64", [((), ())]),
        "d": (np.empty((0, 4), dtype="<f4"), "float32", [((0, 0), (0, 4))]),
        "e": (np.arange(9, dtype="<f4"), "float32", [((i,), (3,)) for i in (0, 3, 6)]),
    }
