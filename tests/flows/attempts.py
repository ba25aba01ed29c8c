"""Attempts to show, with only what a test is about written out."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from storage.attempts import Attempt
from storage.checkpoint_records import CommitRef, Resume
from storage.records import (
    Action,
    Decision,
    Diagnosis,
    End,
    Intent,
    JobIdentity,
    Kind,
    Stage,
    StageRecord,
    Start,
    Why,
)

NOW = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


def attempt(
    number: int = 1, *, end: End | None = None, resume: Resume | None = None, **intent: Any
):
    fields = {
        "run": "r",
        "stage": Stage.TRAIN,
        "unit": "train",
        "token": f"r-train-{number:04d}",
        "nonce": "0",
        "cluster": "c",
        "user": "u",
        "why": Why.FIRST if number == 1 else Why.RETRIED,
        "after": None,
        "nodes": 2,
        "ranks_per_node": 1,
        "fingerprint": "f",
        "created_at": NOW,
    }
    job = JobIdentity(job_id=str(100 + number), token="t", host="n1")
    start = Start(job=job, nodes=("n1", "n2"), nonce="0", at=NOW)
    made = Intent(attempt=number, **(fields | intent))
    return Attempt(intent=made, start=start, resume=resume, end=end)


def end(
    kind: Kind = Kind.DONE,
    action: Action = Action.DONE,
    *,
    reason: str = "it is done",
    nodes: tuple[str, ...] = (),
    evidence: tuple[str, ...] = (),
) -> End:
    return End(
        diagnosis=Diagnosis(kind=kind, culprit_nodes=nodes, evidence=evidence),
        decision=Decision(action=action, reason=reason),
        by="e",
        nonce="0",
        at=NOW,
    )


def dead_node() -> End:
    return end(
        Kind.HARDWARE,
        Action.RETRY_ELSEWHERE,
        reason="node n3 is excluded",
        nodes=("n3",),
        evidence=("NODE_FAIL",),
    )


def resumed(step: int, attempt: int) -> Resume:
    source = CommitRef(step=step, attempt=attempt, save="s")
    return Resume(source=source, world_size=2, nonce="0", at=NOW)


def fresh() -> Resume:
    return Resume(source=None, world_size=2, nonce="0", at=NOW)


def record(stage: Stage, **outputs: Any) -> StageRecord:
    return StageRecord(
        stage=stage,
        fingerprint="f",
        generation=0,
        outputs=outputs,
        attempts=(1,),
        nonce="0",
        at=NOW,
    )
