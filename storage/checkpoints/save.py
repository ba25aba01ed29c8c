"""Saving: every rank writes its part, and one small object, written last, makes it real."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from storage.checkpoint_records import Commit
from storage.checkpoints.layout import RankPart, compact, merge
from storage.checkpoints.metadata import JsonSavePlanner
from storage.checkpoints.ranks import Ranks
from storage.checkpoints.writer import ObjectStoreWriter, layout_of
from storage.errors import CheckpointError
from storage.job import JobContext, JobExit
from storage.records import ExitCode, Stage, decode, encode, new_nonce

POLL_THREADS = 16
POLL_S = 0.02
POLL_MAX_S = 1.0


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
    save = ranks.from_first(new_nonce)
    folder = context.job.keys.save(context.attempt, step=step, save=save)
    writer = ObjectStoreWriter(context.store, folder, rank=ranks.rank)
    planner, plan = _plan(state, ranks)
    results = writer.write_data(plan, planner).wait()
    part = RankPart(
        save=save,
        step=step,
        rank=ranks.rank,
        files=tuple(writer.files),
        layout=layout_of(results),
    )
    context.store.put(
        context.job.keys.done(context.attempt, step=step, save=save, rank=ranks.rank), compact(part)
    )

    def commit() -> Commit:
        parts = _await_parts(
            context, step=step, save=save, world_size=ranks.world_size, deadline_s=deadline_s
        )
        metadata = writer.write_metadata(merge(part.layout for part in parts))
        return _claim(
            context,
            Commit(
                run=context.job.intent.run,
                attempt=context.attempt,
                step=step,
                save=save,
                world_size=ranks.world_size,
                mesh=dict(mesh),
                metadata=metadata,
                files=tuple(file for part in parts for file in part.files),
                samples_consumed=samples_consumed,
                samples_hash=samples_hash,
                dataset_id=dataset_id,
                model_hash=model_hash,
                metrics=dict(metrics),
                nonce=new_nonce(),
                at=datetime.now(UTC),
            ),
        )

    return ranks.from_late_first(commit, name=f"headrace/save/{save}", timeout_s=2 * deadline_s)


def _plan(state: dict[str, Any], ranks: Ranks) -> tuple[JsonSavePlanner, SavePlan]:
    """Who writes what: rank 0 takes out what several ranks hold alike."""
    planner = JsonSavePlanner()

    def local() -> SavePlan:
        planner.set_up_planner(state, is_coordinator=ranks.is_first)
        return planner.create_local_plan()

    share = ranks.through_first(local, lambda plans: planner.create_global_plan(plans)[0])
    return planner, planner.finish_plan(share)


def _await_parts(
    context: JobContext, *, step: int, save: str, world_size: int, deadline_s: float
) -> tuple[RankPart, ...]:
    """All ranks' parts of this save, in the order of the ranks.

    Raises:
        CheckpointError: some are missing at the deadline.
    """
    keys = {
        rank: context.job.keys.done(context.attempt, step=step, save=save, rank=rank)
        for rank in range(world_size)
    }
    parts: dict[int, RankPart] = {}
    deadline = time.monotonic() + deadline_s
    pause_s = POLL_S
    with ThreadPoolExecutor(POLL_THREADS) as pool:
        while True:
            missing = [rank for rank in keys if rank not in parts]
            bodies = pool.map(context.store.get_if_exists, [keys[rank] for rank in missing])
            for rank, body in zip(missing, bodies, strict=True):
                if body is not None:
                    parts[rank] = decode(RankPart, body)
            if len(parts) == world_size:
                return tuple(parts[rank] for rank in keys)
            if time.monotonic() >= deadline:
                absent = ", ".join(str(rank) for rank in keys if rank not in parts)
                raise CheckpointError(
                    f"no commit at step {step}: the parts of ranks {absent} were not in the store "
                    f"{deadline_s:g} s after rank 0 had written its own"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_MAX_S)


def _claim(context: JobContext, commit: Commit) -> Commit:
    """Makes the checkpoint real, unless another job has taken this one's place."""
    if context.is_fenced():
        raise JobExit(
            ExitCode.FENCED,
            f"attempt {context.attempt} was closed or replaced; no commit at step {commit.step}",
        )
    key = context.job.keys.commit(context.attempt, step=commit.step)
    created = context.store.create(key, encode(commit))
    if not created.won:
        other = decode(Commit, created.body)
        raise JobExit(
            ExitCode.FENCED,
            f"step {commit.step} of attempt {context.attempt} is committed already, as save "
            f"{other.save}: another job runs this attempt",
        )
    return commit
