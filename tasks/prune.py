"""The prune stage: delete the checkpoints that no rule keeps, by a job beside live readers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from storage.ledger import Ledger
from storage.records import Stage, StageRecord
from storage.retention.inventory import take
from storage.retention.sweep import SweepJob
from storage.spec import RetentionSpec
from tasks.context import RunContext, Unit
from tasks.runner import carry_out
from tasks.stage import run_stage


def prune(context: RunContext, spec: RetentionSpec) -> StageRecord:
    """The record of what was kept and deleted, and why.

    Raises:
        StageFailed: the sweep has no result.
    """
    (unit,) = units(spec)

    def body(fingerprint: str) -> Mapping[str, Any]:
        return carry_out(context, Stage.PRUNE, [unit], fingerprint=fingerprint)[unit.name].outputs

    return run_stage(
        context,
        Stage.PRUNE,
        inputs=inputs(context.ledger, spec),
        body=body,
        units=[unit.name],
    )


def inputs(ledger: Ledger, spec: RetentionSpec) -> Mapping[str, Any]:
    """What a sweep decides from: every commit there ever was, and which of them are past the grace.

    Those that were swept go on counting, by their journals, or each sweep would call for another.
    """
    now, grace = ledger.store.now(), timedelta(seconds=spec.grace_s)
    inventory = take(ledger, now=now)
    swept = {ref for journal in inventory.journals for ref in journal.refs}
    commits = swept | {commit.ref for commit in inventory.commits}
    aged = swept | {one.ref for one in inventory.commits if now - one.written_at >= grace}
    return {"retention": spec, "commits": sorted(commits), "past_grace": sorted(aged)}


def units(spec: RetentionSpec) -> tuple[Unit, ...]:
    """The one job of this stage."""
    payload = SweepJob(retention=spec).model_dump(mode="json")
    return (Unit(name="prune", entry="storage.retention.sweep", payload=payload),)
