"""What a trainer would say of a save."""

from __future__ import annotations

from storage.checkpoint_records import SaveFacts


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
