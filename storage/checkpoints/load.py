"""Resuming: the newest commit that counts and that all ranks can load, or an error, never less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from textwrap import shorten
from typing import Any

from storage.checkpoint_records import Commit, CommitRef, Resume
from storage.checkpoints.choosing import Passed, choose, may_resume_from, name_of, why_swept
from storage.checkpoints.commits import read_commit
from storage.checkpoints.contents import Source
from storage.checkpoints.disk import Disk
from storage.checkpoints.metadata import JsonLoadPlanner
from storage.checkpoints.nearest import NearStore, gather, seen_refs
from storage.checkpoints.quarantine import doubt
from storage.checkpoints.ranks import Ranks
from storage.checkpoints.reader import DamagedCheckpointError, ObjectStoreReader
from storage.checkpoints.settings import disk_of
from storage.errors import CheckpointError, HeadraceError
from storage.job import JobContext, JobExit
from storage.ledger import Ledger
from storage.records import ExitCode, new_nonce

PASSED_TOLD = 8
PASSED_CHARS = 400
"""So much of what was stepped back from goes into a record that every look at the run reads."""


def load_newest(
    context: JobContext, state: dict[str, Any], *, model_hash: str, dataset_id: str
) -> Commit | None:
    """Loads the newest valid checkpoint into `state` in place, and records it. Collective.

    Tensors are filled where they are; JSON values are replaced in the nested dict. Where the spec
    names a disk tier that has the same save or a newer one, whole, that is loaded. A checkpoint
    that is damaged, on whichever rank, is passed over by all of them for the next older one, once
    commit and journals were read again: what a sweep took is not damaged. The hosts that could not
    load it say so in the bucket.

    Returns the commit, or None for a run that has none and starts at step 0.

    Raises:
        CheckpointError: commits exist and none is valid; the intent's floor is gone and nothing
            newer is there; or the checkpoint belongs to another model or data set.
        StoreError: the store failed, as against not having an object.
        JobExit: with FENCED, when another job has written this attempt's resume record.
    """
    ranks = Ranks()
    disk = disk_of(context.job)
    unfit: set[CommitRef] = set()
    damaged: dict[CommitRef, str] = {}
    swept: set[CommitRef] = set()
    told: set[str] = set()
    while True:
        choice = ranks.from_first(
            lambda: choose(context.ledger, context.job.intent, damaged=damaged, swept=swept)
        )
        commit = choice.commit
        for passed in choice.passed:
            if ranks.is_first and str(passed) not in told:
                print(f"headrace: stepping back from {passed}", flush=True)
                told.add(str(passed))
        near = _load_near(ranks, context, state, disk, than=commit, unfit=unfit) if disk else None
        commit = near or commit
        if commit is None:
            break
        _require_same("model", commit, saved=commit.model_hash, here=model_hash)
        _require_same("data set", commit, saved=commit.dataset_id, here=dataset_id)
        if near is not None:
            break
        faults = ranks.from_all(partial(_load, context.store, state, commit))
        if not any(faults):
            break
        gone = ranks.from_first(partial(why_swept, context.ledger, commit.ref))
        if gone is None:
            ranks.from_all(partial(_give_up, context, commit.ref, faults[ranks.rank]))
            damaged[commit.ref] = "; ".join(
                f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault
            )
        else:
            swept.add(commit.ref)
            if ranks.is_first:
                print(f"headrace: {_name(commit.ref)} is no more: {gone}", flush=True)
    stepped_over = choice.passed if near is None else ()
    ranks.from_first(
        lambda: _claim(context, commit, from_disk=near is not None, passed=stepped_over)
    )
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
    faults = ranks.from_all(partial(_load, context.store, state, commit))
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


def _load_near(
    ranks: Ranks,
    context: JobContext,
    state: dict[str, Any],
    disk: Disk,
    *,
    than: Commit | None,
    unfit: set[CommitRef],
) -> Commit | None:
    """Loads what the nearer tier has, where that is no older `than` what the store has.

    The store is the one that is always believed: whatever is wrong with the disk, a host that lacks
    a part or a byte that has changed, only leads back to it. `unfit` is what was tried in vain.
    """
    keys = context.ledger.keys
    oldest = 0 if than is None else than.step

    def eligible(refs: Sequence[CommitRef]) -> tuple[CommitRef, ...]:
        wanted = [ref for ref in refs if ref.step >= oldest and ref not in unfit]
        return may_resume_from(context.ledger, context.job.intent, wanted)

    looks = context.identity.local_rank == 0
    seen = seen_refs(ranks, disk, keys, looks=looks, eligible=eligible)
    for ref, seers in seen.items():
        save = gather(ranks, disk, keys, ref, seers=seers)
        if save is not None:
            store = NearStore(disk, save)
            faults = ranks.from_all(partial(_try_near, store, state, save.commit))
            if not any(faults):
                if ranks.is_first:
                    print(f"headrace: {_name(ref)} is loaded from {disk.root}", flush=True)
                return save.commit
            if ranks.is_first:
                why = next(filter(None, faults))
                print(f"headrace: {_name(ref)} on disk is passed over: {why}", flush=True)
        unfit.add(ref)
    return None


def _try_near(store: NearStore, state: dict[str, Any], commit: Commit) -> str:
    try:
        return _load(store, state, commit)
    except HeadraceError as error:
        return str(error)


def _load(store: Source, state: dict[str, Any], commit: Commit) -> str:
    """Loads this rank's part; what is damaged, or an empty text."""
    reader = ObjectStoreReader(store, commit)
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


def _give_up(context: JobContext, ref: CommitRef, fault: str) -> None:
    """Leaves this host's word against a checkpoint that its rank could not load."""
    if fault:
        doubt(
            context.ledger,
            ref,
            host=context.identity.node,
            attempt=context.attempt,
            fault=f"rank {context.identity.rank}: {fault}",
        )


def _claim(
    context: JobContext, commit: Commit | None, *, from_disk: bool, passed: Sequence[Passed]
) -> None:
    """Writes the resume record: from now on this attempt is the newest of the lineage.

    One that was replaced while it loaded must not be.
    """
    if context.is_fenced():
        raise JobExit(ExitCode.FENCED, f"attempt {context.attempt} was closed or replaced")
    record = Resume(
        source=None if commit is None else commit.ref,
        from_disk=from_disk,
        passed=tuple(
            shorten(str(each), PASSED_CHARS, placeholder=" …") for each in passed[:PASSED_TOLD]
        ),
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
    return name_of(ref.step, ref.attempt, ref.save)
