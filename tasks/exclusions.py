"""Which nodes a job may not use, and what each is blamed for. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from storage.records import Attempt


def exclusions(
    *,
    by_spec: Iterable[str],
    unfit: Iterable[str],
    closed: Iterable[Attempt],
    validated_at: datetime | None,
) -> dict[str, str]:
    """Each excluded node with the reason, as a person should read it.

    A validation that passed a node after an attempt blamed it is the newer word: what was decided
    before `validated_at` excludes nobody any more.
    """
    reasons: dict[str, str] = {}
    for attempt in closed:
        end = attempt.end
        if end is None or (validated_at is not None and end.at <= validated_at):
            continue
        where = f"{attempt.intent.stage} attempt {attempt.number}"
        for node in end.decision.exclude_nodes:
            reasons[node] = f"{end.diagnosis.kind} in {where}"
    reasons |= dict.fromkeys(unfit, "unfit by validation")
    reasons |= dict.fromkeys(by_spec, "cluster.exclude")
    return reasons
