"""Initial weights that depend on the seed alone, not on how the model is spread over ranks.

Each row of each parameter has a random stream of its own. So a rank draws its own rows only, and
the same run started on 1 or on 1,000 ranks begins with the same model.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Shard

from trainer.model import Decoder

STD = 0.02
"""Of every matrix (GPT-2); those that write to the residual stream have it over √(2 · layers)."""

_RESIDUAL = ("attention.output.weight", "feed_forward.down.weight")


@torch.no_grad()
def initialise(model: Decoder, *, seed: int) -> None:
    """Fills parameters and buffers of a model that was just materialised from the meta device."""
    model.reset_rope()
    residual_std = STD / (2 * model.shape.layers) ** 0.5
    for name, parameter in model.named_parameters():
        rows, first_row = _own_rows(parameter)
        if parameter.ndim == 1:
            rows.fill_(1.0)
        else:
            std = residual_std if name.endswith(_RESIDUAL) else STD
            _draw_rows(rows, first_row=first_row, std=std, stream=f"{seed}/{name}")


def _own_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The rows of a parameter that this rank holds, and the number of the first."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    assert parameter.placements == (Shard(0),), "FSDP2 shards the first dimension"
    ranks = parameter.device_mesh.size()
    first_row = parameter.device_mesh.get_local_rank() * -(-parameter.shape[0] // ranks)
    return parameter.to_local(), first_row


def _draw_rows(rows: torch.Tensor, *, first_row: int, std: float, stream: str) -> None:
    """Philox is counter-based, so that a row's stream is found without drawing those before."""
    key = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=16).digest(), "little")
    drawn = np.empty(rows.shape, dtype=np.float32)
    for offset, row in enumerate(drawn):
        source = np.random.Philox(key=key, counter=[0, 0, first_row + offset, 0])
        np.random.Generator(source).standard_normal(dtype=np.float32, out=row)
    rows.copy_(torch.from_numpy(drawn).mul_(std))
