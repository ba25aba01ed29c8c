"""What a unit asks of the cluster, the same for a job that is sent and for one that is shown."""

from __future__ import annotations

import sys
from pathlib import Path

from slurm.cluster import Resources
from storage.job import JobDescription
from storage.records import Intent
from tasks.context import RunContext, Unit


def describe(context: RunContext, intent: Intent, unit: Unit) -> JobDescription:
    """All that the job of this attempt is told."""
    return JobDescription(
        intent=intent,
        store=context.store,
        entry=unit.entry,
        sidecar=unit.sidecar,
        payload=unit.payload,
        folder=context.attempt_folder(intent.stage, intent.attempt),
        folders=unit.folders,
        code=context.snapshot.path,
        python=context.cluster_spec.interpreter or Path(sys.executable),
        cpus_per_rank=unit.cpus_per_rank or context.cluster_spec.cpus_per_rank,
        heartbeat_s=context.retry.heartbeat_s,
        peer_silence_s=context.retry.peer_silence_s,
    )


def resources(
    context: RunContext,
    unit: Unit,
    *,
    elements: int,
    excluded: tuple[str, ...],
    most_nodes: int | None,
) -> Resources:
    """All that the job asks for; of elements and nodes perhaps not so many as the unit takes."""
    spec = context.cluster_spec
    return Resources(
        nodes=unit.nodes,
        most_nodes=most_nodes,
        ranks_per_node=unit.ranks_per_node,
        elements=elements,
        cpus_per_rank=unit.cpus_per_rank or spec.cpus_per_rank,
        gpus_per_node=spec.gpus_per_node,
        memory_per_node=spec.memory_per_node,
        node_list=unit.node_list,
        excluded=excluded,
        time_limit_min=unit.time_limit_min or spec.time_limit_min,
        signal_lead_s=spec.signal_lead_s,
    )
