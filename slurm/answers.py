"""Which of Slurm's commands are asked, and what Slurm 22.05 and later print in answer.

An answer that cannot be read is an error; it never becomes a statement about a job.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from slurm.cluster import JobObservation, JobState, NodeState, StepRecord
from storage.errors import SlurmError

_ALIVE = frozenset(
    {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
)
_WAITING = frozenset(
    {
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    }
)
_OVER = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)


def job_state(raw_state: str) -> JobState:
    """What Slurm's word for a state (`CANCELLED by 0`) means; an unknown word means nothing."""
    word = raw_state.split(maxsplit=1)[0].rstrip("+") if raw_state.strip() else ""
    if word in _ALIVE:
        return JobState.RUNNING
    if word in _WAITING:
        return JobState.PENDING
    return JobState.ENDED if word in _OVER else JobState.UNKNOWN


def queue_command(*, uid: int) -> list[str]:
    return ["squeue", "--noheader", "--states=all", f"--user={uid}", "--format=%i|%T|%N|%r|%j"]


def parse_queue(text: str) -> dict[str, JobObservation]:
    """The jobs that `queue_command` prints, by job name."""
    found: dict[str, JobObservation] = {}
    for line in text.splitlines():
        job_id, state, nodes, reason, name = _split(line, 5, command="squeue")
        found[name] = JobObservation(
            token=name,
            state=job_state(state),
            job_id=job_id,
            raw_state=state,
            reason="" if reason == "None" else reason,
            nodes=expand_nodes(nodes),
        )
    return found


def accounting_command(*, uid: int, tokens: Sequence[str], days: int = 14) -> list[str]:
    return [
        "sacct",
        "--noheader",
        "--parsable2",
        "--duplicates",
        f"--user={uid}",
        f"--name={','.join(tokens)}",
        f"--starttime=now-{days}days",
        "--format=JobID,State,ExitCode,NodeList,JobName",
    ]


def parse_accounting(text: str) -> dict[str, JobObservation]:
    """The newest record of each job that `accounting_command` prints, with its steps, by name."""
    found: dict[str, JobObservation] = {}
    current: str | None = None
    for line in text.splitlines():
        job_id, state, exit_code, nodes, name = _split(line, 5, command="sacct")
        if "." not in job_id:
            current = name
            found[name] = JobObservation(
                token=name,
                state=job_state(state),
                job_id=job_id,
                raw_state=state,
                exit_code=exit_code,
                nodes=expand_nodes(nodes),
            )
        elif current is not None:
            job = found[current]
            step = StepRecord(name=job_id.split(".", 1)[1], state=state, exit_code=exit_code)
            found[current] = replace(job, steps=(*job.steps, step))
    return found


def nodes_command(*, partition: str | None) -> list[str]:
    which = "--all" if partition is None else f"--partition={partition}"
    return ["sinfo", "--noheader", "--Node", which, "--format=%P|%N|%T|%E"]


def parse_nodes(text: str, *, partition: str | None) -> tuple[NodeState, ...]:
    """The nodes that `nodes_command` prints; without a partition, those of the default one."""
    found: dict[str, NodeState] = {}
    for line in text.splitlines():
        where, name, state, reason = _split(line, 4, command="sinfo")
        if where.endswith("*") if partition is None else where.rstrip("*") == partition:
            found[name] = _node(name, state, reason)
    return tuple(found.values())


_NODE_STATE = re.compile(r"(?P<base>[a-z_]+)(?P<flags>[^a-z_]*)")


def _node(name: str, state: str, reason: str) -> NodeState:
    match = _NODE_STATE.match(state.lower())
    base, flags = (match["base"], match["flags"]) if match else ("", "")
    responds = bool(base) and "*" not in flags and base not in {"down", "unknown", "error"}
    return NodeState(
        name=name,
        raw_state=state,
        responds=responds,
        idle=responds and base in {"idle", "planned"} and not set(flags) & set("$@^!%"),
        reason="" if reason == "none" else reason,
    )


def parse_cluster_name(config: str) -> str:
    """The cluster's name in the output of `scontrol show config`."""
    match = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE)
    if match is None:
        raise SlurmError("`scontrol show config` names no ClusterName; is this Slurm?")
    return match[1]


def expand_nodes(text: str) -> tuple[str, ...]:
    """The names in Slurm's short form: `n[1-3,07],gpu5` is n1, n2, n3, n07 and gpu5."""
    if text.strip() in {"", "(null)", "None assigned", "N/A"}:
        return ()
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text.strip()):
        names.extend(_expand(part))
    return tuple(names)


def _expand(part: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", part)
    if match is None:
        return [part]
    before, after = part[: match.start()], _expand(part[match.end() :])
    return [f"{before}{number}{rest}" for number in _numbers(match[1]) for rest in after]


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        low, dash, high = item.partition("-")
        if not dash:
            numbers.append(low)
        elif low.isdigit() and high.isdigit():
            numbers.extend(f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1))
        else:
            raise SlurmError(f"cannot read the range {item!r} in a list of nodes")
    return numbers


def _split(line: str, fields: int, *, command: str) -> list[str]:
    parts = line.strip().split("|", fields - 1)
    if len(parts) != fields:
        raise SlurmError(f"cannot read {command}'s line {line!r}: expected {fields} fields")
    return parts
