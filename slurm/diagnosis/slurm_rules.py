"""What Slurm says of a job and of its nodes, where the job itself has said nothing clearer."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from slurm.cluster import JobObservation, JobState
from slurm.diagnosis.facts import (
    absent_nodes,
    blamed_nodes,
    down_nodes,
    first_word,
    memory_words,
    node_words,
    words,
)
from slurm.evidence import Evidence
from storage.records import Diagnosis, ExitCode, Kind

_TIMED_OUT = 124


@dataclass(frozen=True)
class StateRow:
    """One row of Slurm's own verdicts: the state of the job or of its worst step."""

    states: frozenset[str]
    kind: Kind


_STATES = (
    StateRow(frozenset({"PREEMPTED"}), Kind.PREEMPTED),
    StateRow(frozenset({"OUT_OF_MEMORY"}), Kind.MEMORY),
    StateRow(frozenset({"NODE_FAIL", "BOOT_FAIL"}), Kind.HARDWARE),
    StateRow(frozenset({"TIMEOUT", "DEADLINE"}), Kind.TIME),
)


def state(evidence: Evidence) -> Diagnosis | None:
    """What Slurm itself says of the job, or of one of its steps where it says less of the job."""
    job = evidence.job
    if job is None:
        return None
    said = [(first_word(job.raw_state), "the job")]
    said += [(first_word(one.state), f"step {one.name}") for one in job.steps]
    for row in _STATES:
        for raw_state, what in said:
            if raw_state in row.states and not (row.kind is Kind.TIME and _had_failed(evidence)):
                return _verdict(evidence, row.kind, f"{what} ended {raw_state}")
    codes = {job.exit_code, job.derived_exit_code, *(step.exit_code for step in job.steps)}
    if "0:125" in codes:
        return _verdict(evidence, Kind.MEMORY, "Slurm: exit code 0:125")
    return None


def _verdict(evidence: Evidence, kind: Kind, headline: str) -> Diagnosis:
    if kind is Kind.MEMORY:
        figures = memory_words(evidence) or "Slurm does not say how much it asked for or used"
        return Diagnosis(kind=kind, evidence=words(f"{headline}; {figures}"))
    culprits: tuple[str, ...] = ()
    if kind is Kind.HARDWARE:
        culprits = absent_nodes(evidence) or blamed_nodes(evidence)
    return Diagnosis(
        kind=kind,
        culprit_nodes=culprits,
        evidence=words(headline, *node_words(evidence, culprits)),
    )


def _had_failed(evidence: Evidence) -> bool:
    """Whether it fell over something first, and only lingered until its time was up."""
    word = evidence.attempt.exit
    told_to_end = {ExitCode.RESUME, _TIMED_OUT, 128 + signal.SIGTERM, 128 + signal.SIGKILL}
    return word is not None and word.code not in told_to_end


def cancelled_from_outside(evidence: Evidence) -> Diagnosis | None:
    job = evidence.job
    if job is None or first_word(job.raw_state) != "CANCELLED":
        return None
    if evidence.attempt.cancel is not None:
        return None
    by = re.search(r"by (\d+)", job.raw_state)
    is_owner = by is None or int(by[1]) == evidence.uid
    who = "its owner" if by is not None else "somebody whom Slurm does not name"
    if by is not None and not is_owner:
        who = f"user id {by[1]}"
    return Diagnosis(
        kind=Kind.OPERATOR if is_owner else Kind.SITE,
        evidence=words(f"the job ended {job.raw_state}; cancelled by {who}, not by Headrace"),
    )


_LAUNCH_FAILED = re.compile(r"launch[ _]failed[ _]requeued[ _]held", re.IGNORECASE)


def unwritable_output(evidence: Evidence) -> Diagnosis | None:
    """The node could not open the job's output file: 0:53, or held after a launch that failed."""
    job = evidence.job
    if job is None or evidence.log_text:
        return None
    if job.exit_code == "0:53":
        said = "Slurm: exit code 0:53 and no log"
    elif _LAUNCH_FAILED.search(job.reason):
        said = f"Slurm: {job.reason}, and no log"
    else:
        return None
    return Diagnosis(
        kind=Kind.OUTPUT,
        culprit_nodes=evidence.nodes[:1],
        evidence=words(f"{said}; the job's folder cannot be written there"),
    )


def dead_node(evidence: Evidence) -> Diagnosis | None:
    """Nothing was said, and a node of the job is down."""
    down = down_nodes(evidence)
    if not down:
        return None
    return Diagnosis(
        kind=Kind.HARDWARE, culprit_nodes=down, evidence=words(*node_words(evidence, down))
    )


def gone(evidence: Evidence) -> Diagnosis | None:
    job = evidence.job
    if evidence.attempt.exit is not None or job is None or job.state is not JobState.ABSENT:
        return None
    said = f"; accounting says {job.raw_state}" if job.raw_state else ""
    return Diagnosis(kind=Kind.LOST, evidence=words(f"gone from the queue without a word{said}"))


def seen_from_outside(job: JobObservation | None) -> str:
    """The job's end in the cluster's words. They name no Slurm: a local job ends in them, too."""
    if job is None:
        return "the cluster says nothing of a job"
    verb = "ended" if job.state is JobState.ENDED else "is"
    return f"the job {verb} {job.raw_state or job.state} {job.exit_code}".strip()
