"""`kind: slurm`: jobs of a Slurm cluster, built by submitit and found again by their token.

submitit builds the script. It is sent here, since submitit's own way has no time-out and pickles;
what it says afterwards is never asked, because a job is known by its token, not by a pickle.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from submitit.core.utils import FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from slurm.answers import (
    nodes_command,
    parse_cluster_name,
    parse_max_elements,
    parse_nodes,
    parse_queue,
    queue_command,
)
from slurm.cluster import (
    JobObservation,
    JobState,
    NodeState,
    Resources,
    SubmitDoubtful,
    SubmitLimited,
)
from slurm.commands import (
    CommandFailed,
    CommandMissing,
    CommandResult,
    Commands,
    CommandTimedOut,
    SystemCommands,
    run_checked,
)
from slurm.containers import variables_of, wrap
from slurm.job_logs import element_folder
from slurm.job_script import (
    batch_command,
    job_path,
    job_variables,
    output_pattern,
    preamble,
    script_path,
    signal_lead_s,
)
from slurm.launchers import srun_command
from slurm.node_count import spell
from slurm.patience import NO_ANSWER, PatientCommands
from slurm.shared_queue import shared_folder
from slurm.site_options import sbatch_options
from slurm.spec import ClusterSpec
from slurm.watch import Watch
from storage.errors import SlurmError, SubmitRejected
from storage.job import JobDescription

_REFUSAL = re.compile(r"^(sbatch: (error|fatal|unrecognized|invalid)|slurm_)", re.MULTILINE)
# The general words that follow ("Job violates accounting/QOS policy") say less: they also stand
# for jobs that are too large or too long, today and always.
_LIMIT = re.compile(
    r"\b(QOS|Assoc)\w*Submit\w*|job queue full|temporarily unable to accept|"
    r"resource temporarily unavailable",
    re.IGNORECASE,
)
_UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)


class SlurmCluster:
    """A Slurm cluster, through its commands on this host."""

    def __init__(self, spec: ClusterSpec, *, commands: Commands | None = None) -> None:
        self._spec = spec
        system = commands or SystemCommands(slurm_conf=spec.slurm_conf)
        self._commands = commands or PatientCommands(system)
        # The watch spaces its own questions. Commands handed in may speak of another Slurm.
        folder = shared_folder(spec.slurm_conf) if commands is None else None
        self._watch = Watch(system, folder=folder)

    @cached_property
    def name(self) -> str:
        return parse_cluster_name(self._config)

    @cached_property
    def max_elements(self) -> int:
        return parse_max_elements(self._config)

    @cached_property
    def _config(self) -> str:
        return run_checked(self._commands, ["scontrol", "show", "config"])

    @property
    def gates(self) -> bool:
        return True

    @property
    def replaces_nodes(self) -> bool:
        return False

    def script(self, job: JobDescription, resources: Resources) -> str:
        return self._executor(job, resources).script()

    def submit(self, job: JobDescription, resources: Resources) -> str:
        executor = self._executor(job, resources)
        try:
            executor.job.write(job_path(job))
            # Slurm makes no folder for an output file.
            for element in range(resources.elements if resources.elements > 1 else 0):
                element_folder(job.folder, element).mkdir(exist_ok=True)
            if self._spec.container is not None:
                # What is not there cannot be mounted.
                for folder in job.folders:
                    folder.mkdir(parents=True, exist_ok=True)
            executor.write_script()
        except OSError as error:
            raise SubmitRejected(
                f"the job's folder {str(job.folder)!r} cannot be written: {error}; choose a "
                "workdir on a file system that every node mounts"
            ) from error
        try:
            return executor.send()
        finally:
            self._watch.look_anew()

    def observe(self, tokens: Sequence[str]) -> Mapping[str, JobObservation]:
        return self._watch.observe(tokens)

    def queue(self) -> Mapping[str, JobObservation]:
        jobs = parse_queue(run_checked(self._commands, queue_command(uid=os.getuid())))
        return {name: job for name, job in jobs.items() if job.state is not JobState.ENDED}

    def cancel(self, *, job_id: str, token: str) -> None:
        """End the job if id and token belong together; ids are reused, tokens are not."""
        listed = self._commands.run(["squeue", "--noheader", f"--jobs={job_id}", "--format=%j"])
        if listed.returncode != 0:
            if _UNKNOWN_JOB.search(listed.stderr):
                return
            raise CommandFailed(listed)
        if token in listed.stdout.split():
            ended = self._commands.run(["scancel", f"--name={token}", job_id])
            if ended.returncode != 0 and not _UNKNOWN_JOB.search(ended.stderr):
                raise CommandFailed(ended)

    def nodes(self) -> tuple[NodeState, ...]:
        """Those of every partition that is named, each node once."""
        named = self._spec.partitions
        text = run_checked(self._commands, nodes_command(partition=",".join(named) or None))
        found: dict[str, NodeState] = {}
        for partition in named or (None,):
            nodes = parse_nodes(text, partition=partition)
            if not nodes:
                which = "default partition" if partition is None else f"partition {partition!r}"
                raise SlurmError(f"sinfo shows no node of the {which}; set cluster.partition")
            found |= {node.name: node for node in nodes}
        return tuple(found.values())

    def _executor(self, job: JobDescription, resources: Resources) -> _TokenExecutor:
        sent = _as_sent(self._spec, job, resources)
        return _TokenExecutor(self._spec, sent, resources, commands=self._commands)


class _TokenExecutor(SlurmExecutor):
    """submitit's executor for one job, whose name is the attempt's token."""

    def __init__(
        self,
        spec: ClusterSpec,
        job: JobDescription,
        resources: Resources,
        *,
        commands: Commands,
    ) -> None:
        super().__init__(job.folder)
        self.job = job
        self._commands = commands
        self.update_parameters(**_parameters(spec, job, resources))

    @classmethod
    def affinity(cls) -> int:
        """Always able: a script can be shown where no Slurm is installed."""
        return 2

    def script(self) -> str:
        return self._make_submission_file_text(batch_command(self.job), "")

    def write_script(self) -> None:
        script_path(self.job).write_text(self.script(), encoding="utf-8")

    def send(self) -> str:
        """Call sbatch once with the script that was written, and return the job id."""
        return str(self._submit_command(batch_command(self.job)).job_id)

    def _submit_command(self, command: str) -> SlurmJob[Any]:  # noqa: ARG002
        sbatch = self._make_submission_command(script_path(self.job))
        try:
            result = self._commands.run(sbatch)
        except CommandMissing as error:
            raise SubmitRejected(str(error)) from error
        except CommandTimedOut as error:
            raise SubmitDoubtful(str(error)) from error
        return SlurmJob(folder=self.folder, job_id=read_answer(result), tasks=[0])


def read_answer(result: CommandResult) -> str:
    """The job id in sbatch's answer.

    Raises:
        SubmitRejected: sbatch says that the job was refused.
        SubmitLimited: and that it is one too many for now.
        SubmitDoubtful: anything else; a request that was sent may still be carried out.
    """
    if result.returncode == 0:
        try:
            return SlurmExecutor._get_job_id_from_submission_command(result.stdout)
        except FailedSubmissionError:
            raise SubmitDoubtful(
                f"sbatch succeeded but named no job: {result.stdout.strip()!r}"
            ) from None
    words = str(CommandFailed(result))
    refused = result.returncode > 0 and _REFUSAL.search(result.stderr)
    if refused and not NO_ANSWER.search(result.stderr):
        if (limit := _LIMIT.search(result.stderr)) is not None:
            raise SubmitLimited(limit[0])
        raise SubmitRejected(words)
    raise SubmitDoubtful(words)


def _as_sent(spec: ClusterSpec, job: JobDescription, resources: Resources) -> JobDescription:
    """The job with what the site and a container add to the command that starts its ranks."""
    wrapping = wrap(
        spec.container,
        job,
        gpus_per_node=resources.gpus_per_node,
        variables=variables_of(job_variables(spec, resources)),
    )
    mpi = () if spec.mpi is None else (f"--mpi={spec.mpi}",)
    return replace(
        job,
        launcher="srun",
        srun_options=(*mpi, *wrapping.srun_options),
        rank_prefix=wrapping.rank_prefix,
        rank_python=wrapping.rank_python,
    )


def _parameters(spec: ClusterSpec, job: JobDescription, resources: Resources) -> dict[str, Any]:
    """submitit's parameters; what it has no name for, or treats badly, goes in as it is."""
    # Slurm refuses a job that names a node and excludes it.
    excluded = sorted({*spec.exclude, *resources.excluded} - {*resources.node_list})
    return {
        "job_name": job.intent.token,
        **_tasks(resources),
        "gpus_per_node": resources.gpus_per_node or None,
        "mem": resources.memory_per_node,
        "partition": ",".join(spec.partitions) or None,
        "account": spec.account,
        "qos": spec.qos,
        "time": resources.time_limit_min,
        "nodelist": ",".join(resources.node_list) or None,
        "exclude": ",".join(excluded) or None,
        "signal_delay_s": signal_lead_s(resources),
        "constraint": spec.constraint,
        "wckey": spec.wckey,
        "stderr_to_stdout": True,
        "setup": [
            f"# its ranks: {shlex.join(srun_command(job, num_nodes=resources.wanted_nodes))}",
            *preamble(spec, job, resources),
        ],
        "use_srun": False,
        "additional_parameters": {
            **sbatch_options(spec.extra),
            # submitit's own parameter takes no range.
            "nodes": spell(resources.nodes, resources.wanted_nodes),
            **({} if spec.reservation is None else {"reservation": spec.reservation}),
            "chdir": job.folder,
            "no-requeue": True,
            "output": output_pattern(job, "batch.log"),
            **({} if resources.elements == 1 else {"array": f"0-{resources.elements - 1}"}),
        },
    }


def _tasks(resources: Resources) -> dict[str, int]:
    """The CPUs of a node, as one task that the batch step divides where the nodes are a range.

    Tasks a node make sbatch count the tasks of the least nodes, and Slurm then gives the job no
    more nodes than that count: of 2-4 with one task each always 2.
    """
    ranks, cpus = resources.ranks_per_node, resources.cpus_per_rank
    if resources.most_nodes is None:
        return {"ntasks_per_node": ranks, "cpus_per_task": cpus}
    return {"cpus_per_task": ranks * cpus}
