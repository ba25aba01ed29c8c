"""Puts a rank together: device, mesh, sharded model, optimizer, data; training and smoke alike."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from storage.errors import SpecError
from storage.job import JobContext
from storage.shards.loader import ShardLoader
from storage.shards.manifest import Manifest, Split
from trainer.model import Decoder
from trainer.parallel.clock import CollectiveClock
from trainer.parallel.mesh import pick_device, start_process_group
from trainer.parallel.parallelize import parallelize
from trainer.plan.arithmetic import ModelShape
from trainer.signals import StopFlag
from trainer.spec import TrainSpec
from trainer.state import TrainState
from trainer.step import Stepper
from trainer.weights import initialise


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One rank, ready for its first step."""

    context: JobContext
    train: TrainSpec
    device: torch.device
    mesh: DeviceMesh
    manifest: Manifest
    state: TrainState
    step: Stepper
    collectives: CollectiveClock
    data: ShardLoader
    held_out: ShardLoader

    def samples(self, loader: ShardLoader, start: int, count: int) -> NDArray[np.int64]:
        """This rank's samples of the global positions `start … start + count`."""
        identity = self.context.identity
        return loader.batch(start, count, rank=identity.rank, world_size=identity.world_size)


def build_engine(
    context: JobContext, train: TrainSpec, *, manifest: Manifest, stop: StopFlag
) -> Engine:
    """Meets the other ranks and builds the model on all of them. Collective.

    Raises:
        SpecError: spec and data set do not fit each other; found before the ranks meet.
    """
    shape = ModelShape.resolve(train.model, tokenizer_vocab=manifest.tokenizer.vocab)
    data = _loader(context, manifest, train, "train")
    if data.num_samples == 0:
        raise SpecError(
            f"train.sequence {train.sequence} must leave at least one sample of sequence + 1 "
            f"tokens, and the training split of data set {manifest.dataset_id} has "
            f"{sum(shard.tokens for shard in manifest.of_split('train'))} tokens; lower it, or "
            "add documents"
        )
    epochs = require_samples(data.num_samples, train=train, dataset_id=manifest.dataset_id)
    if epochs > 1 and context.identity.rank == 0:
        print(
            f"train.steps {train.steps} × train.global_batch {train.global_batch} takes each of "
            f"the {data.num_samples:,} training samples {epochs:,.1f} times",
            flush=True,
        )
    device = pick_device(context.identity)
    if device.type == "cpu":
        torch.set_num_threads(train.threads)
        torch.use_deterministic_algorithms(True)
        # Every buffer of FSDP would be filled with NaN first; none is read before it is written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    mesh = start_process_group(context.identity, device=device, timeout_s=train.start_timeout_s)
    collectives = CollectiveClock()
    with torch.device("meta"):
        model = Decoder(
            shape,
            sequence=train.sequence,
            rope_theta=train.model.rope_theta,
            norm_eps=train.model.norm_eps,
        )
    parallelize(
        model,
        mesh,
        param_dtype=train.param_dtype,
        clock=collectives if device.type == "cpu" else None,
    )
    model.to_empty(device=device)
    initialise(model, seed=train.seed)
    state = TrainState(model, train.optimizer)
    return Engine(
        context=context,
        train=train,
        device=device,
        mesh=mesh,
        manifest=manifest,
        state=state,
        step=Stepper(
            state=state,
            device=device,
            clock=collectives,
            stop=stop,
            micro_batch=train.micro_batch,
            clip_norm=train.optimizer.clip_norm,
        ),
        collectives=collectives,
        data=data,
        held_out=_loader(context, manifest, train, "validation"),
    )


def require_samples(num_samples: int, *, train: TrainSpec, dataset_id: str) -> float:
    """How many epochs the training takes.

    Raises:
        SpecError: the samples do not fill one global batch, so that a step would repeat some.
    """
    if num_samples < train.global_batch:
        raise SpecError(
            f"train.global_batch {train.global_batch} must be at most the {num_samples} samples "
            f"of train.sequence {train.sequence} tokens in the training split of data set "
            f"{dataset_id}; lower it or train.sequence, or add documents to data.inputs"
        )
    return train.steps * train.global_batch / num_samples


def _loader(context: JobContext, manifest: Manifest, train: TrainSpec, split: Split) -> ShardLoader:
    cache = Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}" / "shards"
    return ShardLoader(
        context.store, manifest, split=split, sequence=train.sequence, seed=train.seed, cache=cache
    )
