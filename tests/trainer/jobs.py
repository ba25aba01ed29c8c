"""Training jobs as the runner would make them, and ranks that run them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from storage.job import JobContext, JobDescription, JobExit, RankIdentity
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.records import Intent, Stage, Why, new_nonce
from storage.spec import StoreSpec
from trainer.spec import (
    CheckpointSpec,
    ModelSpec,
    ScheduleSpec,
    SmokeRun,
    TrainerJob,
    TrainSpec,
)

TINY = TrainSpec(
    model=ModelSpec(dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32),
    steps=8,
    sequence=16,
    global_batch=8,
    micro_batch=2,
    schedule=ScheduleSpec(peak_lr=1e-2, warmup_steps=2),
    checkpoint=CheckpointSpec(every_steps=4),
    validate_every_steps=4,
    validate_batches=2,
    log_every_steps=1,
    start_timeout_s=60,
    step_timeout_s=100,
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One run: makes the jobs of its attempts, and reads what they left behind."""

    store: StoreSpec
    manifest_key: str
    run: str
    folder: Path

    def job(
        self,
        train: TrainSpec = TINY,
        *,
        attempt: int = 1,
        smoke: SmokeRun | None = None,
        nodes: int = 1,
        ranks_per_node: int = 1,
    ) -> JobDescription:
        """The description of an attempt, whose intent is claimed in the ledger."""
        stage = Stage.TRAIN if smoke is None else Stage.SMOKE
        intent = Intent(
            run=self.run,
            stage=stage,
            unit="train",
            attempt=attempt,
            token=f"{self.run}-{stage}-{attempt}",
            nonce=new_nonce(),
            cluster="test",
            user="test",
            why=Why.FIRST if attempt == 1 else Why.RESUMED,
            after=None if attempt == 1 else attempt - 1,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            fingerprint="test",
            created_at=datetime.now(UTC),
        )
        assert self.ledger().claim_intent(intent).won
        payload = TrainerJob(train=train, manifest_key=self.manifest_key, smoke=smoke)
        return JobDescription(
            intent=intent,
            store=self.store,
            entry="trainer.main",
            payload=payload.model_dump(mode="json"),
            folder=self.folder / f"{attempt:04d}",
            code=Path.cwd(),
            python=Path("python"),
            launcher="local",
        )

    def ledger(self) -> Ledger:
        return Ledger(ObjectStore(self.store), RunKeys(prefix=self.store.prefix, run=self.run))

    def metrics(self, attempt: int) -> list[dict[str, Any]]:
        """The curve of an attempt, as it lies in the store."""
        ledger = self.ledger()
        body = ledger.store.get(ledger.keys.metrics(Stage.TRAIN, attempt))
        return [json.loads(line) for line in body.decode().splitlines()]


@dataclass(frozen=True, kw_only=True)
class Left:
    """How a rank left its job: with outputs, or with a code."""

    code: int
    message: str
    outputs: Mapping[str, Any]


def run_job(identity: RankIdentity, job: JobDescription) -> Left:
    """What `slurm.rank` does for one rank, without the exit record."""
    from trainer import main

    context = JobContext(job, identity)
    try:
        return Left(code=0, message="", outputs=main.run(context))
    except JobExit as leave:
        return Left(code=leave.code, message=str(leave), outputs=leave.outputs)
