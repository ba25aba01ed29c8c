"""The smoke stage: the real trainer on the real shards at growing node counts, and its gate."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from storage.records import Stage, StageRecord
from storage.shards.manifest import load_manifest
from tasks.context import RunContext, Unit
from tasks.failures import AttemptFailed
from tasks.gates import Gate, run_gate
from tasks.runner import carry_out
from tasks.scaling import Rung, ScalingVerdict, judge, to_text
from tasks.spec import SmokeSpec
from tasks.survey import nodes_there
from trainer.spec import SmokeRun, TrainerJob, TrainSpec

MEASURED = frozenset({"model", "sequence", "micro_batch", "param_dtype", "threads"})
"""What of `train` sets the work of a rung's step. The rest sets how many steps the training takes,
what it does between them, how long it waits, or the values that the same work is done on."""


def smoke(
    context: RunContext, spec: SmokeSpec, *, train: TrainSpec, manifest_key: str
) -> StageRecord:
    """The record of a ladder that scales, or is reported only where the cluster cannot gate.

    Where the spec leaves the number of nodes open, the ladder ends at those that are there.

    Raises:
        StageFailed: a rung has no result, or the gate refuses; then no higher rung was queued.
        DataError: there is no such data set.
        SlurmError: the cluster does not tell which nodes it has.
    """
    top = nodes_there(context)
    rungs = units(context, spec, train=train, manifest_key=manifest_key, top=top)
    return run_gate(
        context,
        Stage.SMOKE,
        inputs=inputs(context, spec, train=train, manifest_key=manifest_key),
        body=lambda fingerprint: _climb(context, spec, rungs, fingerprint=fingerprint),
        units=[unit.name for unit in rungs],
    )


def inputs(
    context: RunContext, spec: SmokeSpec, *, train: TrainSpec, manifest_key: str
) -> Mapping[str, Any]:
    """What the figures depend on. Not on which nodes are fit today: they are alike, or unfit."""
    cluster = context.cluster_spec
    return {
        "smoke": spec,
        "train": train.model_dump(include=set(MEASURED)),
        "dataset": load_manifest(context.ledger.store, manifest_key).dataset_id,
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "cpus_per_rank": cluster.cpus_per_rank,
    }


def units(
    context: RunContext, spec: SmokeSpec, *, train: TrainSpec, manifest_key: str, top: int
) -> tuple[Unit, ...]:
    """The rungs, smallest first, none above `top` nodes."""
    job = TrainerJob(
        train=train,
        manifest_key=manifest_key,
        smoke=SmokeRun(steps=spec.steps, warmup_steps=spec.warmup_steps),
    )
    cluster = context.cluster_spec
    rung = Unit(
        name="",
        entry="trainer.main",
        payload=job.model_dump(mode="json"),
        ranks_per_node=cluster.ranks_per_node,
    )
    counts = dict.fromkeys(min(nodes, top) for nodes in spec.ladder(cluster.most_nodes))
    return tuple(_of_size(rung, nodes) for nodes in counts)


def _of_size(rung: Unit, nodes: int) -> Unit:
    return replace(rung, name=f"rung-{nodes}", nodes=nodes)


def _climb(
    context: RunContext, spec: SmokeSpec, rungs: tuple[Unit, ...], *, fingerprint: str
) -> Gate:
    measured: list[Rung] = []
    ahead = deque(rungs)
    while ahead:
        unit, top = ahead[0], ahead[-1].nodes
        try:
            result = carry_out(context, Stage.SMOKE, [unit], fingerprint=fingerprint)[unit.name]
        except AttemptFailed:
            # Nodes were lost on the way up: the ladder ends at those that are left.
            left = nodes_there(context)
            if not (measured[-1].nodes if measured else 0) < left < unit.nodes:
                raise
            ahead = deque([_of_size(unit, left)])
            continue
        ahead.popleft()
        measured.append(Rung.from_outputs(result.outputs))
        verdict = judge(measured, top_nodes=top, spec=spec, gates=context.cluster.gates)
        if verdict.refused:
            break
    context.eyes.say(to_text(verdict))
    return _gate(verdict)


def _gate(verdict: ScalingVerdict) -> Gate:
    return Gate(
        passed=not verdict.refused,
        reason=verdict.reason,
        outputs={
            "rungs": [row.to_json() for row in verdict.rows],
            "gated": verdict.gates,
        },
    )
