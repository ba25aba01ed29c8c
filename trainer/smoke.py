"""A rung of the scaling ladder: the real step on the real shards, timed, nothing saved.

Weak scaling: each rank takes one micro-batch a step whatever the number of ranks, so an ideal
cluster takes the same time for every rung.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from storage.job import JobExit
from storage.records import ExitCode
from trainer.engine import Engine
from trainer.parallel.mesh import set_timeout
from trainer.schedule import learning_rate
from trainer.spec import SmokeRun
from trainer.vitals.split import Part, StepClock, Window
from trainer.vitals.watchdog import Watchdog


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank measured: medians of the parts of its steps."""

    rank: int
    node: str
    split: Mapping[str, float]


def run_smoke(engine: Engine, smoke: SmokeRun) -> dict[str, Any]:
    """Runs the rung. Collective; every rank returns the same.

    Raises:
        JobExit: a rank was asked to leave, or the loss is not finite.
    """
    context, identity = engine.context, engine.context.identity
    dist.barrier()
    set_timeout(engine.mesh, timeout_s=engine.train.step_timeout_s)
    with Watchdog(context, spec=engine.train.watchdog, collectives=engine.collectives) as watchdog:
        windows = _timed_steps(engine, smoke, watchdog)[smoke.warmup_steps :]
    everyone: list[Any] = [None] * identity.world_size
    dist.all_gather_object(
        everyone, RankTimes(rank=identity.rank, node=identity.node, split=_medians(windows))
    )
    step_s = [window.step_s for window in windows]
    tokens = engine.train.micro_batch * identity.world_size * engine.train.sequence
    slowest = slowest_of(everyone)
    return {
        "nodes": len(identity.nodes),
        "world_size": identity.world_size,
        "tokens_per_s": tokens / statistics.median(step_s),
        "step_s": step_s,
        "split_s": {
            part: statistics.median(times.split[part] for times in everyone)
            for part in everyone[0].split
        },
        "slowest_rank": None if slowest is None else slowest.rank,
        "slowest_node": None if slowest is None else slowest.node,
    }


def slowest_of(everyone: list[RankTimes]) -> RankTimes | None:
    """The rank with the longest own compute time; None where it was not told apart.

    Step times cannot say: in a synchronous step all ranks take as long as the slowest.
    """
    if any(Part.COMPUTE not in times.split for times in everyone):
        return None
    return max(everyone, key=lambda times: times.split[Part.COMPUTE])


def _timed_steps(engine: Engine, smoke: SmokeRun, watchdog: Watchdog) -> list[Window]:
    clock = StepClock(engine.collectives, separable=engine.device.type == "cpu")
    batch = engine.train.micro_batch * engine.context.identity.world_size
    windows = []
    for step in range(1, smoke.steps + 1):
        rate = learning_rate(step, schedule=engine.train.schedule, steps=engine.train.steps)
        with clock.part(Part.DATA):
            samples = engine.samples(engine.data, (step - 1) * batch, batch)
        with clock.part(Part.COMPUTE):
            result = engine.step.train(samples, batch=batch, rate=rate, step=step)
        windows.append(clock.read(steps=1))
        watchdog.stepped(step)
        engine.context.progress(
            step=step,
            loss=result.loss,
            tokens_per_s=batch * engine.train.sequence / windows[-1].step_s,
        )
        if result.stop:
            raise JobExit(ExitCode.RESUME, f"{engine.step.stop}; {step} of {smoke.steps} steps run")
    return windows


def _medians(windows: list[Window]) -> dict[str, float]:
    return {
        part: statistics.median(window.split.get(part, 0.0) for window in windows)
        for part in windows[0].split
    }
