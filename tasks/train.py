"""The train stage: one job over all nodes, resumed from the newest commit as often as it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storage.records import Stage, StageRecord
from storage.shards.manifest import load_manifest
from tasks.context import RunContext, Unit
from tasks.runner import carry_out
from tasks.stage import run_stage
from trainer.spec import TrainerJob, TrainSpec


def train(context: RunContext, spec: TrainSpec, *, manifest_key: str) -> StageRecord:
    """The record of a training that came to its last step.

    Raises:
        StageFailed: it did not, and gets no other try.
        DataError: there is no such data set.
    """
    (unit,) = units(context, spec, manifest_key=manifest_key)

    def body(fingerprint: str) -> Mapping[str, Any]:
        return carry_out(context, Stage.TRAIN, [unit], fingerprint=fingerprint)[unit.name].outputs

    return run_stage(
        context,
        Stage.TRAIN,
        inputs=inputs(context, spec, manifest_key=manifest_key),
        body=body,
        units=[unit.name],
    )


def inputs(context: RunContext, spec: TrainSpec, *, manifest_key: str) -> Mapping[str, Any]:
    """What the model depends on; a corpus that was merely moved is the same data set.

    When checkpoints are saved changes nothing in it, so a run that is asked to save at other times
    keeps its attempts, and one that is finished stays so.
    """
    return {
        "train": spec.model_dump(exclude={"checkpoint"}),
        "dataset": load_manifest(context.ledger.store, manifest_key).dataset_id,
        "nodes": context.cluster_spec.nodes,
        "ranks_per_node": context.cluster_spec.ranks_per_node,
    }


def units(context: RunContext, spec: TrainSpec, *, manifest_key: str) -> tuple[Unit, ...]:
    """The one job of this stage."""
    cluster = context.cluster_spec
    payload = TrainerJob(train=spec, manifest_key=manifest_key).model_dump(mode="json")
    return (
        Unit(
            name="train",
            entry="trainer.main",
            sidecar="storage.checkpoints.flusher",
            payload=payload,
            nodes=cluster.least_nodes,
            most_nodes=cluster.range_end,
            ranks_per_node=cluster.ranks_per_node,
            resumes=True,
        ),
    )
