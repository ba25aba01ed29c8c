"""What the tests have their ranks do; module-level functions, so that a rank can import them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from storage.checkpoint_records import Commit, CommitRef
from storage.checkpoints.load import load_newest
from storage.checkpoints.metadata import JsonLoadPlanner
from storage.checkpoints.reader import ObjectStoreReader
from storage.checkpoints.save import save_checkpoint
from storage.job import JobContext, JobDescription
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.records import Intent, Stage, Why
from storage.spec import StoreSpec
from tests.ranks import ALONE

RUN = "demo"


def make_intent(
    attempt: int, *, floor: CommitRef | None = None, ceiling: int | None = None
) -> Intent:
    return Intent(
        run=RUN,
        stage=Stage.TRAIN,
        unit="train",
        attempt=attempt,
        token=f"demo-train-{attempt}",
        nonce=f"nonce-{attempt}",
        cluster="local",
        user="me",
        why=Why.FIRST if attempt == 1 else Why.RETRIED,
        after=None if attempt == 1 else attempt - 1,
        nodes=1,
        ranks_per_node=1,
        fingerprint="f",
        floor=floor,
        ceiling=ceiling,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


@dataclass(frozen=True, kw_only=True)
class Job(JobDescription):
    """A job whose processes share one client a bucket: making one takes longer than a save."""

    def open_ledger(self) -> Ledger:
        return Ledger(open_store(self.store), self.keys)


open_store = lru_cache(ObjectStore)


def make_context(spec: StoreSpec, intent: Intent) -> JobContext:
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    job = Job(
        intent=intent,
        store=spec,
        entry="trainer.main",
        folder=Path("/nowhere"),
        code=Path("/nowhere"),
        python=Path("/nowhere"),
    )
    return JobContext(job, replace(ALONE, rank=rank, world_size=world_size, local_rank=rank))


def make_state(*, seed: float) -> dict[str, Any]:
    """A state like a trainer's: FSDP2 shards, uneven ones too, bf16, scalars and JSON values.

    `seed` decides every element, whatever the number of ranks.
    """
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 33), torch.nn.Linear(33, 1, bias=False), torch.nn.Linear(8, 7)
    )
    model[2].to(torch.bfloat16)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        fully_shard(model, mesh=mesh)
    state: dict[str, Any] = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        with torch.no_grad():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            first = _first_element(parameter)
            count = torch.arange(local.numel(), dtype=torch.float32) + first
            local.copy_((count * seed + number).reshape(local.shape))
        state[f"model.{name}"] = parameter
    state["optimizer.step"] = torch.tensor(seed)
    state["flags"] = torch.tensor([True, False, True])
    state["scheduler"] = {"kind": "cosine", "at": [1, 2.5, None], "betas": (0.9, seed)}
    return state


def _first_element(parameter: torch.Tensor) -> int:
    """Index, in the whole tensor, of this rank's first element: shards are runs of rows."""
    if not isinstance(parameter, DTensor):
        return 0
    rows = -(-parameter.shape[0] // dist.get_world_size())
    row_elements = parameter[0].numel() if parameter.ndim > 1 else 1
    return int(min(rows * dist.get_rank(), parameter.shape[0]) * row_elements)


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The state as one process would hold it, in plain Python."""
    plain = {}
    for name, value in state.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        plain[name] = full.tolist() if isinstance(full, torch.Tensor) else full
    return plain


def save(
    spec: StoreSpec,
    intent: Intent,
    step: int,
    seed: float,
    extra: dict[str, Any] | None = None,
) -> Commit:
    """Saves the state that `seed` makes, as the run's trainer would."""
    context = make_context(spec, intent)
    return save_state(context, make_state(seed=seed) | (extra or {}), step=step)


def save_with_object_on_last_rank(spec: StoreSpec, intent: Intent) -> Commit:
    """One rank alone holds what cannot be saved."""
    context = make_context(spec, intent)
    state = make_state(seed=1.0)
    if context.identity.rank == context.identity.world_size - 1:
        state["object"] = object()
    return save_state(context, state, step=10)


def save_with_late_first_rank(spec: StoreSpec, intent: Intent, step: int, late_s: float) -> Commit:
    """The others have to wait for rank 0 longer than the process group would."""
    context = make_context(spec, intent)
    meddle = (lambda: time.sleep(late_s)) if context.identity.rank == 0 else None
    return _save_meddled(context, step, 60, meddle)


def save_and_die_before_done(
    spec: StoreSpec, intent: Intent, step: int, deadline_s: float
) -> Commit:
    """The last rank is killed with its data in the store and its record not."""
    context = make_context(spec, intent)
    is_last = context.identity.rank == context.identity.world_size - 1
    meddle = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if is_last else None
    return _save_meddled(context, step, deadline_s, meddle)


def set_group_timeout(timeout_s: float) -> None:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))


def _save_meddled(
    context: JobContext, step: int, deadline_s: float, meddle: Callable[[], None] | None
) -> Commit:
    """Has `meddle` happen where this rank's done record is due."""
    put = context.store.put

    def meddled(key: str, body: bytes) -> None:
        if meddle is not None and "/done." in key:
            meddle()
        put(key, body)

    with mock.patch.object(context.store, "put", meddled):
        return save_state(context, make_state(seed=1.0), step=step, deadline_s=deadline_s)


def save_state(
    context: JobContext, state: dict[str, Any], *, step: int, deadline_s: float = 60
) -> Commit:
    return save_checkpoint(
        context,
        state,
        step=step,
        mesh={"dp_shard": context.identity.world_size},
        samples_consumed=step * 8,
        samples_hash=f"hash-{step}",
        dataset_id="data",
        model_hash="model",
        metrics={"loss": 1.0 / step},
        deadline_s=deadline_s,
    )


def load(
    spec: StoreSpec, intent: Intent, node: str = ALONE.node
) -> tuple[Commit | None, dict[str, Any]]:
    """Loads into a state of other numbers; the commit, and the whole state."""
    state = make_state(seed=-1.0)
    context = make_context(spec, intent)
    context.identity = replace(context.identity, node=node)
    commit = load_newest(context, state, model_hash="model", dataset_id="data")
    return commit, whole(state)


def expected(seed: float) -> dict[str, Any]:
    """The whole state that `seed` makes on these ranks."""
    return whole(make_state(seed=seed))


def make_large(rows: int = 4096) -> dict[str, Any]:
    """4 MiB in one tensor, sharded by rows where there are several ranks."""
    tensor = torch.arange(rows * 256, dtype=torch.float32).reshape(rows, 256)
    if not dist.is_initialized():
        return {"large": tensor}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"large": distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)])}


def bytes_read_for_large(spec: StoreSpec, commit: Commit) -> tuple[int, int]:
    """Bytes that this rank read for its share of the large tensor, and bytes of that share."""
    state = make_large()
    reader = ObjectStoreReader(open_store(spec), commit)
    load_by_torch(state, storage_reader=reader, planner=JsonLoadPlanner())
    local = state["large"].to_local()
    assert local.flatten()[0] == local.numel() * dist.get_rank()
    return reader.bytes_read, local.nbytes
