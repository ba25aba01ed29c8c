"""Which rank writes which item of the state, and where in its buffer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from storage.checkpoints.buffers import BufferPlan, StagedFile
from storage.checkpoints.layout import Chunk, StatePath, TensorLayout
from storage.checkpoints.metadata import JsonSavePlanner, dtype_name
from storage.checkpoints.ranks import Ranks

OBJECT_BYTES = 2**30
ALIGNMENT = 64
"""Items begin at multiples of this, so that their elements are aligned in memory, too."""


@dataclass(frozen=True)
class Place:
    """The bytes `start … start + size_bytes` of the buffer, for this item."""

    item: WriteItem
    path: StatePath
    start: int
    size_bytes: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The item's box in `buffer` (uint8), in its own type and shape."""
        data = self.item.tensor_data
        assert data is not None
        assert data.chunk is not None
        flat = buffer[self.start : self.start + self.size_bytes]
        return flat.view(data.properties.dtype).view(data.chunk.sizes)


def plan_save(state: dict[str, Any], ranks: Ranks) -> tuple[JsonSavePlanner, SavePlan]:
    """Who writes what: rank 0 takes out what several ranks hold alike. Collective.

    Raises:
        CheckpointError: something in `state` cannot be saved.
    """
    planner = JsonSavePlanner()

    def local() -> SavePlan:
        planner.set_up_planner(state, is_coordinator=ranks.is_first)
        return planner.create_local_plan()

    share = ranks.through_first(local, lambda plans: planner.create_global_plan(plans)[0])
    return planner, planner.finish_plan(share)


def tensor_places(plan: SavePlan) -> tuple[Place, ...]:
    """The tensors of a plan, one after the other."""
    paths: Mapping[str, Any] = plan.planner_data or {}
    places, start = [], 0
    for item in plan.items:
        if item.type is WriteItemType.BYTE_IO:
            continue
        path = tuple(paths.get(item.index.fqn, (item.index.fqn,)))
        size_bytes = _item_bytes(item)
        places.append(Place(item=item, path=path, start=start, size_bytes=size_bytes))
        start += _padded(size_bytes)
    return tuple(places)


def value_paths(plan: SavePlan) -> dict[str, StatePath]:
    """The values of a plan that are no tensors: their names and where in the state they are."""
    paths: Mapping[str, Any] = plan.planner_data or {}
    return {
        item.index.fqn: tuple(paths.get(item.index.fqn, (item.index.fqn,)))
        for item in plan.items
        if item.type is WriteItemType.BYTE_IO
    }


def buffer_plan(
    places: Iterable[Place], *, rank: int, object_bytes: int = OBJECT_BYTES
) -> BufferPlan:
    """What the flusher has to know of the places: objects of about `object_bytes`, and chunks."""
    files: list[StagedFile] = []
    tensors: dict[str, TensorLayout] = {}
    size_bytes = 0
    for number, batch in enumerate(_batches(places, object_bytes)):
        name = f"data.{rank}.{number}.bin"
        start = batch[0].start
        size_bytes = batch[-1].start + _padded(batch[-1].size_bytes)
        files.append(StagedFile(name=name, start=start, size_bytes=size_bytes - start))
        for place in batch:
            _add(tensors, place, _chunk(place, file=name, file_start=start))
    return BufferPlan(rank=rank, size_bytes=size_bytes, files=tuple(files), tensors=tensors)


def _add(tensors: dict[str, TensorLayout], place: Place, chunk: Chunk) -> None:
    name, data = place.item.index.fqn, place.item.tensor_data
    assert data is not None
    known = tensors.get(name)
    tensors[name] = TensorLayout(
        dtype=dtype_name(name, data.properties.dtype),
        shape=tuple(data.size),
        path=place.path,
        chunks=(*(known.chunks if known is not None else ()), chunk),
    )


def _chunk(place: Place, *, file: str, file_start: int) -> Chunk:
    data = place.item.tensor_data
    assert data is not None
    assert data.chunk is not None
    return Chunk(
        offsets=tuple(data.chunk.offsets),
        lengths=tuple(data.chunk.sizes),
        file=file,
        start=place.start - file_start,
        size_bytes=place.size_bytes,
        crc64nvme="",
    )


def _batches(places: Iterable[Place], object_bytes: int) -> Iterator[list[Place]]:
    """As many to an object as fit; an item larger than that has its own."""
    batch: list[Place] = []
    for place in places:
        end = place.start + _padded(place.size_bytes)
        if batch and end - batch[0].start > object_bytes:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    assert item.tensor_data.chunk is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
