"""The process group: which device, which interface, which port, and the mesh over all ranks."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from storage.job import RankIdentity
from storage.rendezvous import RendezvousError, interface_towards, open_listener

SHARD_AXIS = "dp_shard"


def pick_device(identity: RankIdentity) -> torch.device:
    """The accelerator that belongs to this rank of its node, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", identity.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def start_process_group(
    identity: RankIdentity, *, device: torch.device, timeout_s: float
) -> DeviceMesh:
    """Meets the other ranks and lays the mesh over them: one axis, on which the model is sharded.

    Raises:
        RendezvousError: the port is taken, or not all ranks came within `timeout_s`.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(identity.master_addr))
    timeout = timedelta(seconds=timeout_s)
    place = f"{identity.master_addr}:{identity.master_port}"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=_meeting_point(identity, timeout),
            rank=identity.rank,
            world_size=identity.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (OSError, RuntimeError) as error:
        raise RendezvousError(
            f"rank {identity.rank} of {identity.world_size} on {identity.node} could not meet the "
            f"others at {place} within train.start_timeout_s {timeout_s:g}: {error}; look at the "
            "logs of the ranks that are missing, and whether nodes reach each other there"
        ) from error
    return init_device_mesh(device.type, (identity.world_size,), mesh_dim_names=(SHARD_AXIS,))


def set_timeout(mesh: DeviceMesh, *, timeout_s: float) -> None:
    """Bounds every collective from now on: a peer that is gone without a word ends the wait."""
    for group in {dist.group.WORLD, mesh.get_group()}:
        _set_pg_timeout(timedelta(seconds=timeout_s), group)


def _meeting_point(identity: RankIdentity, timeout: timedelta) -> Store:
    return TCPStore(
        identity.master_addr,
        identity.master_port,
        identity.world_size,
        is_master=identity.rank == 0,
        timeout=timeout,
        master_listen_fd=open_listener(identity),
    )
