"""States of DTensors as the kinds of parallelism lay them out; what the tests' ranks do with them.

Every element of a tensor follows from its place in the whole tensor, so that each rank can tell by
itself what its share has to be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from storage.checkpoint_records import Commit
from storage.checkpoints.metadata import JsonLoadPlanner
from storage.checkpoints.reader import ObjectStoreReader
from storage.records import Intent
from storage.spec import StoreSpec
from tests.storage.checkpoints import work

SMALL = {
    "layers.0.up": ((48, 24), torch.float32),
    "layers.0.down": ((24, 48), torch.float32),
    "layers.0.odd": ((37, 19), torch.float32),
    "layers.0.norm": ((37,), torch.float32),
    "layers.1.wide": ((300, 1000), torch.float32),
    "layers.1.half": ((29, 50), torch.bfloat16),
    "layers.1.few": ((3,), torch.float32),
    "layers.2.flags": ((41,), torch.bool),
    "layers.2.ids": ((7, 5), torch.int64),
    "layers.2.cube": ((6, 5, 7), torch.float64),
    "layers.3.none": ((0, 8), torch.float32),
    "layers.3.scalar": ((), torch.float32),
    "layers.3.last": ((2, 3), torch.float32),
}
"""Uneven shards, shards without an element, tensors with none at all, and 0-d ones."""

LARGE = {
    "layers.0.up": ((1537, 1031), torch.float32),
    "layers.0.norm": ((1031,), torch.float32),
    "layers.1.down": ((1031, 1537), torch.float32),
    "layers.1.norm": ((1031,), torch.float32),
    "layers.2.table": ((4099, 517), torch.bfloat16),
    "layers.3.head": ((1201, 1300), torch.float32),
}
"""Some MiB each, as a real model's are, with rows of odd sizes."""

Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def within(size: int, port: int, work_of_rank: Callable[..., Any], *arguments: Any) -> Any:
    """Calls it on the first `size` ranks of the pool, which are then all that the group has."""
    rank = int(dist.get_rank()) if dist.is_initialized() else None
    place = _places.setdefault("rank", rank)
    if not dist.is_initialized() or dist.get_world_size() != size:
        if dist.is_initialized():
            dist.destroy_process_group()
        if place < size:
            address = f"tcp://127.0.0.1:{port}"
            dist.init_process_group("gloo", init_method=address, rank=place, world_size=size)
    return work_of_rank(*arguments) if place < size else None


_places: dict[str, Any] = {}
"""This process's number in the pool, which it keeps when it is not in a group."""


def make(layout: str, sizes: Sizes, seed: float) -> dict[str, Any]:
    """A state of these tensors, laid out as `layout` does it on all ranks of the group."""
    if layout == "pp":
        return _pipeline(sizes, seed)
    mesh, placements = _LAYOUTS[layout]()
    return {
        name: _shared_out(_whole(name, shape, dtype, seed), mesh, placements(name, shape))
        for name, (shape, dtype) in sizes.items()
    } | {"step": seed}


def save(spec: StoreSpec, intent: Intent, layout: str, sizes: Sizes, step: int) -> Commit:
    """Commits the state of seed `step`."""
    state = make(layout, sizes, float(step))
    return work.save_state(work.make_context(spec, intent), state, step=step)


def load(spec: StoreSpec, commit: Commit, layout: str, sizes: Sizes) -> tuple[list[str], int, int]:
    """What differs from what was saved; the bytes that were read and those that are needed."""
    state, reader = make(layout, sizes, -1.0), ObjectStoreReader(work.open_store(spec), commit)
    load_by_torch(state, storage_reader=reader, planner=JsonLoadPlanner())
    return (
        _differing(state, make(layout, sizes, float(commit.step))),
        reader.bytes_read,
        sum(_local(value).nbytes for value in state.values() if isinstance(value, torch.Tensor)),
    )


def save_model(spec: StoreSpec, intent: Intent, step: int) -> Commit:
    """Commits the state of a model that torch's own tensor parallelism and FSDP2 laid out."""
    state = _model(float(step))
    return work.save_state(work.make_context(spec, intent), state, step=step)


def load_model(spec: StoreSpec, commit: Commit) -> list[str]:
    """What differs from what was saved."""
    state, reader = _model(-1.0), ObjectStoreReader(work.open_store(spec), commit)
    load_by_torch(state, storage_reader=reader, planner=JsonLoadPlanner())
    return _differing(state, _model(float(commit.step)))


def _model(seed: float) -> dict[str, Any]:
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 48, bias=False), torch.nn.ReLU(), torch.nn.Linear(48, 24, bias=False)
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    up, down = model.parameters()
    tp, dp = mesh.get_local_rank("tp"), mesh.get_local_rank("dp")
    for name, parameter, dim in (("layers.0.up", up, 0), ("layers.0.down", down, 1)):
        assert isinstance(parameter, DTensor)
        whole = _whole(name, tuple(parameter.shape), torch.float32, seed)
        # Tensor parallelism first, and FSDP shares out the rows of what that left.
        with torch.no_grad():
            parameter.to_local().copy_(whole.chunk(2, dim=dim)[tp].chunk(2)[dp])
    return {"layers.0.up": up, "layers.0.down": down, "step": seed}


def _pipeline(sizes: Sizes, seed: float) -> dict[str, Any]:
    """Each rank has the layers of its stage only, shared out among the ranks of that stage."""
    if dist.get_world_size() == 1:
        return make("fsdp", sizes, seed)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    return {
        name: _shared_out(_whole(name, shape, dtype, seed), mesh["dp"], _first(name, shape))
        for name, (shape, dtype) in sizes.items()
        if int(name.split(".")[1]) // 2 == stage
    } | {"step": seed}


def _whole(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: float) -> torch.Tensor:
    count = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    values = (count * 7 + len(name) + seed * 3) % 251
    return (values % 2).bool() if dtype is torch.bool else values.to(dtype)


def _shared_out(
    whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> torch.Tensor:
    # Each rank cuts its own share out: nothing has to be sent.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def _differing(state: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert state.keys() == expected.keys()
    return [
        name
        for name, value in expected.items()
        if not (
            torch.equal(_local(state[name]), _local(value))
            if isinstance(value, torch.Tensor)
            else state[name] == value
        )
    ]


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _first(name: str, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    return (Shard(0) if shape else Replicate(),)


def _line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))


def _columns(name: str, shape: tuple[int, ...]) -> Placement:
    """As tensor parallelism does it: the columns of some matrices, the rows of others."""
    if not shape:
        return Replicate()
    return Shard(len(shape) - 1) if len(name) % 2 else Shard(0)


_LAYOUTS: dict[str, Callable[[], tuple[DeviceMesh, Callable[..., tuple[Placement, ...]]]]] = {
    "fsdp": lambda: (_line(), _first),
    "hsdp": lambda: (_square(), lambda name, shape: (Replicate(), *_first(name, shape))),
    "tp": lambda: (_line(), lambda name, shape: (_columns(name, shape),)),
    "fsdp and tp": lambda: (
        _square(),
        lambda name, shape: (
            *_first(name, shape),
            Shard(len(shape) - 1) if len(shape) > 1 else Replicate(),
        ),
    ),
    "columns": lambda: (
        _line(),
        lambda name, shape: (Shard(len(shape) - 1) if shape else Replicate(),),
    ),
}
