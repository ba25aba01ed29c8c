"""One thin flow for each stage, for deployments of their own, such as pruning by the hour."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows.showing import show_stages
from flows.spec import PipelineSpec
from storage.records import Stage


@flow(flow_run_name="{spec.run}")
def validate(spec: PipelineSpec, force: bool = False) -> State[Any]:
    """Find out which nodes are fit."""
    return show_stages(spec, [Stage.VALIDATE], forced=[Stage.VALIDATE] if force else [])


@flow(flow_run_name="{spec.run}")
def shard(spec: PipelineSpec, force: bool = False) -> State[Any]:
    """Turn documents into token shards."""
    return show_stages(spec, [Stage.SHARD], forced=[Stage.SHARD] if force else [])


@flow(flow_run_name="{spec.run}")
def smoke(spec: PipelineSpec, force: bool = False) -> State[Any]:
    """Find out how the trainer scales; shards first, where that is not done."""
    return show_stages(spec, [Stage.SHARD, Stage.SMOKE], forced=[Stage.SMOKE] if force else [])


@flow(flow_run_name="{spec.run}")
def train(spec: PipelineSpec, force: bool = False) -> State[Any]:
    """Train, whether or not it was found to scale; shards first, where that is not done."""
    return show_stages(spec, [Stage.SHARD, Stage.TRAIN], forced=[Stage.TRAIN] if force else [])


@flow(flow_run_name="{spec.run}")
def prune(spec: PipelineSpec, force: bool = False) -> State[Any]:
    """Delete the checkpoints that no rule keeps."""
    return show_stages(spec, [Stage.PRUNE], forced=[Stage.PRUNE] if force else [])
