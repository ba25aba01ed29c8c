"""FSDP2 over the mesh: a unit per block, one for the rest, gradients summed in float32."""

from __future__ import annotations

from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.model import Decoder
from trainer.parallel.clock import CollectiveClock, TimedAllGather, TimedReduceScatter


def parallelize(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    param_dtype: Literal["float32", "bfloat16"],
    clock: CollectiveClock | None,
) -> None:
    """Shards a model, on the meta device or not, in place.

    Weights and gradients are kept in float32; with bfloat16, blocks compute in it and gradients are
    still reduced in float32. `clock`, for CPU meshes, is told of every collective.
    """
    policy = MixedPrecisionPolicy()
    if param_dtype == "bfloat16":
        # Inputs are not cast: token ids cannot be, and the rotary angles must stay float32.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # The loss is divided by the whole step's tokens already, so gradients are summed, not
            # averaged. Without the second line a factor becomes PREMUL_SUM, which gloo lacks.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            if clock is not None:
                unit.set_custom_all_gather(TimedAllGather(clock))
                unit.set_custom_reduce_scatter(TimedReduceScatter(clock))
