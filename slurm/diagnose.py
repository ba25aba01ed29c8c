"""Why an attempt ended: a table of rules over its evidence. Pure.

A rule looks for one thing. The first that finds it decides, so the order of the table says which
evidence is believed over which: what the job said of itself over what Slurm saw from outside, and
a person's wish over both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from slurm.cluster import JobObservation, JobState
from slurm.evidence import Evidence
from slurm.log_patterns import PEER_SIGNS, Sign, find_sign
from slurm.tracebacks import TRACEBACK, root_of
from storage.records import Diagnosis, Exit, ExitCode, Heartbeat, Kind

THE_LOOP = "headrace"
"""`Cancel.who` of a job that was over anyway; any other name is a person's."""

SILENT_HEARTBEATS = 3

Rule = Callable[[Evidence], Diagnosis | None]


def diagnose(evidence: Evidence) -> Diagnosis:
    """The diagnosis of the first rule that has one."""
    for rule in RULES:
        if (found := rule(evidence)) is not None:
            return found
    return _unknown(evidence)


def is_settled(evidence: Evidence, *, settle_s: float = 40.0) -> bool:
    """Whether a diagnosis now would not be changed by what Slurm has yet to notice.

    A node that died is seen down only after a while, and accounting lags behind the queue.
    """
    if evidence.now - evidence.ended_at >= timedelta(seconds=settle_s):
        return True
    found = diagnose(evidence)
    if found.kind in _MAY_TURN_OUT and not found.culprit_nodes:
        return False
    return evidence.attempt.exit is not None or not _lacks_accounting(evidence.job)


_MAY_TURN_OUT = frozenset({Kind.NETWORK, Kind.HARDWARE, Kind.CASCADE, Kind.HANG})


def _lacks_accounting(job: JobObservation | None) -> bool:
    return job is not None and job.state is JobState.ENDED and not job.exit_code


def refusal(message: str) -> Diagnosis:
    """What it means that sbatch refused a job: a mistake in the spec, or the site for now."""
    passing = find_sign(message, among=PEER_SIGNS) or _PASSING_REFUSAL.search(message)
    kind = Kind.SITE if passing else Kind.CODE
    return Diagnosis(kind=kind, evidence=(f"sbatch refused the job: {message}",))


_PASSING_REFUSAL = re.compile(
    r"temporarily|unavailable|not responding|submit limit|Max\w*(Submit|Jobs)|in use|try again|"
    r"busy|required node not available|\bdown\b|drain|reserved",
    re.IGNORECASE,
)


def _done(evidence: Evidence) -> Diagnosis | None:
    word = evidence.attempt.exit
    if word is None or word.code != ExitCode.DONE:
        return None
    return Diagnosis(kind=Kind.DONE)


def _cancelled_by_a_person(evidence: Evidence) -> Diagnosis | None:
    cancel = evidence.attempt.cancel
    if cancel is None or cancel.who == THE_LOOP:
        return None
    return Diagnosis(kind=Kind.OPERATOR, evidence=(f"cancelled by {cancel.who}: {cancel.why}",))


def _void(evidence: Evidence) -> Diagnosis | None:
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


def _own_code(evidence: Evidence) -> Diagnosis | None:
    """A code of ours, in the exit record or, where none was written, in Slurm's exit code."""
    word = evidence.attempt.exit
    code = word.code if word is not None else _slurm_code(evidence.job)
    if code is None or code not in _KIND_OF_CODE:
        return None
    said = _last_line(word.error) if word is not None else _told(evidence.log_tail)
    found = Diagnosis(
        kind=_KIND_OF_CODE[code],
        evidence=_words(f"{_where(word)}{said or ExitCode(code).name}"),
    )
    return _blame_for_hang(evidence, found) if found.kind is Kind.HANG else found


def _blame_for_hang(evidence: Evidence, found: Diagnosis) -> Diagnosis:
    """Waiting for a node that is gone is no hang: heartbeats go on while a step hangs."""
    if down := _down_nodes(evidence):
        words = (*found.evidence, *_node_words(evidence, down))
        return Diagnosis(kind=Kind.HARDWARE, culprit_nodes=down, evidence=words)
    if silent := _silent_nodes(evidence):
        words = (*found.evidence, f"no heartbeat any more from {', '.join(silent)}")
        return Diagnosis(kind=Kind.NETWORK, culprit_nodes=silent, evidence=words)
    return replace(found, culprit_nodes=_lagging_nodes(evidence))


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


def _slurm_state(evidence: Evidence) -> Diagnosis | None:
    """What Slurm itself says of the job, or of one of its steps where it says less of the job."""
    job = evidence.job
    if job is None:
        return None
    said = [(_word(job.raw_state), "job"), *((_word(s.state), s.name) for s in job.steps)]
    for row in _STATES:
        for state, what in said:
            if state in row.states:
                culprits = _absent_nodes(evidence) if row.kind is Kind.HARDWARE else ()
                subject = "the job" if what == "job" else f"step {what}"
                return Diagnosis(
                    kind=row.kind,
                    culprit_nodes=culprits,
                    evidence=_words(f"{subject} ended {state}", *_node_words(evidence, culprits)),
                )
    if "0:125" in {job.exit_code, *(step.exit_code for step in job.steps)}:
        return Diagnosis(kind=Kind.MEMORY, evidence=("Slurm: exit code 0:125",))
    return None


def _resume_me(evidence: Evidence) -> Diagnosis | None:
    word = evidence.attempt.exit
    code = word.code if word is not None else _slurm_code(evidence.job)
    if code != ExitCode.RESUME:
        return None
    said = _last_line(word.error) if word is not None else ""
    return Diagnosis(kind=Kind.TIME, evidence=_words(said or "left to be resumed"))


def _cancelled_from_outside(evidence: Evidence) -> Diagnosis | None:
    job = evidence.job
    if job is None or _word(job.raw_state) != "CANCELLED" or evidence.attempt.cancel is not None:
        return None
    by = re.search(r"by (\d+)", job.raw_state)
    is_owner = by is None or int(by[1]) == evidence.uid
    who = "its owner" if is_owner else f"user id {by[1] if by else '?'}"
    return Diagnosis(
        kind=Kind.OPERATOR if is_owner else Kind.SITE,
        evidence=(f"the job ended {job.raw_state}; cancelled by {who}, not by Headrace",),
    )


def _unwritable_output(evidence: Evidence) -> Diagnosis | None:
    """Slurm's 0:53 without a log: the node could not open the job's output file."""
    job = evidence.job
    if job is None or job.exit_code != "0:53" or evidence.log_tail:
        return None
    return Diagnosis(
        kind=Kind.OUTPUT,
        culprit_nodes=job.nodes[:1],
        evidence=("Slurm: exit code 0:53 and no log; the job's folder cannot be written there",),
    )


def _lost_peer(evidence: Evidence) -> Diagnosis | None:
    """Ranks that fell over a peer's silence: the node that went is to blame, not they."""
    found = find_sign(_testimony(evidence), among=PEER_SIGNS)
    if found is None:
        return None
    absent = _absent_nodes(evidence)
    if not absent and (root := _sign_in(evidence, evidence.log_tail)) is not None:
        return root
    words = _words(f"{_where(evidence.attempt.exit)}{found.line}", *_node_words(evidence, absent))
    if any(name in absent for name in _down_nodes(evidence)):
        return Diagnosis(kind=Kind.HARDWARE, culprit_nodes=absent, evidence=words)
    kind = Kind.CASCADE if found.sign is Sign.PEER_TIMEOUT and not absent else Kind.NETWORK
    return Diagnosis(kind=kind, culprit_nodes=absent, evidence=words)


_KIND_OF_SIGN = {
    Sign.OUT_OF_MEMORY: Kind.MEMORY,
    Sign.STORAGE: Kind.STORAGE,
    Sign.HARDWARE: Kind.HARDWARE,
}


def _signs(evidence: Evidence) -> Diagnosis | None:
    return _sign_in(evidence, _testimony(evidence))


def _sign_in(evidence: Evidence, text: str) -> Diagnosis | None:
    word = evidence.attempt.exit
    found = find_sign(text, among=frozenset(_KIND_OF_SIGN))
    if found is None:
        return None
    kind = _KIND_OF_SIGN[found.sign]
    culprits = (word.node,) if kind is Kind.HARDWARE and word is not None else ()
    return Diagnosis(
        kind=kind, culprit_nodes=culprits, evidence=_words(f"{_where(word)}{found.line}")
    )


_BUG = re.compile(
    r"^(?:[\w.]*\.)?(ArithmeticError|AssertionError|AttributeError|ImportError|IndentationError|"
    r"IndexError|KeyError|LookupError|ModuleNotFoundError|NameError|NotImplementedError|"
    r"SyntaxError|TypeError|UnboundLocalError|ValidationError|ValueError|ZeroDivisionError)\b"
)
_SHAPE = re.compile(
    r"size mismatch|shapes? .*(cannot|mismatch|incompatible)|mat1 and mat2|must match the size|"
    r"expected .* dimension",
    re.IGNORECASE,
)


def _bug_before_the_first_step(evidence: Evidence) -> Diagnosis | None:
    """A traceback of a kind that no other node and no other hour would change."""
    word = evidence.attempt.exit
    if word is None or TRACEBACK not in word.error:
        return None
    root = root_of(word.error)
    if _stepped(evidence) or not (_BUG.match(root) or _SHAPE.search(root)):
        return None
    return Diagnosis(kind=Kind.CODE, evidence=_words(f"{_where(word)}{root}"))


def _dead_node(evidence: Evidence) -> Diagnosis | None:
    """Nothing was said, and a node of the job is down."""
    down = _down_nodes(evidence)
    if not down:
        return None
    return Diagnosis(kind=Kind.HARDWARE, culprit_nodes=down, evidence=_node_words(evidence, down))


def _gone(evidence: Evidence) -> Diagnosis | None:
    job = evidence.job
    if evidence.attempt.exit is not None or job is None or job.state is not JobState.ABSENT:
        return None
    said = f"; accounting says {job.raw_state}" if job.raw_state else ""
    return Diagnosis(kind=Kind.LOST, evidence=(f"gone from the queue without a word{said}",))


RULES: tuple[Rule, ...] = (
    _done,
    _cancelled_by_a_person,
    _own_code,
    _slurm_state,
    _cancelled_from_outside,
    _resume_me,
    _unwritable_output,
    _lost_peer,
    _signs,
    _bug_before_the_first_step,
    _dead_node,
    _void,
    _gone,
)


def _unknown(evidence: Evidence) -> Diagnosis:
    word, job = evidence.attempt.exit, evidence.job
    if word is not None:
        said = root_of(word.error) or f"left with {word.code}"
        return Diagnosis(kind=Kind.UNKNOWN, evidence=_words(f"{_where(word)}{said}"))
    last = _last_line(evidence.log_tail)
    said = f"{_seen_from_outside(job)}, and no exit record"
    return Diagnosis(kind=Kind.UNKNOWN, evidence=_words(said, last))


def _seen_from_outside(job: JobObservation | None) -> str:
    """The job's end in the cluster's words. They name no Slurm: a local job ends in them, too."""
    if job is None:
        return "no job"
    verb = "ended" if job.state is JobState.ENDED else "is"
    return f"the job {verb} {job.raw_state or job.state} {job.exit_code}".strip()


def _testimony(evidence: Evidence) -> str:
    """What is read for signs: the job's own last word where there is one, else its logs."""
    word = evidence.attempt.exit
    return word.error if word is not None and word.error else evidence.log_tail


def _down_nodes(evidence: Evidence) -> tuple[str, ...]:
    states = evidence.node_states
    return tuple(n for n in evidence.nodes if n in states and not states[n].responds)


def _absent_nodes(evidence: Evidence) -> tuple[str, ...]:
    return _down_nodes(evidence) or _silent_nodes(evidence)


def _silent_nodes(evidence: Evidence) -> tuple[str, ...]:
    """Nodes whose heartbeat stopped clearly before the last one of the others."""
    beats = evidence.attempt.heartbeats
    last = max((beat.at for beat in beats), default=evidence.now)
    limit = timedelta(seconds=SILENT_HEARTBEATS * evidence.heartbeat_s)
    return tuple(beat.node for beat in beats if last - beat.at >= limit)


def _lagging_nodes(evidence: Evidence) -> tuple[str, ...]:
    """The one node that is a step behind the others, where there is one."""
    steps = {beat.node: beat.step for beat in evidence.attempt.heartbeats if beat.step is not None}
    behind = tuple(node for node, step in steps.items() if step < max(steps.values()))
    return behind if len(behind) == 1 else ()


def _stepped(evidence: Evidence) -> bool:
    """Whether the attempt did a step of its own, as far as its heartbeats say."""
    resume = evidence.attempt.resume
    begin = resume.source.step if resume is not None and resume.source is not None else 0
    return any(_step(beat) > begin for beat in evidence.attempt.heartbeats)


def _step(beat: Heartbeat) -> int:
    return -1 if beat.step is None else beat.step


def _node_words(evidence: Evidence, names: tuple[str, ...]) -> tuple[str, ...]:
    states = [evidence.node_states[name] for name in names if name in evidence.node_states]
    return tuple(f"node {one.name}: {one.raw_state} {one.reason}".strip() for one in states)


def _where(word: Exit | None) -> str:
    if word is None or word.rank is None:
        return ""
    return f"rank {word.rank} on {word.node}: "


def _slurm_code(job: JobObservation | None) -> int | None:
    if job is None or not re.fullmatch(r"\d+:0", job.exit_code):
        return None
    return int(job.exit_code.split(":")[0])


def _word(state: str) -> str:
    return state.split(maxsplit=1)[0] if state.strip() else ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _told(log_tail: str) -> str:
    """The last line that Headrace itself wrote to a log."""
    own = [line for line in log_tail.splitlines() if line.startswith("headrace: ")]
    told = [line for line in own if "leaving with" not in line]
    return told[-1].removeprefix("headrace: ") if told else _last_line(log_tail)


def _words(*lines: str) -> tuple[str, ...]:
    return tuple(line[:500] for line in lines if line)
