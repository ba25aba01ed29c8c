"""The entry of a `trainer.main` job: what each rank of a training or smoke job runs."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError

from storage.errors import SpecError
from storage.job import JobContext, JobExit
from storage.records import ExitCode
from storage.shards.manifest import load_manifest
from trainer.engine import build_engine
from trainer.loop import run_training
from trainer.signals import StopFlag, stop_on_signals
from trainer.smoke import run_smoke
from trainer.spec import TrainerJob


def run(context: JobContext) -> Mapping[str, Any]:
    """Trains, or runs a rung of the smoke test, and returns the job's outputs on every rank.

    Raises:
        SpecError: the spec does not fit the ranks or the data set.
        JobExit: the job leaves early, for the reason that its code names.

    Any other exception leaves the process group as it is, for it cannot be closed while a peer is
    gone: the caller has to end the process.
    """
    with stop_on_signals() as stop:
        try:
            outputs = _run(context, _payload(context), stop)
        except torch.OutOfMemoryError as error:
            raise JobExit(
                ExitCode.OUT_OF_MEMORY,
                f"{error}; lower train.micro_batch, or spread the model over more ranks",
            ) from error
        # Rank 0 may report only when all ranks are through.
        dist.barrier()
        dist.destroy_process_group()
        return outputs


def _payload(context: JobContext) -> TrainerJob:
    try:
        job = TrainerJob.model_validate(context.job.payload)
        if job.smoke is None:
            job.train.accumulation(context.identity.world_size)
    except ValidationError as error:
        raise SpecError(f"the job's payload is no TrainerJob: {error}") from error
    except ValueError as error:
        raise SpecError(f"train.{error}") from error
    return job


def _run(context: JobContext, job: TrainerJob, stop: StopFlag) -> dict[str, Any]:
    manifest = load_manifest(context.store, job.manifest_key)
    engine = build_engine(context, job.train, manifest=manifest, stop=stop)
    # What is here by now stays. To look through it for garbage takes half a second, every now and
    # then, on one rank while all others wait for it.
    gc.collect()
    gc.freeze()
    if job.smoke is not None:
        return run_smoke(engine, job.smoke)
    return run_training(engine)
