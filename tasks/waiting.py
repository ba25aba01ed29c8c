"""What an open attempt waits for, by its records and by what the cluster says of its job. Pure."""

from __future__ import annotations

from datetime import datetime

from slurm.cluster import JobObservation, JobState
from slurm.pending import explain
from storage.attempts import Attempt
from storage.records import ExitCode
from tasks.durations import spell_duration


def waits_for(attempt: Attempt, seen: JobObservation | None, *, now: datetime) -> str:
    """Goes on after "it waits for"."""
    start, beats = attempt.start, attempt.heartbeats
    if attempt.exit is not None:
        code = attempt.exit.code
        name = f" ({ExitCode(code).name})" if code in set(ExitCode) else ""
        return f"an engine to settle its end: it has left with code {code}{name}"
    if start is None:
        return _for_its_job(attempt, seen)
    if start.job is None:
        return "an engine to close it: no job can start for it any more"
    if not beats:
        return f"its first sign of life; it started {_ago(start.at, now)} ago"
    last = max(beat.at for beat in beats)
    return f"its end; the last sign of life is {_ago(last, now)} old"


def _for_its_job(attempt: Attempt, seen: JobObservation | None) -> str:
    job_id = seen.job_id if seen is not None else None
    if attempt.submitted is not None:
        job_id = attempt.submitted.job_id
    if job_id is None:
        return "a job to show itself: sbatch has not answered, or not yet"
    if seen is None:
        return f"job {job_id} to start"
    state = seen.raw_state or seen.state.value
    if seen.state is not JobState.PENDING or not seen.reason:
        return f"job {job_id} to start, which is {state}"
    reason = explain(seen.reason)
    words = f": {reason.words}" if reason.words else ""
    return f"job {job_id} to start, which is {state} ({seen.reason}){words}"


def _ago(moment: datetime, now: datetime) -> str:
    return spell_duration(max(0.0, (now - moment).total_seconds()))
