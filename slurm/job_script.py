"""What a job's script holds, whichever kind of cluster runs it: variables, setup, one command.

The command is the batch step with the path of `job.json`; nothing is pickled.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm import job_logs
from slurm.cluster import Resources
from slurm.containers import exports
from slurm.spec import ClusterSpec
from storage.job import JobDescription
from storage.records import ExitCode


def job_path(job: JobDescription) -> Path:
    return job.folder / "job.json"


def script_path(job: JobDescription) -> Path:
    return job.folder / "job.sh"


def batch_log(job: JobDescription) -> Path:
    return job_logs.batch_log(job.folder)


def escape_pattern(path: Path) -> str:
    """The path as Slurm's options for output files want it, where `%` stands for something."""
    return str(path).replace("%", "%%")


def output_pattern(job: JobDescription, name: str) -> str:
    """Where Slurm writes a log of this name, of each of an array's elements."""
    element = "%a" if job.intent.elements > 1 else None
    folder = job_logs.element_folder(Path(escape_pattern(job.folder)), element)
    return str(folder / name)


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

    The code snapshot goes on the path after all else, so that whatever modules and setup lines do
    to PYTHONPATH, Headrace's own packages come first and the user's code after them.
    """
    variables = {**job_variables(spec, resources), **(extra or {})}
    code = shlex.quote(str(job.code))
    return [
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        *_modules(spec.modules),
        *_conda(spec.conda),
        *_guarded(spec.setup),
        f"export PYTHONPATH={code}${{PYTHONPATH:+:$PYTHONPATH}}",
        *exports(spec.container, [*variables, "PYTHONPATH"]),
    ]


def job_variables(spec: ClusterSpec, resources: Resources) -> dict[str, str]:
    """The variables that every job is given."""
    return {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(resources.cpus_per_rank),
        **spec.env,
    }


def signal_lead_s(resources: Resources) -> int:
    """Seconds before the limit at which the job is told; never so many that it is told at once."""
    return min(resources.signal_lead_s, resources.time_limit_min * 60 // 2)


_FIND_MODULE = """\
for headrace_init in /etc/profile.d/*mod*.sh \\
    "${MODULESHOME:-/usr/share/modules}/init/bash" "${LMOD_PKG:-/usr/share/lmod/lmod}/init/bash"; do
    type module >/dev/null 2>&1 && break
    if [ -r "$headrace_init" ]; then . "$headrace_init"; fi
done"""
"""A batch shell is no login shell, so `module` is often no function yet."""


def _modules(modules: Sequence[str]) -> list[str]:
    if not modules:
        return []
    absent = "cluster.modules: this node has no `module` command; leave modules out here"
    lines = [_FIND_MODULE, f"type module >/dev/null 2>&1 || {_fail(absent)}"]
    for name in modules:
        failed = _fail(f"cluster.modules: {name} cannot be loaded on this node")
        lines.append(f"module load {shlex.quote(name)} || {failed}")
    return lines


def _conda(environment: str | None) -> list[str]:
    if environment is None:
        return []
    absent = "cluster.conda: there is no `conda` on PATH; load it by cluster.modules or .setup"
    failed = _fail(f"cluster.conda: {environment} cannot be activated on this node")
    return [
        f"type conda >/dev/null 2>&1 || {_fail(absent)}",
        f'eval "$(conda shell.bash hook)" || {failed}',
        f"conda activate {shlex.quote(environment)} || {failed}",
    ]


def _guarded(setup: Sequence[str]) -> list[str]:
    lines = []
    for number, line in enumerate(setup, start=1):
        lines += ["{", line, f"}} || {_fail(f'cluster.setup line {number} failed: {line}')}"]
    return lines


def _fail(message: str) -> str:
    told = shlex.quote(f"headrace: {message}")
    return f"{{ echo {told} >&2; exit {ExitCode.BAD_CONFIG.value}; }}"
