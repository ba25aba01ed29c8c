"""Gradient clipping by our own norm: float32, over local shards, with one reduction by the caller.

torch's `clip_grad_norm_` fails on plain and sharded parameters mixed. Here each rank sums the
squares of what it holds, the sum travels with the step's other numbers (`trainer.parallel.agree`),
and every rank scales its shards by the same factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate


def local_gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The gradient shards of this rank; they share memory with the gradients."""
    return [
        grad.to_local() if isinstance(grad, DTensor) else grad
        for parameter in parameters
        if (grad := parameter.grad) is not None
    ]


@torch.no_grad()
def sum_of_squares(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """This rank's share of the squared gradient norm, float64; the sum over all ranks is the whole.

    A gradient that several ranks hold in full is shared out between them.
    """
    gradients = local_gradients(parameters)
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    copies = torch.tensor(
        [_copies(parameter) for parameter in parameters if parameter.grad is not None],
        dtype=torch.float64,
    )
    return (torch.stack(list(norms)).double().square() / copies.to(norms[0].device)).sum()


@torch.no_grad()
def scale_to_norm(
    parameters: Iterable[torch.nn.Parameter], *, norm: float, max_norm: float
) -> None:
    """Scales all gradients so that their norm, now `norm`, is at most `max_norm`."""
    if norm > max_norm:
        torch._foreach_mul_(local_gradients(parameters), max_norm / norm)


def _copies(parameter: torch.nn.Parameter) -> int:
    """How many ranks hold the same elements of this parameter's gradient."""
    if not isinstance(parameter, DTensor):
        return dist.get_world_size()
    copies = 1
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate):
            copies *= parameter.device_mesh.size(axis)
    return copies
