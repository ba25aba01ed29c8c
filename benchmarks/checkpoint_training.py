"""One rank of the training whose state is saved, and what is measured of its saves.

Run by `benchmarks.checkpoint`, in a process of its own: `-m benchmarks.checkpoint_training PLAN`.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional

from benchmarks.checkpoint_costs import MemorySampler, cpu_seconds, memory_bytes
from benchmarks.checkpoint_ways import WAYS, Headrace, Job, State, Way
from storage.job import RankIdentity
from storage.records import decode, encode
from trainer.model import Decoder
from trainer.parallel.mesh import start_process_group
from trainer.parallel.parallelize import parallelize
from trainer.plan.arithmetic import ModelShape
from trainer.spec import OptimizerSpec
from trainer.state import TrainState
from trainer.weights import initialise

SEQUENCE = 128
VOCAB = 512
BYTES_PER_PARAMETER = 12
WARM_STEPS = 2
PLAIN_STEPS = 4
VERIFIED_ROUNDS = 3
START_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks of one contestant are to do. `phases_url` is where requests are counted."""

    job: Job
    way: str
    size_mib: int
    rounds: int
    results: Path
    phases_url: str | None = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one rank. Seconds, except where the name says otherwise.

    Before each save of `first_blocked` all was made ready anew; the next one is of `blocked`.
    """

    state_bytes: int
    warm_copy: float
    plain_steps: list[float] = field(default_factory=list)
    busy_steps: list[float] = field(default_factory=list)
    first_blocked: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    verified: list[float] = field(default_factory=list)
    unverified: list[float] = field(default_factory=list)
    memory_bytes: int = 0


class Training:
    """A decoder and AdamW, sharded over the ranks; its state is what is saved."""

    def __init__(self, identity: RankIdentity, *, size_mib: int) -> None:
        mesh = start_process_group(identity, device=torch.device("cpu"), timeout_s=START_TIMEOUT_S)
        with torch.device("meta"):
            model = Decoder(
                shape_for(size_mib), sequence=SEQUENCE, rope_theta=10_000.0, norm_eps=1e-5
            )
        parallelize(model, mesh, param_dtype="float32", clock=None)
        model.to_empty(device="cpu")
        initialise(model, seed=1)
        self._state = TrainState(model, OptimizerSpec())
        self._state.set_learning_rate(1e-4)
        self._tokens = torch.randint(VOCAB, (1, SEQUENCE + 1))
        # As the trainer does: what lasts is not looked through for garbage again.
        gc.collect()
        gc.freeze()

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return dict(self._state.tensors())

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        self._state.optimizer.zero_grad(set_to_none=True)
        logits = self._state.model(self._tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        before_update()
        self._state.optimizer.step()


def shape_for(size_mib: int) -> ModelShape:
    """A model whose weights and moments come to about this size."""
    dim = 768 if size_mib >= 512 else 256
    ffn_dim = dim * 8 // 3
    block = 4 * dim * dim + 3 * dim * ffn_dim
    parameters = size_mib * 2**20 / BYTES_PER_PARAMETER - 2 * VOCAB * dim
    layers = max(1, round(parameters / block))
    return ModelShape(
        dim=dim, layers=layers, heads=dim // 64, kv_heads=dim // 64, ffn_dim=ffn_dim, vocab=VOCAB
    )


def main(plan: Plan) -> Measured:
    torch.set_num_threads(1)
    identity = RankIdentity.from_environment()
    training = Training(identity, size_mib=plan.size_mib)
    tensors = locals_of(training.state)
    measured = Measured(
        state_bytes=sum(one.nbytes for one in tensors.values()), warm_copy=_warm_copy(tensors)
    )
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    way = WAYS[plan.way](plan.job, identity)
    for _ in range(WARM_STEPS):
        training.step()
    before_bytes = memory_bytes(pids)
    number = -1
    if plan.phases_url is None:
        for _ in range(plan.rounds):
            way.prepare(training.state)
            for blocked in (measured.first_blocked, measured.blocked):
                number += 1
                durable_s = _save_in_training(training, way, number, measured, blocked)
            measured.durable.append(durable_s)
        for _ in range(plan.rounds):
            number += 1
            _save_at_rest(training, way, number, measured, pids)
        number += 1
        with MemorySampler(pids if identity.rank == 0 else []) as sampler:
            _save_at_rest(training, way, number, measured, pids=[])
        measured = Measured(
            **vars(measured) | {"memory_bytes": max(0, sampler.peak_bytes - before_bytes)}
        )
    else:
        way.prepare(training.state)
        number += 1
        _tell(plan.phases_url, "save", identity)
        _save_at_rest(training, way, number, measured, pids=[])
        _tell(plan.phases_url, "load", identity)
    for _ in range(1 if plan.phases_url is not None else plan.rounds):
        _restore(training, way.restore, number, measured.restore)
    if isinstance(way, Headrace) and plan.phases_url is None:
        for _ in range(VERIFIED_ROUNDS * plan.rounds):
            _restore(training, way.restore, number, measured.verified)
            _restore(training, way.restore_unverified, number, measured.unverified)
    dist.barrier()
    way.close()
    return measured


def locals_of(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What this rank itself holds."""
    return {
        name: (one.to_local() if isinstance(one, DTensor) else one).detach()
        for name, one in state.items()
    }


def _warm_copy(tensors: Mapping[str, torch.Tensor]) -> float:
    """The state copied into memory that was written before, on all ranks at once."""
    copies = [torch.empty_like(one) for one in tensors.values()]
    taken = []
    for _ in range(4):
        dist.barrier()
        begin = time.perf_counter()
        for copy, one in zip(copies, tensors.values(), strict=True):
            copy.copy_(one)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def _save_in_training(
    training: Training, way: Way, number: int, measured: Measured, blocked: list[float]
) -> float:
    """Adds to `blocked` and to the steps; seconds until the save was durable."""
    for _ in range(PLAIN_STEPS):
        begin = time.perf_counter()
        training.step()
        measured.plain_steps.append(time.perf_counter() - begin)
    dist.barrier()
    begun_at = time.time()
    begin = time.perf_counter()
    saving = way.begin(training.state, number)
    blocked_s = time.perf_counter() - begin
    held_s = 0.0

    def before_update() -> None:
        nonlocal held_s
        begin = time.perf_counter()
        saving.staged()
        held_s = time.perf_counter() - begin

    while True:
        begin = time.perf_counter()
        training.step(before_update)
        measured.busy_steps.append(time.perf_counter() - begin - held_s)
        blocked_s += held_s
        if _on_all(saving.durable.done()):
            break
    blocked.append(blocked_s)
    return max(0.0, saving.durable.result() - begun_at)


def _save_at_rest(
    training: Training, way: Way, number: int, measured: Measured, pids: list[int]
) -> None:
    """With nothing beside it, so that all processor time of these processes is the save's."""
    dist.barrier()
    before_s = cpu_seconds(pids)
    saving = way.begin(training.state, number)
    saving.staged()
    saving.durable.result()
    dist.barrier()
    if pids:
        measured.cpu.append(cpu_seconds(pids) - before_s)


def _restore(
    training: Training, restore: Callable[[State, int], None], number: int, taken: list[float]
) -> None:
    tensors = locals_of(training.state)
    sums = {name: _sum(one) for name, one in tensors.items()}
    for one in tensors.values():
        one.zero_()
    dist.barrier()
    begin = time.perf_counter()
    restore(training.state, number)
    dist.barrier()
    taken.append(time.perf_counter() - begin)
    wrong = [name for name, one in tensors.items() if _sum(one) != sums[name]]
    if wrong:
        raise RuntimeError(f"{len(wrong)} tensors did not come back as saved, as {wrong[0]}")


def _sum(tensor: torch.Tensor) -> int:
    return int(tensor.contiguous().view(torch.int32).sum(dtype=torch.int64))


def _on_all(is_true: bool) -> bool:
    flag = torch.tensor(float(is_true))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def _tell(url: str, phase: str, identity: RankIdentity) -> None:
    dist.barrier()
    if identity.rank == 0:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(f"{url}/-/{phase}").close()
    dist.barrier()


if __name__ == "__main__":
    given = decode(Plan, Path(sys.argv[1]).read_bytes())
    found = main(given)
    given.results.mkdir(exist_ok=True)
    (given.results / f"{dist.get_rank()}.json").write_bytes(encode(found))
    sys.stdout.flush()
    # Background processes of peers would be waited for without end.
    os._exit(0)
