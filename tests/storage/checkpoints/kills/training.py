"""A training whose every number is known beforehand, exactly, on any number of ranks.

Its loss depends on each bit of the state: a sum of integers, so the order of adding is all one.
What a rank computes with torch, the reference computes with numpy in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

LAST_STEP = 10
ROWS, COLUMNS = 301, 64
"""Uneven over two ranks; of a rank's two shares one is larger than what is copied at once."""

_A, _B = 6364136223846793005, 1442695040888963407
_MASK = 2**61 - 1
Whole = Mapping[str, NDArray[Any]]


def _places(first: int, count: int) -> NDArray[np.int64]:
    return np.arange(first, first + count, dtype=np.int64)


@cache
def reference(step: int) -> Whole:
    """The whole state after so many steps."""
    if step == 0:
        moments = _places(0, ROWS * COLUMNS) * _B
        return {
            "model.w": (moments >> 40).astype(np.float32),
            "model.b": np.arange(8, dtype=np.float32),
            "optimizer.m": moments,
            "optimizer.count": np.zeros(1, dtype=np.int64),
        }
    before = reference(step - 1)
    moments = before["optimizer.m"] * _A + (_places(0, ROWS * COLUMNS) ^ step)
    return {
        "model.w": before["model.w"] * np.float32(0.5) + (moments >> 40).astype(np.float32),
        "model.b": before["model.b"] * np.float32(0.5) + np.float32(step),
        "optimizer.m": moments,
        "optimizer.count": before["optimizer.count"] + 1,
    }


@cache
def reference_loss(step: int) -> int:
    """What all ranks together find at this step, before it changes the state."""
    state = reference(step - 1)
    odd = 2 * _places(0, ROWS * COLUMNS) + 1
    bits = state["model.w"].view(np.int32).astype(np.int64)
    return (int((bits * odd).sum()) + int((state["optimizer.m"] * odd).sum())) & _MASK


def reference_trace(step: int) -> list[int]:
    """The losses that a state carries along as a JSON value."""
    return [reference_loss(one) for one in range(max(1, step - 3), step + 1)]


def differences(whole: Whole, *, step: int) -> list[str]:
    """The names of the tensors that are not those of this step."""
    expected = reference(step)
    names = {*expected, *whole}
    return sorted(
        name
        for name in names
        if name not in whole
        or name not in expected
        or whole[name].tobytes() != expected[name].tobytes()
    )


class Training:
    """A rank's share. `state` is what is saved and loaded.

    What all ranks hold alike is written by one of them. With `is_all_sharded` there is none of it,
    as disks of the nodes' own want it.
    """

    def __init__(self, *, is_all_sharded: bool = False) -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))

        def part(rows: int) -> slice:
            share = -(-rows // world_size)
            return slice(min(share * rank, rows), min(share * (rank + 1), rows))

        own = part(ROWS)
        rows = own.stop - own.start
        self._of_b, self._of_count = (
            (part(8), part(1)) if is_all_sharded else (slice(0, 8), slice(0, 1))
        )
        self._places = torch.from_numpy(_places(own.start * COLUMNS, rows * COLUMNS))
        self._odd = 2 * self._places + 1
        # Not the numbers of step 0: what a load leaves out would show.
        self._w = torch.full((rows, COLUMNS), -1.0)
        self._m = torch.full((rows, COLUMNS), -1, dtype=torch.int64)
        self._b = torch.full((8,), -1.0)[self._of_b].clone()
        self._count = torch.full((1,), -1, dtype=torch.int64)[self._of_count].clone()

        def sharded(local: torch.Tensor, *shape: int) -> DTensor:
            stride = (shape[-1], 1)[-len(shape) :]
            return DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
            )

        alike = sharded if is_all_sharded else (lambda local, *shape: local)
        self.state: dict[str, Any] = {
            "model": {"w": sharded(self._w, ROWS, COLUMNS), "b": alike(self._b, 8)},
            "optimizer": {"m": sharded(self._m, ROWS, COLUMNS), "count": alike(self._count, 1)},
            "progress": {"step": -1, "trace": []},
        }

    def begin(self) -> None:
        """Without a checkpoint: the numbers of step 0."""
        start = reference(0)
        places = self._places.numpy()
        self._w.flatten().copy_(torch.from_numpy(start["model.w"][places]))
        self._m.flatten().copy_(torch.from_numpy(start["optimizer.m"][places]))
        self._b.copy_(torch.from_numpy(start["model.b"][self._of_b]))
        self._count.copy_(torch.from_numpy(start["optimizer.count"][self._of_count]))
        self.state["progress"] = {"step": 0, "trace": []}

    def faults(self, *, step: int) -> list[str]:
        """What of this rank's share is not as it is after so many steps."""
        places, expected = self._places.numpy(), reference(step)
        pairs = {
            "model.w": (self._w, expected["model.w"][places]),
            "optimizer.m": (self._m, expected["optimizer.m"][places]),
            "model.b": (self._b, expected["model.b"][self._of_b]),
            "optimizer.count": (self._count, expected["optimizer.count"][self._of_count]),
        }
        found = [name for name, (is_, be) in pairs.items() if is_.numpy().tobytes() != be.tobytes()]
        if self.state["progress"] != {"step": step, "trace": reference_trace(step)}:
            found.append(f"progress: {self.state['progress']}")
        return found

    def partial_loss(self) -> int:
        bits = self._w.flatten().view(torch.int32).to(torch.int64)
        odd = self._odd
        return (int((bits * odd).sum()) + int((self._m.flatten() * odd).sum())) & _MASK

    @staticmethod
    def loss(summed: int) -> int:
        return summed & _MASK

    def update(self, step: int, loss: int) -> None:
        """Changes every number of the state, in place."""
        places = self._places.view_as(self._m)
        self._m.mul_(_A).add_(places ^ step)
        self._w.mul_(0.5).add_((self._m >> 40).to(torch.float32))
        self._b.mul_(0.5).add_(float(step))
        self._count.add_(1)
        trace = [*self.state["progress"]["trace"], loss][-4:]
        self.state["progress"] = {"step": step, "trace": trace}


Say = Callable[..., None]
