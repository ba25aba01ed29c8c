"""The pipeline as a Prefect flow: the five stages, one after the other."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

from flows.showing import show_stages
from flows.spec import PipelineSpec
from storage.records import Stage


@flow(flow_run_name="{spec.run}")
def pretrain(spec: PipelineSpec, force: tuple[Stage, ...] = (), dated: bool = False) -> State[Any]:
    """Validate nodes, shard data, prove that it scales, train, prune.

    Args:
        spec: What to train, where, with which gates.
        force: Stages to run again although they are finished.
        dated: Put the scheduled day into the run's name, so that each night is a run of its own.
    """
    if dated:
        spec = dated_spec(spec, flow_run.scheduled_start_time)
    return show_stages(spec, tuple(Stage), forced=force)


def dated_spec(spec: PipelineSpec, day: datetime) -> PipelineSpec:
    """The same spec for the run of one day; run again for that day, it names the same run."""
    return spec.renamed(f"{spec.run}-{day:%Y%m%d}")
