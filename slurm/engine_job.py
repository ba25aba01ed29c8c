"""An engine as a job of its own, for sites where nothing may stay on a login node.

Any number of engines may be at work on a run, so this job may be requeued, unlike those it submits.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm.commands import Commands, SystemCommands, run_checked
from slurm.job_script import escape_pattern
from slurm.spec import ClusterSpec
from slurm.submit import read_answer

LEAD_S = 60
"""How long before its time limit the engine is told to leave."""


@dataclass(frozen=True, kw_only=True)
class EngineJob:
    """What is sent: a command for one core of one node, and where its words go."""

    name: str
    command: Sequence[str]
    script: Path
    log: Path
    time_limit_min: int
    variables: Mapping[str, str] = field(default_factory=dict)


def submit_engine(spec: ClusterSpec, job: EngineJob, *, commands: Commands | None = None) -> str:
    """Write the script and send it; returns the job's id.

    Raises:
        SlurmError: sbatch refused it, or nobody knows. A second engine does no harm.
    """
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()]
    lines = ["#!/bin/bash", *exports, f"exec {shlex.join(job.command)}", ""]
    job.script.parent.mkdir(parents=True, exist_ok=True)
    job.script.write_text("\n".join(lines), encoding="utf-8")
    commands = commands or SystemCommands(slurm_conf=spec.slurm_conf)
    return read_answer(commands.run(["sbatch", *_options(spec, job), str(job.script)]))


def _options(spec: ClusterSpec, job: EngineJob) -> list[str]:
    site = {
        "partition": ",".join(spec.partitions) or None,
        "account": spec.account,
        "qos": spec.qos,
        "reservation": spec.reservation,
        "constraint": spec.constraint,
        "wckey": spec.wckey,
        "exclude": ",".join(spec.exclude) or None,
    }
    lead_s = min(LEAD_S, job.time_limit_min * 60 // 2)
    return [
        f"--job-name={job.name}",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=1",
        f"--time={job.time_limit_min}",
        f"--signal=B:USR2@{lead_s}",
        "--requeue",
        "--open-mode=append",
        f"--output={escape_pattern(job.log)}",
        f"--chdir={job.script.parent}",
        *(f"--{name}={value}" for name, value in site.items() if value is not None),
    ]


def may_requeue(job_id: str, *, commands: Commands) -> bool:
    """Whether the job was submitted so that it may be put back into the queue."""
    told = run_checked(commands, ["scontrol", "show", "job", "--oneliner", job_id])
    return bool(re.search(r"\bRequeue=1\b", told) and re.search(r"\bBatchFlag=[1-9]", told))


def requeue(job_id: str, *, commands: Commands) -> None:
    """Put a running job back into the queue, which ends it here and now."""
    run_checked(commands, ["scontrol", "requeue", job_id])
