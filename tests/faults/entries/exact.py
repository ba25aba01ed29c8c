"""The job of the node cuts: the training of known numbers, whose saves a real sidecar sends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from storage.job import JobContext
from tests.storage.checkpoints.kills.plans import Plan
from tests.storage.checkpoints.kills.processes import Voice, load_and_train
from trainer.parallel.mesh import start_process_group

START_S = 120.0


def run(context: JobContext) -> Mapping[str, Any]:
    identity, payload = context.identity, context.job.payload
    torch.set_num_threads(1)
    start_process_group(identity, device=torch.device("cpu"), timeout_s=START_S)
    say = Voice(Path(payload["events"]), attempt=context.attempt, role=f"rank{identity.rank}")
    plan = Plan(seed=0, every_steps=1, step_s=payload["step_s"], awaits_last=True)
    load_and_train(context, say, plan=plan)
    return {"attempt": context.attempt}
