"""Attempts made of nothing, for the tests of what is pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from storage.attempts import Attempt
from storage.checkpoint_records import CommitRef
from storage.records import (
    Action,
    Decision,
    Diagnosis,
    End,
    Exit,
    Heartbeat,
    Intent,
    JobIdentity,
    Kind,
    Stage,
    Start,
    Why,
)

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
NONCE = "0123456789abcdef"


def commit(step: int) -> CommitRef:
    return CommitRef(step=step, attempt=1, save="s")


def an_attempt(number: int = 1, *, floor: int | None = None, **records: Any) -> Attempt:
    """An attempt that started on n1 and n2, with whatever else is given."""
    intent = Intent(
        run="r",
        stage=Stage.TRAIN,
        unit="train",
        attempt=number,
        token=f"r-train-{number}",
        nonce=NONCE,
        cluster="c",
        user="me",
        why=Why.FIRST if number == 1 else Why.RESUMED,
        after=number - 1 or None,
        nodes=2,
        ranks_per_node=1,
        fingerprint="f",
        floor=None if floor is None else commit(floor),
        created_at=NOW - timedelta(hours=1),
    )
    job = JobIdentity(job_id="7", token=intent.token, host="n1")
    start = Start(job=job, nodes=("n1", "n2"), nonce=NONCE, at=NOW - timedelta(minutes=50))
    return replace(Attempt(intent=intent, start=start), **records)


def an_exit(code: int = 1, error: str = "", *, rank: int | None = 0, **more: Any) -> Exit:
    values: dict[str, Any] = {"node": "n1", "at": NOW, **more}
    return Exit(code=code, rank=rank, error=error, nonce=NONCE, **values)


def ended(
    attempt: Attempt,
    kind: Kind,
    action: Action = Action.RESUME,
    *,
    culprits: tuple[str, ...] = (),
) -> Attempt:
    """The attempt, closed with a diagnosis of this kind."""
    end = End(
        diagnosis=Diagnosis(kind=kind, culprit_nodes=culprits),
        decision=Decision(action=action, reason="r"),
        by="test",
        nonce=NONCE,
        at=NOW,
    )
    return replace(attempt, end=end)


def beat(node: str, *, age_s: float = 0.0, step: int | None = None) -> Heartbeat:
    return Heartbeat(node=node, sequence=1, step=step, at=NOW - timedelta(seconds=age_s))
