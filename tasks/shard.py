"""The shard stage: the spec's documents as token shards, by a job that goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storage.records import Stage, StageRecord
from storage.shards.build import ShardJob, most_elements, plan_shards
from storage.spec import DataSpec
from tasks.context import RunContext, Unit
from tasks.runner import carry_out
from tasks.stage import run_stage


def shard(context: RunContext, data: DataSpec) -> StageRecord:
    """The record of the data set: its id and the key of its manifest.

    Raises:
        SpecError: an entry of `data.inputs` matches no file, or the tokenizer does not fit.
        StageFailed: the job has no result, as when too many documents cannot be read.
    """
    job = plan_shards(data)

    def body(fingerprint: str) -> Mapping[str, Any]:
        generation = int(fingerprint.rpartition(".")[2])
        (unit,) = units(job.for_generation(generation), jobs=data.jobs)
        return carry_out(context, Stage.SHARD, [unit], fingerprint=fingerprint)[unit.name].outputs

    return run_stage(
        context,
        Stage.SHARD,
        inputs=inputs(job),
        body=body,
        units=[unit.name for unit in units(job, jobs=data.jobs)],
    )


def inputs(job: ShardJob) -> Mapping[str, Any]:
    """What the data set depends on; the build's id stands for the files as they are now."""
    return {"data": job.data.model_dump(mode="json", exclude={"jobs"}), "build": job.build}


def units(job: ShardJob, *, jobs: int) -> tuple[Unit, ...]:
    """The one job of this stage, an array where there is enough to share out."""
    payload = job.model_dump(mode="json")
    return (
        Unit(
            name="shard",
            entry="storage.shards.build",
            payload=payload,
            elements=most_elements(job, jobs=jobs),
        ),
    )
