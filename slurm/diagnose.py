"""Why an attempt ended: a table of rules over its evidence. Pure.

A rule looks for one thing. The first that finds it decides, so the order of the table says which
evidence is believed over which: what the job said of itself over what Slurm saw from outside, and
a person's wish over both. The rules themselves are in `slurm.diagnosis`, by witness.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from slurm.cluster import JobObservation, JobState
from slurm.diagnosis import job_rules, log_rules, slurm_rules
from slurm.diagnosis.facts import first_word, killed_by, last_line, memory_words, where, words
from slurm.diagnosis.job_rules import THE_LOOP
from slurm.diagnosis.surroundings import surroundings
from slurm.evidence import Evidence
from slurm.log_patterns import PEER_SIGNS, find_sign
from slurm.refusals import explain_refusal, said_by_sbatch
from slurm.tracebacks import root_of
from storage.records import Diagnosis, Kind

__all__ = ["MAX_LINES", "RULES", "THE_LOOP", "diagnose", "is_settled", "refusal"]

MAX_LINES = 16
"""Lines of evidence that are kept in the ledger; the first is the headline."""

Rule = Callable[[Evidence], Diagnosis | None]

RULES: tuple[Rule, ...] = (
    job_rules.done,
    job_rules.cancelled_by_a_person,
    job_rules.own_code,
    slurm_rules.state,
    slurm_rules.cancelled_from_outside,
    job_rules.resume_me,
    slurm_rules.unwritable_output,
    job_rules.peer_lost,
    log_rules.lost_peer,
    log_rules.signs,
    log_rules.bug_before_the_first_step,
    slurm_rules.dead_node,
    job_rules.waited_in_vain,
    job_rules.void,
    slurm_rules.gone,
)


def diagnose(evidence: Evidence) -> Diagnosis:
    """The diagnosis of the first rule that has one, with what else a person wants to see."""
    found = _cause(evidence)
    if found.kind is Kind.DONE:
        return found
    kept = words(*found.evidence, *surroundings(evidence))[:MAX_LINES]
    return replace(found, evidence=kept)


def is_settled(evidence: Evidence, *, settle_s: float = 40.0) -> bool:
    """Whether a diagnosis now would not be changed by what Slurm has yet to notice.

    A node that died is seen down only after a while, and accounting lags behind the queue.
    """
    if evidence.now - evidence.ended_at >= timedelta(seconds=settle_s):
        return True
    found = _cause(evidence)
    # The only node of a job that said its last word was there to say it.
    is_alone = len(evidence.nodes) == 1 and evidence.attempt.exit is not None
    if found.kind in _MAY_TURN_OUT and not found.culprit_nodes and not is_alone:
        return False
    if _says_little(evidence, found) and _lacks_accounting(evidence.job):
        return False
    return evidence.attempt.exit is not None or not _lacks_accounting(evidence.job)


def refusal(message: str) -> Diagnosis:
    """What it means that sbatch refused a job: a mistake in the spec, or the site for now."""
    specific = _ANY_POLICY.sub("", message)
    passing = find_sign(message, among=PEER_SIGNS) or _PASSING_REFUSAL.search(specific)
    kind = Kind.SITE if passing else Kind.CODE
    if not passing and (advice := explain_refusal(message)):
        headline = f"sbatch refused the job: {said_by_sbatch(message)}; {advice}"
        return Diagnosis(kind=kind, evidence=words(headline, message))
    return Diagnosis(kind=kind, evidence=words(f"sbatch refused the job: {message}"))


# Slurm says this beside every limit, passing or not; the line before it names the one that it was.
_ANY_POLICY = re.compile(r"Job violates accounting/QOS policy \([^)]*\)", re.IGNORECASE)
_PASSING_REFUSAL = re.compile(
    r"temporarily|unavailable|not responding|submit limit|Max\w*(Submit|Jobs)|in use|try again|"
    r"busy|required node not available|\bdown\b|drain|reserved",
    re.IGNORECASE,
)
_MAY_TURN_OUT = frozenset({Kind.NETWORK, Kind.HARDWARE, Kind.CASCADE, Kind.HANG})


def _cause(evidence: Evidence) -> Diagnosis:
    for rule in RULES:
        if (found := rule(evidence)) is not None:
            return found
    return _unknown(evidence)


def _says_little(evidence: Evidence, found: Diagnosis) -> bool:
    """Whether accounting may name the cause: an overrun of memory, or who cancelled the job."""
    if found.kind is Kind.UNKNOWN:
        return killed_by(evidence) is signal.SIGKILL
    if found.kind is not Kind.OPERATOR or evidence.attempt.cancel is not None:
        return False
    return evidence.job is not None and " by " not in evidence.job.raw_state


def _lacks_accounting(job: JobObservation | None) -> bool:
    return job is not None and job.state is JobState.ENDED and not job.exit_code


def _unknown(evidence: Evidence) -> Diagnosis:
    word, job = evidence.attempt.exit, evidence.job
    if word is not None:
        said = root_of(word.error) or f"left with {word.code}"
        headline = f"{where(word)}{said}"
    else:
        headline = f"{slurm_rules.seen_from_outside(job)}, and no exit record"
    number = killed_by(evidence)
    if number is not None and first_word(number.name) not in headline:
        headline = f"{headline[:300]}; killed by {number.name}"
    last = last_line(evidence.log_text) if word is None else ""
    return Diagnosis(
        kind=Kind.UNKNOWN,
        evidence=words(headline, last, _of_kill(evidence) if number is signal.SIGKILL else ""),
    )


def _of_kill(evidence: Evidence) -> str:
    """A kill has no sender. The kernel's is the likeliest, and it tells only the node's own log."""
    figures = memory_words(evidence)
    return (
        "nobody signs a SIGKILL: if the node's memory was short, its kernel log (dmesg) names the "
        "process" + (f"; {figures}" if figures else "")
    )
