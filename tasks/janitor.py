"""Finds jobs that nobody waits for any more, and ends them.

A job may land minutes after its sbatch was given up, and an engine may die between a record and its
scancel. The start register keeps such a job from doing harm; this keeps it from holding nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slurm.cluster import Cluster, JobObservation
from slurm.diagnose import THE_LOOP
from storage.attempts import Attempt
from storage.ledger import Ledger
from storage.records import Stage

_STAGES = "|".join(Stage)
_LEAVING = "COMPLETING"


@dataclass(frozen=True, kw_only=True)
class Orphan:
    """A job to be ended, known by id and token, and why nobody waits for it."""

    job_id: str
    token: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Named:
    """The attempt that a token names."""

    stage: Stage
    attempt: int


def named_by(token: str, *, run: str) -> Named | None:
    """The attempt of the run whose token this is; None where it is another's, or no token."""
    match = re.fullmatch(rf"{re.escape(run)}-({_STAGES})-(\d{{4,}})-[0-9a-f]{{16}}", token)
    return None if match is None else Named(stage=Stage(match[1]), attempt=int(match[2]))


def orphans(
    attempts: Iterable[Attempt], jobs: Mapping[str, JobObservation], *, cluster: str
) -> tuple[Orphan, ...]:
    """The jobs in the queue whose attempt says that none should be there. Pure.

    A job that leaves already is let go, and a cancel by the loop is the loop's to finish.
    """
    found = []
    for attempt in attempts:
        job = jobs.get(attempt.intent.token)
        if job is None or job.job_id is None or job.raw_state == _LEAVING:
            continue
        if attempt.intent.cluster != cluster:
            continue
        why = _why_orphan(attempt)
        if why is not None:
            found.append(Orphan(job_id=job.job_id, token=attempt.intent.token, why=why))
    return tuple(found)


def _why_orphan(attempt: Attempt) -> str | None:
    if attempt.end is not None:
        return f"attempt {attempt.number} is closed: {attempt.end.diagnosis.message}"
    if attempt.start is not None and attempt.start.is_void:
        return f"attempt {attempt.number} is void, so its job could never pass the start"
    if attempt.cancel is not None and attempt.cancel.who != THE_LOOP:
        return f"attempt {attempt.number} was cancelled by {attempt.cancel.who}"
    return None


def end_orphans(ledger: Ledger, cluster: Cluster, jobs: Mapping[str, JobObservation]) -> list[str]:
    """Cancel the orphans of one run among the jobs in the queue; returns a line for each."""
    known = (_attempt_of(token, ledger) for token in jobs)
    told = []
    found = orphans((one for one in known if one is not None), jobs, cluster=cluster.name)
    for orphan in found:
        cluster.cancel(job_id=orphan.job_id, token=orphan.token)
        told.append(f"job {orphan.job_id} ({orphan.token}) was cancelled: {orphan.why}")
    return told


def _attempt_of(token: str, ledger: Ledger) -> Attempt | None:
    named = named_by(token, run=ledger.keys.run)
    found = None if named is None else ledger.attempt(named.stage, named.attempt)
    # The random bits belong to it: the number alone may be of an older bucket's attempt.
    return found if found is not None and found.intent.token == token else None
