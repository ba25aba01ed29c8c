"""Pruning: plan, journal, look again, delete; beside live readers and writers.

A sweeper says what it means to delete, and then looks who is there; a reader says that it is there,
and then looks what is to be deleted. So at least one of them sees the other. Interrupted anywhere
and run again, a sweep ends in the same place: what a journal names stays doomed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from storage.checkpoint_records import CommitRef, SweepJournal
from storage.checkpoints.lineage import journaled
from storage.job import JobContext
from storage.ledger import Ledger
from storage.object_store import DeleteFailure
from storage.records import encode, new_nonce
from storage.retention.inventory import Inventory, protected, take
from storage.retention.policy import Verdict, plan
from storage.spec import Model, RetentionSpec


class SweepJob(Model):
    """The payload of a `storage.retention.sweep` job; the run is that of its intent."""

    retention: RetentionSpec


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep did."""

    kept: tuple[Verdict, ...]
    deleted: tuple[Verdict, ...]
    bytes_before: int
    bytes_after: int
    failures: tuple[DeleteFailure, ...]


def run(context: JobContext) -> Mapping[str, Any]:
    """Entry of a prune job; its first rank does all of it."""
    if context.identity.rank != 0:
        return {}
    job = SweepJob.model_validate(context.job.payload)
    done = sweep(context.ledger, job.retention, sweep_id=f"{context.attempt:04d}.{new_nonce()}")
    return {
        "kept": [_shown(verdict) for verdict in done.kept],
        "deleted": [_shown(verdict) for verdict in done.deleted],
        "bytes_before": done.bytes_before,
        "bytes_after": done.bytes_after,
        "failures": [
            {"key": failure.key, "code": failure.code, "message": failure.message}
            for failure in done.failures
        ],
    }


def sweep(ledger: Ledger, retention: RetentionSpec, *, sweep_id: str) -> Sweep:
    """Deletes what the retention spec does not keep, of this run alone."""
    now = ledger.store.now()
    first = take(ledger, now=now)
    _forget(ledger, first)
    planned = {verdict.ref for verdict in judge(first, retention, now=now) if not verdict.keep}
    if not planned:
        return _report(ledger, first, judge(first, retention, now=now), failures=())
    fresh = planned - journaled(first.journals)
    if fresh:
        _journal(ledger, sweep_id, fresh)
    second = take(ledger, now=now, without_sweep=sweep_id)
    verdicts = tuple(
        verdict
        if verdict.keep or verdict.ref in planned
        else replace(verdict, keep=True, reason="not in the plan of this sweep")
        for verdict in judge(second, retention, now=now)
    )
    doomed = {verdict.ref for verdict in verdicts if not verdict.keep}
    if not fresh <= doomed:
        _journal(ledger, sweep_id, fresh & doomed)
    return _report(ledger, second, verdicts, failures=_delete(ledger, second, doomed))


def judge(inventory: Inventory, retention: RetentionSpec, *, now: datetime) -> tuple[Verdict, ...]:
    """A verdict on every save there is, committed or not; pure."""
    protection = protected(inventory)
    committed = plan(
        inventory.commits,
        protected=protection,
        keep=retention.keep,
        grace_s=retention.grace_s,
        now=now,
    )
    known = {verdict.ref for verdict in committed}
    swept = journaled(inventory.journals)
    ended = {attempt.number for attempt in inventory.attempts if attempt.end is not None}
    rest = []
    for ref, objects in sorted(inventory.saves.items(), reverse=True):
        if ref in known:
            continue
        age = now - max(info.last_modified for info in objects)
        if ref in protection:
            keep, reason = True, protection[ref]
        elif ref in swept:
            keep, reason = False, "left over from an earlier sweep"
        elif ref.attempt not in ended:
            keep, reason = True, "no commit yet, and its attempt has not ended"
        elif age < timedelta(seconds=retention.grace_s):
            keep, reason = True, "no commit, but younger than the grace"
        else:
            keep, reason = False, "no commit, and its attempt has ended"
        size_bytes = sum(info.size_bytes for info in objects)
        rest.append(Verdict(ref=ref, size_bytes=size_bytes, keep=keep, reason=reason))
    return (*committed, *rest)


def _forget(ledger: Ledger, inventory: Inventory) -> None:
    """Removes the markers of readers that died; a living one would put its own again."""
    ledger.store.delete(marker.key for marker in inventory.markers if not marker.holds)


def _journal(ledger: Ledger, sweep_id: str, refs: Iterable[CommitRef]) -> None:
    journal = SweepJournal(sweep=sweep_id, refs=tuple(sorted(refs)), at=datetime.now(UTC))
    ledger.store.put(ledger.keys.sweep(sweep_id), encode(journal))


def _delete(
    ledger: Ledger, inventory: Inventory, doomed: Set[CommitRef]
) -> tuple[DeleteFailure, ...]:
    """Commits go first, and data only after their commit: none ever stands without its data."""
    commit_keys = {
        ledger.keys.commit(commit.ref.attempt, step=commit.ref.step): commit.ref
        for commit in inventory.commits
        if commit.ref in doomed
    }
    failures = ledger.store.delete(commit_keys)
    standing = {commit_keys[failure.key] for failure in failures if failure.key in commit_keys}
    return failures + ledger.store.delete(
        info.key
        for ref, objects in inventory.saves.items()
        if ref in doomed and ref not in standing
        for info in objects
    )


def _report(
    ledger: Ledger,
    inventory: Inventory,
    verdicts: Iterable[Verdict],
    *,
    failures: tuple[DeleteFailure, ...],
) -> Sweep:
    """A save of which anything could not be deleted is reported as still there."""
    failed = {failure.key: failure for failure in failures}
    kept, deleted, freed_bytes = [], [], 0
    for verdict in verdicts:
        ref, objects = verdict.ref, inventory.saves.get(verdict.ref, ())
        keys = [ledger.keys.commit(ref.attempt, step=ref.step), *(info.key for info in objects)]
        refused = [failed[key] for key in keys if key in failed]
        if verdict.keep:
            kept.append(verdict)
        elif refused:
            kept.append(replace(verdict, reason=f"the store refused: {refused[0].message}"))
        else:
            deleted.append(verdict)
            freed_bytes += sum(info.size_bytes for info in objects)
    return Sweep(
        kept=tuple(kept),
        deleted=tuple(deleted),
        bytes_before=inventory.size_bytes,
        bytes_after=inventory.size_bytes - freed_bytes,
        failures=failures,
    )


def _shown(verdict: Verdict) -> dict[str, Any]:
    return {
        "step": verdict.ref.step,
        "attempt": verdict.ref.attempt,
        "save": verdict.ref.save,
        "size_bytes": verdict.size_bytes,
        "reason": verdict.reason,
    }
