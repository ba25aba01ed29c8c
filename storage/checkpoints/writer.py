"""torch's StorageWriter on our object store: raw bytes, in a few objects, checksums for each item.

It sends from this process and waits. A training job does not use it, but stages its snapshots for
the flusher (`storage.checkpoints.staging`); what either of them writes is the same to the byte.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from typing import Any

import torch
from awscrt.checksums import crc64nvme
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import override

from storage.checkpoint_records import FileRecord
from storage.checkpoints.flush import send_files
from storage.checkpoints.layout import (
    METADATA_NAME,
    Layout,
    ValueLayout,
    compact,
    crc_text,
    merge,
)
from storage.checkpoints.placing import (
    OBJECT_BYTES,
    Place,
    buffer_plan,
    tensor_places,
    value_paths,
)
from storage.object_store import ObjectStore


class ObjectStoreWriter(StorageWriter):
    """Copies a rank's part into memory, in one piece, and sends it from there."""

    def __init__(
        self, store: ObjectStore, folder: str, *, rank: int, object_bytes: int = OBJECT_BYTES
    ) -> None:
        """`folder` is the save's key prefix, with its trailing slash."""
        self.files: tuple[FileRecord, ...] = ()
        self._store = store
        self._folder = folder
        self._rank = rank
        self._object_bytes = object_bytes

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.files = ()

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
        """Sends every item of the plan; the layout of all of them is in the one result.

        Raises:
            StoreError: an object is not in the store, or not with its size.
        """
        places = tensor_places(plan)
        described = buffer_plan(places, rank=self._rank, object_bytes=self._object_bytes)
        layout = Layout(tensors=described.tensors, values=_values(plan, planner))
        memory = bytearray(described.size_bytes)
        _fill(memory, places, planner)
        with memoryview(memory) as data:
            self.files, layout = send_files(
                self._store, self._folder, files=described.files, layout=layout, data=data
            )
        done: Future[list[WriteResult]] = Future()
        # torch only carries the results to `finish`, so one of them may tell of all items.
        done.set_result(
            [
                WriteResult(index=item.index, size_in_bytes=len(memory), storage_data=layout)
                for item in plan.items[:1]
            ]
        )
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the metadata object; what torch's own `Metadata` says follows from the results."""
        self.write_metadata(merge(layout_of(part) for part in results))

    def write_metadata(self, layout: Layout) -> FileRecord:
        """Writes the metadata object and says what was written."""
        body = compact(layout)
        key = self._folder + METADATA_NAME
        self._store.put(key, body)
        return FileRecord(key=key, size_bytes=len(body), crc64nvme=crc_text(crc64nvme(body)))


def layout_of(results: Iterable[WriteResult]) -> Layout:
    """The layout of the part that these results describe."""
    return next((result.storage_data for result in results), Layout())


def _fill(memory: bytearray, places: Iterable[Place], planner: SavePlanner) -> None:
    if not memory:
        return
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    for place in places:
        source = planner.resolve_data(place.item)
        assert isinstance(source, torch.Tensor)
        place.view(buffer).copy_(source.detach())


def _values(plan: SavePlan, planner: SavePlanner) -> dict[str, ValueLayout]:
    paths, values = value_paths(plan), {}
    for item in plan.items:
        name = item.index.fqn
        if name in paths:
            data = planner.resolve_data(item)
            assert isinstance(data, io.BytesIO)
            values[name] = ValueLayout(text=data.getvalue().decode(), path=paths[name])
    return values
