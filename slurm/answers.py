"""Which of Slurm's commands are asked, and what Slurm 22.05 and later print in answer.

An answer that cannot be read is an error; it never becomes a statement about a job.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
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
    """All jobs of a user that the controller still knows, those of hidden partitions included.

    What waits of an array is one line, whatever the number of its elements.
    """
    return [
        "squeue",
        "--noheader",
        "--all",
        "--states=all",
        f"--user={uid}",
        "--format=%i|%T|%N|%r|%j",
    ]


def parse_queue(text: str, *, names: Container[str] | None = None) -> dict[str, JobObservation]:
    """The jobs that `queue_command` prints, by job name; all of them, or those that are `names`.

    Of several jobs of a name the one that lives is told, and of those the newest. An array is one
    job: it runs while an element runs, waits while one waits, and has ended when all have.
    """
    parts: dict[str, list[JobObservation]] = {}
    for line in text.splitlines():
        job_id, state, nodes, reason, name = _split(line, 5, command="squeue")
        if names is not None and name not in names:
            continue
        part = JobObservation(
            token=name,
            state=job_state(state),
            job_id=job_id,
            raw_state=state,
            reason="" if reason == "None" else reason,
            nodes=expand_nodes(nodes),
        )
        parts.setdefault(name, []).append(part)
    return {name: _the_live_one(of_name) for name, of_name in parts.items()}


def accounting_by_ids(*, uid: int, job_ids: Iterable[str], days: int = 90) -> list[str]:
    """Ids are what slurmdbd finds soonest; as they are reused, the names have to be looked at."""
    return _accounting(uid, f"--jobs={','.join(job_ids)}", days)


def accounting_by_names(*, uid: int, names: Iterable[str], days: int = 14) -> list[str]:
    return _accounting(uid, f"--name={','.join(names)}", days)


def _accounting(uid: int, which: str, days: int) -> list[str]:
    return [
        "sacct",
        "--noheader",
        "--parsable2",
        "--duplicates",
        f"--user={uid}",
        which,
        f"--starttime=now-{days}days",
        "--format=JobID,State,ExitCode,DerivedExitCode,ReqMem,MaxRSS,NodeList,JobName",
    ]


def parse_accounting(text: str) -> dict[str, JobObservation]:
    """The newest record of each job that an accounting command prints, with its steps, by name."""
    jobs: dict[tuple[str, str], JobObservation] = {}
    current: tuple[str, str] | None = None
    for line in text.splitlines():
        job_id, state, code, derived, asked, rss, nodes, name = _split(line, 8, command="sacct")
        whole, is_step, step_name = job_id.partition(".")
        if not is_step:
            current = (name, job_id)
            jobs[current] = JobObservation(
                token=name,
                state=job_state(state),
                job_id=job_id,
                raw_state=state,
                exit_code=code,
                derived_exit_code=derived,
                memory_asked=asked,
                nodes=expand_nodes(nodes),
            )
        elif current is not None and current[1] == whole:
            job = jobs[current]
            step = StepRecord(name=step_name, state=state, exit_code=code, max_rss=rss)
            jobs[current] = replace(job, steps=(*job.steps, step))
    parts: dict[str, list[JobObservation]] = {}
    for (name, _), job in jobs.items():
        parts.setdefault(name, []).append(job)
    return {name: _the_newest(of_name) for name, of_name in parts.items()}


def job_command(job_id: str) -> list[str]:
    return ["scontrol", "--oneliner", "--details", "show", "job", job_id]


def parse_job(text: str, *, token: str) -> JobObservation | None:
    """The job that `job_command` prints, if `token` is its name; the controller forgets it soon."""
    parts = []
    for line in text.splitlines():
        words = dict(_WORD.findall(line))
        if words.get("JobName") != token:
            continue
        state, reason = words.get("JobState", ""), words.get("Reason", "None")
        part = JobObservation(
            token=token,
            state=job_state(state),
            job_id=words.get("ArrayJobId") or words.get("HetJobId") or words.get("JobId", ""),
            raw_state=state,
            reason="" if reason == "None" else reason,
            exit_code=words.get("ExitCode", ""),
            derived_exit_code=words.get("DerivedExitCode", ""),
            nodes=expand_nodes(words.get("NodeList", "")),
        )
        parts.append(part)
    return _the_live_one(parts) if parts else None


_WORD = re.compile(r"(?:^|(?<=\s))(\w+)=(\S*)")
_LIVELIEST_FIRST = (JobState.RUNNING, JobState.PENDING, JobState.UNKNOWN, JobState.ENDED)


def _the_live_one(parts: Sequence[JobObservation]) -> JobObservation:
    liveliest = min(_LIVELIEST_FIRST.index(part.state) for part in parts)
    alive = [part for part in parts if _LIVELIEST_FIRST.index(part.state) == liveliest]
    return _whole(parts, max((_job_number(part) for part in alive), key=_as_number))


def _the_newest(parts: Sequence[JobObservation]) -> JobObservation:
    return _whole(parts, max((_job_number(part) for part in parts), key=_as_number))


def _whole(parts: Sequence[JobObservation], job_number: str) -> JobObservation:
    """One job out of its parts: the elements of an array, or the only line that there is."""
    own = [part for part in parts if _job_number(part) == job_number]
    typical = min(own, key=_liveliness)
    nodes = dict.fromkeys(node for part in own for node in part.nodes)
    return replace(typical, job_id=job_number, nodes=tuple(nodes))


_WORST_FIRST = (
    "OUT_OF_MEMORY",
    "NODE_FAIL",
    "BOOT_FAIL",
    "TIMEOUT",
    "DEADLINE",
    "PREEMPTED",
    "FAILED",
    "CANCELLED",
)


def _liveliness(part: JobObservation) -> tuple[int, int, bool]:
    """Of ends, a failure says more than a success, and Slurm's own verdict more than an exit."""
    word = part.raw_state.split(maxsplit=1)[0] if part.raw_state else ""
    rank = _WORST_FIRST.index(word) if word in _WORST_FIRST else len(_WORST_FIRST)
    return _LIVELIEST_FIRST.index(part.state), rank, part.raw_state == "COMPLETED"


def _job_number(part: JobObservation) -> str:
    """`12` of `12`, `12_7`, `12_[8-9%2]` and `12+1`."""
    return re.split(r"[_+]", part.job_id or "", maxsplit=1)[0]


def _as_number(job_number: str) -> int:
    return int(job_number) if job_number.isdecimal() else -1


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


_ARRAY_SIZE = re.compile(r"^MaxArraySize\s*=\s*(\d+)", re.MULTILINE)
_ARRAY_TASKS = re.compile(r"^SchedulerParameters\s*=.*\bmax_array_tasks=(\d+)", re.MULTILINE)


def parse_max_elements(config: str) -> int:
    """How many elements an array may have, in the output of `scontrol show config`.

    The largest index is one less than `MaxArraySize`, and the first is 0; a `MaxArraySize` of 0
    switches arrays off. A site may bound the number further, apart from the index.
    """
    bounds = [int(found[1]) for one in (_ARRAY_SIZE, _ARRAY_TASKS) if (found := one.search(config))]
    return max(1, min(bounds, default=1))


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
