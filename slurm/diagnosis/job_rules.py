"""What the job says of itself: its exit code, its exit record, and what people wrote beside it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import replace

from slurm.diagnosis.facts import (
    blamed_nodes,
    down_nodes,
    lagging_nodes,
    last_line,
    memory_words,
    node_words,
    our_code,
    silent_nodes,
    told_by_us,
    where,
    words,
)
from slurm.diagnosis.log_rules import earliest_error
from slurm.evidence import Evidence
from storage.records import Diagnosis, ExitCode, Kind

THE_LOOP = "headrace"
"""`Cancel.who` of a job that was over anyway; any other name is a person's."""


def done(evidence: Evidence) -> Diagnosis | None:
    word = evidence.attempt.exit
    if word is None or word.code != ExitCode.DONE:
        return None
    return Diagnosis(kind=Kind.DONE)


def cancelled_by_a_person(evidence: Evidence) -> Diagnosis | None:
    cancel = evidence.attempt.cancel
    if cancel is None or cancel.who == THE_LOOP:
        return None
    return Diagnosis(kind=Kind.OPERATOR, evidence=words(f"cancelled by {cancel.who}: {cancel.why}"))


IN_VAIN = "it waits in vain: "
"""How `Cancel.why` begins for a job that the loop ends before Slurm would ever start it."""

_LAUNCH_FAILED = re.compile(r"launch[ _]fail\w*.*held", re.IGNORECASE)


def in_vain(reason: str) -> Diagnosis:
    """What it means that a job waits for what no waiting mends, in Slurm's words and ours."""
    kind = Kind.OUTPUT if _LAUNCH_FAILED.search(reason) else Kind.CODE
    return Diagnosis(kind=kind, evidence=words(f"the job would wait for ever: {reason}"))


def waited_in_vain(evidence: Evidence) -> Diagnosis | None:
    """A job that the loop ended for that, by whichever engine: all of them say the same of it."""
    start, cancel = evidence.attempt.start, evidence.attempt.cancel
    if start is None or not start.is_void or cancel is None or cancel.who != THE_LOOP:
        return None
    if not cancel.why.startswith(IN_VAIN):
        return None
    return in_vain(cancel.why.removeprefix(IN_VAIN))


def void(evidence: Evidence) -> Diagnosis | None:
    start = evidence.attempt.start
    if start is None or not start.is_void:
        return None
    return Diagnosis(kind=Kind.LOST, evidence=("no job of this attempt was ever seen",))


_KIND_OF_CODE: Mapping[int, Kind] = {
    ExitCode.DIVERGED: Kind.NUMERIC,
    ExitCode.BAD_CONFIG: Kind.CODE,
    ExitCode.BAD_DATA: Kind.DATA,
    ExitCode.HANG: Kind.HANG,
    ExitCode.OUT_OF_MEMORY: Kind.MEMORY,
    ExitCode.FENCED: Kind.FENCED,
    ExitCode.STORAGE: Kind.STORAGE,
    # No attempt can do better: somebody has to look at the checkpoints or at the model.
    ExitCode.NO_CHECKPOINT: Kind.DATA,
}


def own_code(evidence: Evidence) -> Diagnosis | None:
    """A code of ours, in the exit record or, where none was written, in Slurm's exit codes."""
    code = our_code(evidence)
    if code is None or code not in _KIND_OF_CODE:
        return None
    word = evidence.attempt.exit
    said = last_line(word.error) if word is not None else told_by_us(evidence.log_text)
    kind = _KIND_OF_CODE[code]
    headline = f"{where(word)}{said or ExitCode(code).name}"
    if kind is Kind.MEMORY and (figures := memory_words(evidence)):
        headline = f"{headline[:300]}; {figures}"
    found = Diagnosis(kind=kind, evidence=words(headline))
    return _blame_for_hang(evidence, found) if kind is Kind.HANG else found


def _blame_for_hang(evidence: Evidence, found: Diagnosis) -> Diagnosis:
    """Waiting for a node that is gone is no hang: heartbeats go on while a step hangs."""
    if down := down_nodes(evidence):
        said = words(*found.evidence, *node_words(evidence, down))
        return Diagnosis(kind=Kind.HARDWARE, culprit_nodes=down, evidence=said)
    if silent := silent_nodes(evidence):
        said = words(*found.evidence, f"no heartbeat any more from {', '.join(silent)}")
        return Diagnosis(kind=Kind.NETWORK, culprit_nodes=silent, evidence=said)
    return replace(found, culprit_nodes=blamed_nodes(evidence) or lagging_nodes(evidence))


def resume_me(evidence: Evidence) -> Diagnosis | None:
    if our_code(evidence) != ExitCode.RESUME:
        return None
    word = evidence.attempt.exit
    said = last_line(word.error) if word is not None else ""
    by_term = _BEFORE_ITS_TIME if f"by {signal.SIGTERM.name}" in said else ""
    return Diagnosis(kind=Kind.TIME, evidence=words(said or "left to be resumed", by_term))


_BEFORE_ITS_TIME = (
    "a time limit sends USR2 first: it was preempted and left within the grace, or somebody asked"
)


def peer_lost(evidence: Evidence) -> Diagnosis | None:
    """Ranks that saw a peer fall silent and left: the peer is to blame, or what ended it.

    Slurm may take minutes to call a dead node down. Nothing is waited for: the peer is named.
    """
    if our_code(evidence) != ExitCode.PEER_LOST:
        return None
    word = evidence.attempt.exit
    said = last_line(word.error) if word is not None else told_by_us(evidence.log_text)
    # Who tells its own loss has named itself already.
    speaker = "" if said.startswith(where(word).removesuffix(": ")) else where(word)
    headline = f"{speaker}{said or 'a peer fell silent'}"
    if down := down_nodes(evidence):
        return Diagnosis(
            kind=Kind.HARDWARE,
            culprit_nodes=down,
            evidence=words(headline, *node_words(evidence, down)),
        )
    culprits = blamed_nodes(evidence) or silent_nodes(evidence)
    if (root := earliest_error(evidence, cut_off=culprits)) is not None:
        return replace(root, evidence=words(*root.evidence, headline))
    return Diagnosis(kind=Kind.NETWORK, culprit_nodes=culprits, evidence=words(headline))
