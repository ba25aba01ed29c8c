"""What a trainer would say of a save, and a commit of one."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from storage.checkpoint_records import Commit, FileRecord, SaveFacts

NOTHING = FileRecord(key="none", size_bytes=0, crc64nvme="AAAAAAAAAAA=")


def make_facts(step: int, *, save: str = "", world_size: int = 1) -> SaveFacts:
    return SaveFacts(
        step=step,
        save=save or f"save{step}",
        world_size=world_size,
        mesh={"dp_shard": world_size},
        samples_consumed=8 * step,
        samples_hash=f"hash-{step}",
        dataset_id="data",
        model_hash="model",
        metrics={"loss": 1.0 / step},
    )


def make_commit(step: int, *, run: str = "demo", attempt: int = 1, **fields: Any) -> Commit:
    """The record of a commit of no bytes, but for the `fields` that are named."""
    plain = Commit(
        **vars(make_facts(step or 1)),
        run=run,
        attempt=attempt,
        metadata=NOTHING,
        files=(),
        nonce="n",
        at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    return replace(plain, step=step, **fields)
