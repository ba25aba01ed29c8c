"""The entry of the network pass: an all-reduce over all ranks, timed.

bus bandwidth = bytes / time · 2(n − 1)/n, the figure of NVIDIA's nccl-tests (PERFORMANCE.md there):
it is the speed of the slowest link whatever the number of ranks.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from slurm.health.registry import AllreduceJob
from storage.errors import HeadraceError, SpecError
from storage.job import JobContext, RankIdentity
from storage.rendezvous import interface_towards, open_listener

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


class AllreduceError(HeadraceError):
    """The ranks did not meet, or what they reduced together is wrong."""


def run(context: JobContext) -> Mapping[str, Any]:
    """Entry of the job, on every rank.

    Raises:
        SpecError: the job has a single rank.
        AllreduceError: the ranks did not meet in time, or a sum is wrong.
    """
    identity = context.identity
    if identity.world_size < 2:
        raise SpecError(
            "an all-reduce needs 2 ranks and this job has 1; give it another node or rank"
        )
    job = AllreduceJob.model_validate(context.job.payload)
    seconds, size_bytes = measure(job, identity)
    context.progress(step=job.rounds)
    return {
        "nodes": len(identity.nodes),
        "world_size": identity.world_size,
        "bytes": size_bytes,
        "seconds": seconds,
        "bus_gb_per_s": bus_gb_per_s(
            size_bytes=size_bytes, seconds=seconds, world_size=identity.world_size
        ),
    }


def bus_gb_per_s(*, size_bytes: int, seconds: float, world_size: int) -> float:
    """The bus bandwidth of an all-reduce of `size_bytes` a rank."""
    return size_bytes / seconds * 2 * (world_size - 1) / world_size / 1e9


def measure(job: AllreduceJob, identity: RankIdentity) -> tuple[float, int]:
    """The median time of a round in seconds, and the bytes that each rank gave."""
    import torch
    import torch.distributed as dist

    _join(identity, timeout_s=job.timeout_s)
    values = int(job.size_mib * 2**20 / 4)
    tensor = torch.empty(values)
    seconds = []
    for _ in range(job.rounds + 1):
        tensor.fill_(identity.rank + 1)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - begin)
        expected = identity.world_size * (identity.world_size + 1) / 2
        if not bool((tensor == expected).all()):
            raise AllreduceError(
                f"an all-reduce gave {tensor.min():g} … {tensor.max():g} where every value should "
                f"be {expected:g}, seen on {identity.node}"
            )
    dist.destroy_process_group()
    # The first round opens connections and touches pages.
    return statistics.median(seconds[1:]), values * 4


def _join(identity: RankIdentity, *, timeout_s: float) -> None:
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(identity.master_addr))
    try:
        dist.init_process_group(
            "gloo",
            store=_meeting_point(identity, timeout=timedelta(seconds=timeout_s)),
            rank=identity.rank,
            world_size=identity.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (OSError, dist.DistError) as error:
        raise AllreduceError(
            f"{identity.node} did not meet the other {identity.world_size - 1} ranks at "
            f"{identity.master_addr}:{identity.master_port} within {timeout_s:g} s: {error}"
        ) from error


def _meeting_point(identity: RankIdentity, *, timeout: timedelta) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        identity.master_addr,
        identity.master_port,
        identity.world_size,
        is_master=identity.rank == 0,
        timeout=timeout,
        master_listen_fd=open_listener(identity),
    )
