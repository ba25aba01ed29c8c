"""What a person wants beside the cause: Slurm's words, our code, the nodes' states, last lines.

They are kept with the diagnosis, since logs are deleted and Slurm forgets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurm.cluster import JobObservation, JobState, StepRecord
from slurm.diagnosis.facts import (
    first_word,
    memory_words,
    node_words,
    silent_nodes,
    step_of,
    words,
)
from slurm.evidence import Evidence
from storage.records import Exit, ExitCode

_LOGS = 3
_LOG_LINES = 3
_LOG_LINE_CHARACTERS = 240
_MAX_NODES = 8
_FORMALITY = re.compile(r"headrace: (job \S+ on |leaving with )")
"""How the batch step begins and ends every job."""


def surroundings(evidence: Evidence) -> tuple[str, ...]:
    """Lines of evidence that say no cause, bounded in number and length."""
    return words(*_lines(evidence))


def _lines(evidence: Evidence) -> Iterator[str]:
    if evidence.job is not None:
        yield _job_words(evidence.job)
    yield _exit_words(evidence.attempt.exit)
    yield _step_words(evidence)
    ill = tuple(node for node in evidence.nodes if _is_odd(evidence, node))
    yield from node_words(evidence, ill[:_MAX_NODES])
    if silent := silent_nodes(evidence):
        yield f"heartbeats stopped first on {', '.join(silent[:_MAX_NODES])}"
    if figures := memory_words(evidence):
        yield f"memory: {figures}"
    yield from _last_lines(evidence)


def _job_words(job: JobObservation) -> str:
    verb = "ended" if job.state is JobState.ENDED else "was"
    said = [f"job {job.job_id or '?'} {verb} {job.raw_state or job.state}"]
    if job.exit_code:
        said.append(f"exit code {job.exit_code}")
    if job.derived_exit_code not in ("", "0:0", job.exit_code):
        said.append(f"worst step's {job.derived_exit_code}")
    if job.reason:
        said.append(f"reason {job.reason}")
    said += [_of_step(step) for step in job.steps if first_word(step.state) != "COMPLETED"]
    return ", ".join(said)


def _of_step(step: StepRecord) -> str:
    return f"step {step.name} {step.state} {step.exit_code}".strip()


def _exit_words(word: Exit | None) -> str:
    if word is None:
        return "the job left no exit record"
    name = f" ({ExitCode(word.code).name})" if word.code in set(ExitCode) else ""
    by = f" by rank {word.rank}" if word.rank is not None else ""
    by += f" of element {word.element}" if word.element is not None else ""
    on = f" on {word.node}" if word.node else ""
    return f"exit record: code {word.code}{name}{by}{on}"


def _step_words(evidence: Evidence) -> str:
    beats = evidence.attempt.heartbeats
    if not beats:
        return "no heartbeat was ever seen" if evidence.attempt.start is not None else ""
    last = max(step_of(beat) for beat in beats)
    return f"last step told: {last}" if last >= 0 else "no step was told"


def _is_odd(evidence: Evidence, node: str) -> bool:
    state = evidence.node_states.get(node)
    return state is not None and (not state.responds or bool(state.reason))


def _last_lines(evidence: Evidence) -> Iterator[str]:
    """What ranks said last, then srun, then the batch step."""
    for part in sorted(evidence.logs, key=lambda one: one.rank is None)[:_LOGS]:
        told = [line.strip() for line in part.text.splitlines() if _says_something(line)]
        for line in told[-_LOG_LINES:]:
            yield f"{part.name or 'log'}: {line[:_LOG_LINE_CHARACTERS]}"


def _says_something(line: str) -> bool:
    return bool(line.strip()) and not _FORMALITY.match(line)
