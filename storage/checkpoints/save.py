"""Saving: every rank writes its part, and one small object, written last, makes it real."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storage.checkpoint_records import Commit, SaveFacts
from storage.checkpoints.commit import await_parts, commit_parts
from storage.checkpoints.layout import RankPart
from storage.checkpoints.placing import plan_save
from storage.checkpoints.ranks import Ranks
from storage.checkpoints.sealing import encode_sealed
from storage.checkpoints.writer import ObjectStoreWriter, layout_of
from storage.errors import CheckpointError
from storage.job import JobContext
from storage.records import Stage, new_nonce


def save_checkpoint(
    context: JobContext,
    state: dict[str, Any],
    *,
    step: int,
    mesh: Mapping[str, int],
    samples_consumed: int,
    samples_hash: str,
    dataset_id: str,
    model_hash: str,
    metrics: Mapping[str, float],
    deadline_s: float = 600.0,
) -> Commit:
    """Saves `state`, a nested dict of (D)Tensors and JSON values, and commits it. Collective.

    Call it at most once a step. While parts are written no collective runs, so the process group's
    time-out need not cover a slow upload: `deadline_s` bounds how much later than rank 0 the other
    ranks may be, and twice that how much later rank 0 may be than they.

    Raises:
        CheckpointError: something in `state` cannot be saved, or a rank's part is missing at the
            deadline; there is no commit then.
        StoreError: the store failed; there is no commit, unless only the answer to it was lost.
        JobExit: with FENCED, when this attempt was closed or replaced meanwhile.
    """
    if context.job.intent.stage is not Stage.TRAIN:
        raise CheckpointError(
            f"a job of stage {context.job.intent.stage} cannot save: checkpoints belong to the "
            "attempts of stage train"
        )
    ranks = Ranks()
    facts = SaveFacts(
        step=step,
        save=ranks.from_first(new_nonce),
        world_size=ranks.world_size,
        mesh=dict(mesh),
        samples_consumed=samples_consumed,
        samples_hash=samples_hash,
        dataset_id=dataset_id,
        model_hash=model_hash,
        metrics=dict(metrics),
    )
    keys = context.job.keys
    folder = keys.save(context.attempt, step=step, save=facts.save)
    writer = ObjectStoreWriter(context.store, folder, rank=ranks.rank)
    planner, plan = plan_save(state, ranks)
    layout = layout_of(writer.write_data(plan, planner).wait())
    part = RankPart(facts=facts, rank=ranks.rank, files=writer.files, layout=layout)
    done = keys.done(context.attempt, step=step, save=facts.save, rank=ranks.rank)
    context.store.put(done, encode_sealed(part))

    def commit() -> Commit:
        parts = await_parts(
            context.ledger, attempt=context.attempt, facts=facts, deadline_s=deadline_s
        )
        return commit_parts(context.ledger, context.job.intent, facts, parts)

    return ranks.from_late_first(
        commit, name=f"headrace/save/{facts.save}", timeout_s=2 * deadline_s
    )
