"""What a job's script holds, whichever kind of cluster runs it: variables, setup, one command.

The command is the batch step with the path of `job.json`; nothing is pickled.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm.cluster import Resources
from slurm.spec import ClusterSpec
from storage.job import JobDescription
from storage.records import ExitCode


def job_path(job: JobDescription) -> Path:
    return job.folder / "job.json"


def script_path(job: JobDescription) -> Path:
    return job.folder / "job.sh"


def batch_log(job: JobDescription) -> Path:
    return job.folder / "batch.log"


def escape_pattern(path: Path) -> str:
    """The path as Slurm's options for output files want it, where `%` stands for something."""
    return str(path).replace("%", "%%")


def batch_command(job: JobDescription) -> str:
    command = [str(job.python), "-P", "-m", "slurm.batch", str(job_path(job))]
    return f"exec {shlex.join(command)}"


def preamble(
    spec: ClusterSpec,
    job: JobDescription,
    resources: Resources,
    *,
    extra: Mapping[str, str] | None = None,
) -> list[str]:
    """The script's lines before the command.

    The code snapshot goes on the path after the setup lines, so that whatever they do to
    PYTHONPATH, Headrace's own packages come first and the user's code after them.
    """
    variables = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(resources.cpus_per_rank),
        **spec.env,
        **(extra or {}),
    }
    code = shlex.quote(str(job.code))
    return [
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        *_guarded(spec.setup),
        f"export PYTHONPATH={code}${{PYTHONPATH:+:$PYTHONPATH}}",
    ]


def signal_lead_s(resources: Resources) -> int:
    """Seconds before the limit at which the job is told; never so many that it is told at once."""
    return min(resources.signal_lead_s, resources.time_limit_min * 60 // 2)


def _guarded(setup: Sequence[str]) -> list[str]:
    lines = []
    for number, line in enumerate(setup, start=1):
        told = shlex.quote(f"headrace: cluster.setup line {number} failed: {line}")
        lines += [
            "{",
            line,
            f"}} || {{ echo {told} >&2; exit {ExitCode.BAD_CONFIG.value}; }}",
        ]
    return lines
