"""What evidence comes down to, asked by several rules: nodes, steps, codes, words. Pure."""

from __future__ import annotations

import re
import signal
from datetime import timedelta

from slurm.cluster import JobObservation
from slurm.evidence import Evidence
from slurm.log_patterns import Sign, find_sign
from storage.records import Exit, ExitCode, Heartbeat

LINE_CHARACTERS = 500
SILENT_HEARTBEATS = 3
_STARTING = timedelta(minutes=10)


def testimony(evidence: Evidence) -> str:
    """What is read for signs: the job's own last word where there is one, else its logs."""
    word = evidence.attempt.exit
    return word.error if word is not None and word.error else evidence.log_text


def down_nodes(evidence: Evidence) -> tuple[str, ...]:
    """The job's nodes that Slurm calls down or silent, or took out for what is wrong with them."""
    return tuple(node for node in evidence.nodes if _is_down(evidence, node))


def _is_down(evidence: Evidence, node: str) -> bool:
    state = evidence.node_states.get(node)
    if state is None:
        return False
    ill = find_sign(state.reason, among=frozenset({Sign.HARDWARE}))
    return not state.responds or ill is not None


def silent_nodes(evidence: Evidence) -> tuple[str, ...]:
    """The job's nodes whose heartbeat stopped clearly before the last one of the others."""
    beats = [beat for beat in evidence.attempt.heartbeats if beat.node in evidence.nodes]
    last = max((beat.at for beat in beats), default=evidence.now)
    limit = timedelta(seconds=SILENT_HEARTBEATS * evidence.heartbeat_s)
    return tuple(beat.node for beat in beats if last - beat.at >= limit)


def absent_nodes(evidence: Evidence) -> tuple[str, ...]:
    return down_nodes(evidence) or silent_nodes(evidence)


def blamed_nodes(evidence: Evidence) -> tuple[str, ...]:
    """Those of its own nodes that the job itself saw fail."""
    word = evidence.attempt.exit
    if word is None:
        return ()
    return tuple(node for node in evidence.nodes if node in word.blamed_nodes)


def lagging_nodes(evidence: Evidence) -> tuple[str, ...]:
    """The one node that is a step behind the others, where there is one."""
    beats = [beat for beat in evidence.attempt.heartbeats if beat.node in evidence.nodes]
    steps = {beat.node: beat.step for beat in beats if beat.step is not None}
    behind = tuple(node for node, step in steps.items() if step < max(steps.values()))
    return behind if len(behind) == 1 else ()


def stepped(evidence: Evidence) -> bool:
    """Whether the attempt did a step of its own, as far as its heartbeats say.

    A job that tells of no step at all may have done many once it has run for some time.
    """
    attempt = evidence.attempt
    source = attempt.resume.source if attempt.resume is not None else None
    if any(beat.step is not None for beat in attempt.heartbeats):
        begin = source.step if source is not None else 0
        return any(step_of(beat) > begin for beat in attempt.heartbeats)
    begun = attempt.start.at if attempt.start is not None else attempt.intent.created_at
    return bool(attempt.heartbeats) and evidence.ended_at - begun > _STARTING


def step_of(beat: Heartbeat) -> int:
    return -1 if beat.step is None else beat.step


def our_code(evidence: Evidence) -> int | None:
    """How the job left: as its exit record says, else as Slurm does of it or of its steps."""
    word, job = evidence.attempt.exit, evidence.job
    if word is not None:
        return word.code
    codes = slurm_codes(job)
    ours = frozenset(ExitCode) - {ExitCode.DONE, ExitCode.CRASHED}
    return next((code for code in codes if code in ours), codes[0] if codes else None)


def slurm_codes(job: JobObservation | None) -> list[int]:
    """The exit codes that Slurm knows, of the job first, of those that no signal ended."""
    if job is None:
        return []
    said = [job.exit_code, job.derived_exit_code, *(step.exit_code for step in job.steps)]
    return [int(code.split(":")[0]) for code in said if re.fullmatch(r"\d+:0", code)]


def killed_by(evidence: Evidence) -> signal.Signals | None:
    """The signal that ended the job's first failed process, or the command that it ran."""
    word, job = evidence.attempt.exit, evidence.job
    if word is not None:
        named = _ENDED_BY.search(word.error.partition("\n")[0])
        if named is not None:
            return _SIGNALS.get(named[1])
        return next((one for one in signal.Signals if one == word.code - 128), None)
    found = re.fullmatch(r"0:(\d+)", job.exit_code) if job is not None else None
    return next((one for one in signal.Signals if found and one == int(found[1])), None)


_ENDED_BY = re.compile(r"\b(?:left|ended) with (SIG[A-Z]+)$")
_SIGNALS = {one.name: one for one in signal.Signals}


def memory_words(evidence: Evidence) -> str:
    """How much memory was asked for and used, as far as Slurm knows; "" where it does not."""
    job = evidence.job
    if job is None:
        return ""
    used = [(size, one) for one in job.steps if (size := _bytes(one.max_rss)) is not None]
    words = [f"asked for {job.memory_asked} of memory"] if job.memory_asked else []
    if used:
        size, step = max(used, key=lambda pair: pair[0])
        words.append(
            f"a task of step {step.name} held {_spell_bytes(size)} when Slurm looked, which it "
            "does every half minute or so"
        )
    return "; ".join(words)


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _bytes(size: str) -> float | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)[Bcn]?", size.strip())
    return None if found is None or float(found[1]) == 0 else float(found[1]) * _UNITS[found[2]]


def _spell_bytes(size: float) -> str:
    for unit in ("T", "G", "M"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}iB"
    return f"{size / 2**10:.0f} KiB"


def node_words(evidence: Evidence, names: tuple[str, ...]) -> tuple[str, ...]:
    states = [evidence.node_states[name] for name in names if name in evidence.node_states]
    return tuple(f"node {one.name}: {one.raw_state} {one.reason}".strip() for one in states)


def where(word: Exit | None) -> str:
    if word is None or word.rank is None:
        return ""
    element = "" if word.element is None else f"element {word.element}, "
    return f"{element}rank {word.rank} on {word.node}: "


def first_word(state: str) -> str:
    return state.split(maxsplit=1)[0] if state.strip() else ""


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def told_by_us(log_text: str) -> str:
    """The last line that Headrace itself wrote to a log."""
    own = [line for line in log_text.splitlines() if line.startswith("headrace: ")]
    told = [line for line in own if "leaving with" not in line]
    return told[-1].removeprefix("headrace: ") if told else last_line(log_text)


def words(*lines: str) -> tuple[str, ...]:
    """Lines of evidence, as long as a record holds them, each once."""
    cut = (_cut(line.strip()) for line in lines)
    return tuple(dict.fromkeys(line for line in cut if line))


def _cut(line: str) -> str:
    return line if len(line) <= LINE_CHARACTERS else f"{line[: LINE_CHARACTERS - 1]}…"
