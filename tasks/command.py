"""The train stage of a run whose training script is somebody's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storage.records import Stage, StageRecord
from tasks.context import RunContext, Unit
from tasks.runner import carry_out
from tasks.stage import run_stage
from trainer.spec import CommandJob, CommandSpec


def run_command(context: RunContext, command: CommandSpec) -> StageRecord:
    """The record of a command that came to its end.

    Raises:
        StageFailed: it did not, and gets no other try.
    """
    (unit,) = units(context, command)

    def body(fingerprint: str) -> Mapping[str, Any]:
        return carry_out(context, Stage.TRAIN, [unit], fingerprint=fingerprint)[unit.name].outputs

    return run_stage(
        context, Stage.TRAIN, inputs=inputs(context, command), body=body, units=[unit.name]
    )


def inputs(context: RunContext, command: CommandSpec) -> Mapping[str, Any]:
    """What is asked for; what the script itself says is not looked at."""
    spec = context.cluster_spec
    return {"command": command, "nodes": spec.nodes, "ranks_per_node": spec.ranks_per_node}


def units(context: RunContext, command: CommandSpec) -> tuple[Unit, ...]:
    """The one job of this stage: a process a rank, or one a node with the CPUs of all its ranks."""
    spec = context.cluster_spec
    checkpoints = command.checkpoints or context.workdir / context.run / "checkpoints"
    job = CommandJob(command=command, checkpoints=checkpoints, ranks_per_node=spec.ranks_per_node)
    per_node = 1 if command.per == "node" else spec.ranks_per_node
    return (
        Unit(
            name="train",
            entry="trainer.command",
            payload=job.model_dump(mode="json"),
            nodes=spec.least_nodes,
            most_nodes=spec.range_end,
            ranks_per_node=per_node,
            cpus_per_rank=spec.cpus_per_rank * spec.ranks_per_node // per_node,
            folders=(command.cwd, checkpoints),
            resumes=True,
        ),
    )
