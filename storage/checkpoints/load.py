"""Resuming: the newest commit that counts and that all ranks can load, or an error, never less."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any

from storage.checkpoint_records import Commit, CommitRef, Loading, Resume
from storage.checkpoints.commits import (
    commit_places,
    iter_counting,
    loading_key,
    read_commit,
    read_journals,
)
from storage.checkpoints.lineage import Lineage, journaled, trace
from storage.checkpoints.metadata import JsonLoadPlanner
from storage.checkpoints.ranks import Ranks
from storage.checkpoints.reader import DamagedCheckpointError, ObjectStoreReader
from storage.errors import CheckpointError
from storage.job import JobContext, JobExit
from storage.ledger import Ledger
from storage.records import ExitCode, Stage, encode, new_nonce

CANDIDATES = 8


def load_newest(
    context: JobContext, state: dict[str, Any], *, model_hash: str, dataset_id: str
) -> Commit | None:
    """Loads the newest valid checkpoint into `state` in place, and records it. Collective.

    Tensors are filled where they are; JSON values are replaced in the nested dict. A checkpoint
    that is damaged, on whichever rank, is passed over by all of them for the next older one.

    Returns the commit, or None for a run that has none and starts at step 0.

    Raises:
        CheckpointError: commits exist and none is valid; the intent's floor is gone and nothing
            newer is there; or the checkpoint belongs to another model or data set.
        StoreError: the store failed, as against not having an object.
        JobExit: with FENCED, when another job has written this attempt's resume record.
    """
    ranks = Ranks()
    damaged: dict[CommitRef, str] = {}
    while True:
        commit = ranks.from_first(lambda: _choose(context, damaged))
        if commit is None:
            break
        _require_same("model", commit, saved=commit.model_hash, here=model_hash)
        _require_same("data set", commit, saved=commit.dataset_id, here=dataset_id)
        faults = ranks.from_all(partial(_load, context, state, commit))
        if not any(faults):
            break
        damaged[commit.ref] = "; ".join(
            f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault
        )
        if ranks.is_first:
            print(
                f"headrace: stepping back from {_name(commit.ref)}: {damaged[commit.ref]}",
                flush=True,
            )
    ranks.from_first(lambda: _claim(context, None if commit is None else commit.ref))
    return commit


def load_fork_point(
    context: JobContext, state: dict[str, Any], *, model_hash: str
) -> Commit | None:
    """Loads the checkpoint of another run that this one was forked from. Collective.

    It is pinned in its own run since before this one began. Returns its commit, or None for a run
    that begins from scratch.

    Raises:
        CheckpointError: it is gone or damaged, or belongs to another model.
        StoreError: the store failed.
    """
    ranks = Ranks()
    commit = ranks.from_first(lambda: _fork_point(context))
    if commit is None:
        return None
    _require_same("model", commit, saved=commit.model_hash, here=model_hash)
    faults = ranks.from_all(partial(_load, context, state, commit))
    if any(faults):
        raise CheckpointError(
            f"{_name(commit.ref)} of run {commit.run!r}, from which this run was forked, is "
            f"damaged: {next(filter(None, faults))}; fork anew, from one that is whole"
        )
    return commit


def _fork_point(context: JobContext) -> Commit | None:
    record = context.ledger.run_record()
    if record is None or record.forked_from is None or record.fork_point is None:
        return None
    point = record.fork_point
    keys = replace(context.ledger.keys, run=record.forked_from)
    commit = read_commit(Ledger(context.store, keys), attempt=point.attempt, step=point.step)
    if commit is None or commit.ref != point:
        raise CheckpointError(
            f"{_name(point)} of run {record.forked_from!r}, from which this run was forked, is "
            "gone; fork anew, under another name"
        )
    return commit


def _load(context: JobContext, state: dict[str, Any], commit: Commit) -> str:
    """Loads this rank's part; what is damaged, or an empty text."""
    reader = ObjectStoreReader(context.store, commit)
    planner = JsonLoadPlanner()
    try:
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        planner.set_up_planner(state, metadata, is_coordinator=False)
        plan = planner.finish_plan(planner.create_local_plan())
        reader.read_data(plan, planner).wait()
    except DamagedCheckpointError as fault:
        return str(fault)
    return ""


def _choose(context: JobContext, damaged: dict[CommitRef, str]) -> Commit | None:
    """The newest commit that counts and is not known to be damaged; rank 0's part.

    The marker goes first and the journals are read after it, so that of a reader and a sweeper at
    least one sees the other.
    """
    intent, ledger = context.job.intent, context.ledger
    rolled_back = (
        intent.ceiling is not None
        and intent.floor is not None
        and intent.floor.step > intent.ceiling
    )
    floor = None if rolled_back else intent.floor
    while True:
        attempts = ledger.attempts(Stage.TRAIN)
        counting = iter_counting(
            ledger,
            attempts,
            read_journals(ledger),
            ceiling=intent.ceiling,
            also=() if floor is None else (floor,),
        )
        candidates = tuple(
            islice((commit for commit in counting if commit.ref not in damaged), CANDIDATES)
        )
        marker = Loading(
            candidates=tuple(commit.ref for commit in candidates), at=datetime.now(UTC)
        )
        ledger.store.put(loading_key(ledger, context.attempt), encode(marker))
        swept = journaled(read_journals(ledger))
        standing = [commit for commit in candidates if commit.ref not in swept]
        if standing or not candidates:
            break
    newest = standing[0] if standing else None
    _require_floor(floor, newest, damaged, known={commit.ref for commit in standing})
    if newest is None:
        _require_fresh(context, damaged, trace(attempts))
    return newest


def _require_floor(
    floor: CommitRef | None,
    newest: Commit | None,
    damaged: dict[CommitRef, str],
    *,
    known: set[CommitRef],
) -> None:
    """A floor that is damaged may be stepped back from; one that is gone may not."""
    if floor is None or floor in known or floor in damaged:
        return
    if newest is None or newest.step < floor.step:
        raise CheckpointError(
            f"the newest commit known when this attempt was made, {_name(floor)}, is gone, and "
            "nothing newer counts; look for who deleted it, and restore it or start a run under a "
            "new name" + _list(damaged)
        )


def _require_fresh(context: JobContext, damaged: dict[CommitRef, str], lineage: Lineage) -> None:
    """Nothing can be loaded: that is right only for a run that has never committed anything."""
    if context.job.intent.ceiling == 0:
        return
    exists = any(last is not None for last in lineage.last_steps.values()) or any(
        lineage.admits(attempt=attempt, step=step)
        for step, attempt in commit_places(context.ledger)
    )
    if damaged or exists:
        ceiling = context.job.intent.ceiling
        raise CheckpointError(
            "the run has commits"
            + ("" if ceiling is None else f", with a ceiling at step {ceiling},")
            + " and none of them can be loaded; restore one, or start a run under a new name"
            + _list(damaged)
        )


def _claim(context: JobContext, source: CommitRef | None) -> None:
    """Writes the resume record: from now on this attempt is the newest of the lineage."""
    record = Resume(
        source=source,
        world_size=context.identity.world_size,
        nonce=new_nonce(),
        at=datetime.now(UTC),
    )
    if not context.ledger.claim_resume(context.job.intent, record).won:
        raise JobExit(
            ExitCode.FENCED,
            f"attempt {context.attempt} has resumed already: another job runs it",
        )


def _require_same(what: str, commit: Commit, *, saved: str, here: str) -> None:
    if saved != here:
        raise CheckpointError(
            f"{_name(commit.ref)} was saved with {what} {saved!r}, this job has {here!r}; "
            "set the spec back, or start a run under a new name"
        )


def _name(ref: CommitRef) -> str:
    return f"the checkpoint of step {ref.step} (attempt {ref.attempt}, save {ref.save})"


def _list(damaged: dict[CommitRef, str]) -> str:
    return "".join(f"\n  {_name(ref)}: {fault}" for ref, fault in damaged.items())
