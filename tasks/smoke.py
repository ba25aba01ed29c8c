"""The smoke stage: the real trainer on the real shards at growing node counts, and its gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storage.records import Stage, StageRecord
from storage.shards.manifest import load_manifest
from tasks.context import RunContext, Unit
from tasks.gates import Gate, run_gate
from tasks.runner import carry_out
from tasks.scaling import Rung, ScalingVerdict, judge, to_text
from tasks.spec import SmokeSpec
from trainer.spec import SmokeRun, TrainerJob, TrainSpec

MEASURED = frozenset({"model", "sequence", "micro_batch", "param_dtype", "threads"})
"""What of `train` sets the work of a rung's step. The rest sets how many steps the training takes,
what it does between them, how long it waits, or the values that the same work is done on."""


def smoke(
    context: RunContext, spec: SmokeSpec, *, train: TrainSpec, manifest_key: str
) -> StageRecord:
    """The record of a ladder that scales, or is reported only where the cluster cannot gate.

    Raises:
        StageFailed: a rung has no result, or the gate refuses; then no higher rung was queued.
        DataError: there is no such data set.
    """
    rungs = units(context, spec, train=train, manifest_key=manifest_key)
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
    context: RunContext, spec: SmokeSpec, *, train: TrainSpec, manifest_key: str
) -> tuple[Unit, ...]:
    """The rungs, smallest first."""
    job = TrainerJob(
        train=train,
        manifest_key=manifest_key,
        smoke=SmokeRun(steps=spec.steps, warmup_steps=spec.warmup_steps),
    )
    return tuple(
        Unit(
            name=f"rung-{nodes}",
            entry="trainer.main",
            payload=job.model_dump(mode="json"),
            nodes=nodes,
            ranks_per_node=context.cluster_spec.ranks_per_node,
        )
        for nodes in spec.ladder(context.cluster_spec.nodes)
    )


def _climb(
    context: RunContext, spec: SmokeSpec, rungs: tuple[Unit, ...], *, fingerprint: str
) -> Gate:
    measured: list[Rung] = []
    for unit in rungs:
        result = carry_out(context, Stage.SMOKE, [unit], fingerprint=fingerprint)[unit.name]
        measured.append(Rung.from_outputs(result.outputs))
        verdict = judge(measured, top_nodes=rungs[-1].nodes, spec=spec, gates=context.cluster.gates)
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
