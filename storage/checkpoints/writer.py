"""Writes one rank's part of a save: raw bytes, in a few objects, each item with a checksum."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from awscrt.checksums import crc64nvme
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import override

from storage.checkpoint_records import FileRecord
from storage.checkpoints.layout import (
    METADATA_NAME,
    Chunk,
    Layout,
    TensorLayout,
    ValueLayout,
    compact,
    crc_text,
    merge,
)
from storage.checkpoints.metadata import dtype_name
from storage.errors import StoreError
from storage.object_store import ObjectStore

OBJECT_BYTES = 256 * 2**20
ALIGNMENT = 64
UPLOAD_THREADS = 4


class ObjectStoreWriter(StorageWriter):
    """torch's StorageWriter on our object store.

    Items go one after the other, each at a multiple of 64 bytes, into objects of about
    `object_bytes`: an object is assembled in memory before it is sent, so this bounds the memory.
    """

    def __init__(
        self, store: ObjectStore, folder: str, *, rank: int, object_bytes: int = OBJECT_BYTES
    ) -> None:
        """`folder` is the save's key prefix, with its trailing slash."""
        self.files: list[FileRecord] = []
        self._store = store
        self._folder = folder
        self._rank = rank
        self._object_bytes = object_bytes

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.files = []

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Sends every item of the plan; each result carries the item's layout.

        Raises:
            StoreError: an object is not in the store, or not with its size.
        """
        paths = plan.planner_data or {}
        results: list[WriteResult] = []
        for number, batch in enumerate(_batches(plan.items, self._object_bytes)):
            results.extend(
                self._write_object(f"data.{self._rank}.{number}.bin", batch, planner, paths)
            )
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                name = item.index.fqn
                data = planner.resolve_data(item)
                assert isinstance(data, io.BytesIO)
                text = data.getvalue().decode()
                value = ValueLayout(text=text, path=tuple(paths.get(name, (name,))))
                results.append(_result(item.index, len(text), Layout(values={name: value})))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the metadata object; what torch's own `Metadata` says follows from the results."""
        self.write_metadata(merge(layout_of(part) for part in results))

    def write_metadata(self, layout: Layout) -> FileRecord:
        """Writes the metadata object and says what was written."""
        body = compact(layout)
        record = _record(self._folder + METADATA_NAME, body, crc64nvme(body))
        self._store.put(record.key, body)
        return record

    def _write_object(
        self, file: str, items: list[WriteItem], planner: SavePlanner, paths: Any
    ) -> Iterator[WriteResult]:
        body = bytearray(sum(_padded(_item_bytes(item)) for item in items))
        start = 0
        for item in items:
            assert item.tensor_data is not None
            assert item.tensor_data.chunk is not None
            name = item.index.fqn
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            data = _raw_bytes(tensor)
            body[start : start + len(data)] = data
            chunk = Chunk(
                offsets=tuple(item.tensor_data.chunk.offsets),
                lengths=tuple(item.tensor_data.chunk.sizes),
                file=file,
                start=start,
                size_bytes=len(data),
                crc64nvme=crc_text(crc64nvme(memoryview(body)[start : start + len(data)])),
            )
            layout = TensorLayout(
                dtype=dtype_name(name, tensor.dtype),
                shape=tuple(item.tensor_data.size),
                path=tuple(paths.get(name, (name,))),
                chunks=(chunk,),
            )
            yield _result(item.index, len(data), Layout(tensors={name: layout}))
            start += _padded(len(data))
        key = self._folder + file
        self._store.upload(key, body, threads=UPLOAD_THREADS)
        self._require_size(key, len(body))
        self.files.append(_record(key, body, crc64nvme(body)))

    def _require_size(self, key: str, size_bytes: int) -> None:
        found = self._store.head(key)
        if found is None or found.size_bytes != size_bytes:
            raise StoreError(
                f"{key!r} was sent with {size_bytes} bytes, and the store has "
                + ("no such object" if found is None else f"{found.size_bytes}")
                + "; it does not keep what it acknowledges, do not use it for checkpoints"
            )


def layout_of(results: Iterable[WriteResult]) -> Layout:
    """The layout of the part that these results describe."""
    tensors: dict[str, TensorLayout] = {}
    values: dict[str, ValueLayout] = {}
    for result in results:
        piece: Layout = result.storage_data
        values.update(piece.values)
        for name, tensor in piece.tensors.items():
            chunks = (*tensors[name].chunks, *tensor.chunks) if name in tensors else tensor.chunks
            tensors[name] = TensorLayout(
                dtype=tensor.dtype, shape=tensor.shape, path=tensor.path, chunks=chunks
            )
    return Layout(tensors=tensors, values=values)


def _batches(items: Iterable[WriteItem], object_bytes: int) -> Iterator[list[WriteItem]]:
    """Tensor items, as many to an object as fit; an item larger than that has its own."""
    batch: list[WriteItem] = []
    size_bytes = 0
    for item in items:
        if item.type is WriteItemType.BYTE_IO:
            continue
        item_bytes = _padded(_item_bytes(item))
        if batch and size_bytes + item_bytes > object_bytes:
            yield batch
            batch, size_bytes = [], 0
        batch.append(item)
        size_bytes += item_bytes
    if batch:
        yield batch


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    assert item.tensor_data.chunk is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy().data)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def _record(key: str, body: bytes | bytearray, crc: int) -> FileRecord:
    return FileRecord(key=key, size_bytes=len(body), crc64nvme=crc_text(crc))


def _result(index: MetadataIndex, size_bytes: int, layout: Layout) -> WriteResult:
    return WriteResult(index=index, size_in_bytes=size_bytes, storage_data=layout)
