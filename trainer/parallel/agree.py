"""What all ranks have to know of each other, in one small all-reduce a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from trainer.parallel.clock import CollectiveClock


def sum_over_ranks(
    numbers: Sequence[torch.Tensor],
    flags: Sequence[float] = (),
    *,
    device: torch.device,
    clock: CollectiveClock,
) -> list[float]:
    """The sum of each number over all ranks, the same bits on every rank. Collective.

    Float64, so that a sum over thousands of ranks loses nothing. The `flags`, which come after the
    numbers, are on the host and go to the device in one transfer.
    """
    measured = [number.detach().to(device, torch.float64) for number in numbers]
    told = torch.tensor(flags, dtype=torch.float64).to(device)
    vector = torch.cat([torch.stack(measured), told]) if measured else told
    with clock.measured():
        dist.all_reduce(vector)
        sums: list[float] = vector.tolist()
    return sums


def any_rank(flag: bool, *, device: torch.device, clock: CollectiveClock) -> bool:
    """Whether the flag is set on any rank. Collective."""
    (raised,) = sum_over_ranks([], [float(flag)], device=device, clock=clock)
    return raised > 0
