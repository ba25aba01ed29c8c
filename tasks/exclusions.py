"""Which nodes a job may not use, what each is blamed for, and until when. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from slurm.policy import SUSPICIONS
from storage.attempts import Attempt
from storage.records import StageRecord


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Why a node is kept out of jobs, as a person should read it.

    `proven` is false for a node that was suspected once: it is avoided as long as there are others,
    since a link that flaps must not end a run that needs every node. `failed` says that attempts
    put it here, and neither the spec nor a validation; then `since` is when it was to be avoided as
    it is now, suspected or proven.
    """

    reason: str
    proven: bool = True
    failed: bool = False
    since: datetime | None = None
    until: datetime | None = None

    def __str__(self) -> str:
        return self.reason if self.until is None else f"{self.reason}, until {_spell(self.until)}"


def exclusions(
    *,
    by_spec: Iterable[str],
    unfit: Iterable[str],
    closed: Iterable[Attempt],
    passed_at: Mapping[str, datetime],
    now: datetime,
    exclude_h: float,
) -> dict[str, Exclusion]:
    """Each node that is excluded now.

    What an attempt decided holds for `exclude_h`, and no longer than until a validation passes the
    node, which is the newer word: `passed_at` says when that was last. A suspicion is proven when a
    second attempt has the same one.
    """
    term = timedelta(hours=exclude_h)
    found: dict[str, Exclusion] = {}
    once = {(one.intent.stage, one.number): one for one in closed}
    for attempt in sorted(once.values(), key=_ended_at):
        end = attempt.end
        if end is None or now >= end.at + term:
            continue
        kind = end.diagnosis.kind
        for node in end.decision.exclude_nodes:
            if node in passed_at and end.at <= passed_at[node]:
                continue
            before = found.get(node)
            place = f"{attempt.intent.stage} attempt {attempt.number}"
            found[node] = Exclusion(
                reason=f"{kind} in {place}"
                if before is None
                else f"{before.reason}, {kind} in {place}",
                proven=kind not in SUSPICIONS or before is not None,
                failed=True,
                since=before.since if before is not None and before.proven else end.at,
                until=end.at + term,
            )
    found |= {node: Exclusion(reason="unfit by validation") for node in unfit}
    found |= {node: Exclusion(reason="cluster.exclude") for node in by_spec}
    return found


def passed_nodes(validations: Iterable[StageRecord]) -> dict[str, datetime]:
    """When each node was last probed and found fit. A busy node that kept its verdict was not."""
    return {
        str(one["node"]): record.at
        for record in sorted(validations, key=lambda record: record.at)
        for one in record.outputs.get("nodes", ())
        if one["node"] in record.outputs["healthy"] and one["measures"]
    }


def _ended_at(attempt: Attempt) -> tuple[bool, datetime]:
    end = attempt.end
    return end is not None, attempt.intent.created_at if end is None else end.at


def _spell(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M %Z}".strip()
