"""`kind: local`: jobs as processes of this host, for one machine and for trying things out.

A subclass of submitit's local executor that keeps what Slurm would: a job lives on when whoever
submitted it is killed, is found again by its token, ends as a whole, and has an exit status.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import psutil
from submitit.local.local import LocalExecutor, LocalJob

from slurm.cluster import JobObservation, JobState, NodeState, Resources
from slurm.commands import command_environment
from slurm.job_script import (
    batch_command,
    batch_log,
    job_path,
    preamble,
    script_path,
    signal_lead_s,
)
from slurm.launchers import TIMED_OUT
from slurm.spec import ClusterSpec
from storage.errors import HeadraceError, SlurmError, SubmitRejected
from storage.job import JobDescription
from storage.records import decode, encode

KILL_WAIT_S = 10.0
_AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_POLL_S = 0.05
_CLOCK_SLACK_S = 2.0

# Waits for the word that its record is written, so that no job ever runs unrecorded. It outlives
# the job to keep its exit status, as slurmd does, and takes with it whatever is left of the job.
_KEEPER = """
read -r word || exit 1
exec </dev/null
trap : TERM INT USR2
SLURM_JOB_ID=$$ /bin/bash "$1"
echo $? >"$2.new" && mv "$2.new" "$2"
kill -KILL 0
"""


@dataclass(frozen=True, kw_only=True)
class _Record:
    """`<workdir>/local/<token>.json`: the process that is the job, and its process group."""

    token: str
    job_id: str
    pid: int
    started_at: float
    group: int
    nodes: tuple[str, ...]
    status: Path
    cancelled: bool = False


class LocalCluster:
    """This host, as a cluster whose nodes are only names."""

    def __init__(self, spec: ClusterSpec, *, workdir: Path) -> None:
        self._spec = spec
        self._folder = workdir.absolute() / "local"

    @property
    def name(self) -> str:
        return f"local-{socket.gethostname()}"

    @property
    def gates(self) -> bool:
        return False

    @property
    def replaces_nodes(self) -> bool:
        return True

    @property
    def max_elements(self) -> int:
        return 1

    def script(self, job: JobDescription, resources: Resources) -> str:
        return self._executor(job, resources).script()

    def submit(self, job: JobDescription, resources: Resources) -> str:
        job = replace(job, launcher="local")
        executor = self._executor(job, resources)
        try:
            job.write(job_path(job))
            record = executor.start()
        except (OSError, ValueError, psutil.Error) as error:
            raise SubmitRejected(
                f"the job cannot be started in {str(job.folder)!r}: {error}"
            ) from error
        return record.job_id

    def observe(self, tokens: Sequence[str]) -> Mapping[str, JobObservation]:
        return {token: self._observe(token) for token in tokens}

    def queue(self) -> Mapping[str, JobObservation]:
        seen = self.observe([path.stem for path in self._folder.glob("*.json")])
        return {name: job for name, job in seen.items() if job.state is JobState.RUNNING}

    def cancel(self, *, job_id: str, token: str) -> None:
        """End the job and return when it is gone: asked first, killed after `KILL_WAIT_S`."""
        record = _read(self._folder, token)
        if record is None or record.job_id != job_id or not _lives(record):
            return
        _write(self._folder, replace(record, cancelled=True))
        _signal(record, signal.SIGTERM)
        deadline = time.monotonic() + KILL_WAIT_S
        while _lives(record):
            if time.monotonic() > deadline:
                _signal(record, signal.SIGKILL)
                return
            time.sleep(_POLL_S)

    def nodes(self) -> tuple[NodeState, ...]:
        names = islice(_node_names(self._spec.exclude), self._spec.most_nodes)
        return tuple(
            NodeState(name=name, raw_state="idle", responds=True, idle=True) for name in names
        )

    def _observe(self, token: str) -> JobObservation:
        record = _read(self._folder, token)
        if record is None:
            return JobObservation(token=token, state=JobState.ABSENT)
        seen = JobObservation(
            token=token, state=JobState.RUNNING, job_id=record.job_id, nodes=record.nodes
        )
        if _lives(record):
            return replace(seen, raw_state="RUNNING")
        state, exit_code = _last_words(record)
        return replace(seen, state=JobState.ENDED, raw_state=state, exit_code=exit_code)

    def _executor(self, job: JobDescription, resources: Resources) -> _KeptExecutor:
        nodes = _choose_nodes(self._spec, resources)
        return _KeptExecutor(self._spec, job, resources, nodes=nodes, records=self._folder)


class _KeptExecutor(LocalExecutor):
    """submitit's local executor for one job that has a keeper instead of a controller."""

    def __init__(
        self,
        spec: ClusterSpec,
        job: JobDescription,
        resources: Resources,
        *,
        nodes: tuple[str, ...],
        records: Path,
    ) -> None:
        super().__init__(job.folder)
        self._job = job
        self._nodes = nodes
        self._records = records
        limits = {
            "HEADRACE_NODES": ",".join(nodes),
            "HEADRACE_TIME_LIMIT_S": str(resources.time_limit_min * 60),
            "HEADRACE_SIGNAL_LEAD_S": str(signal_lead_s(resources)),
        }
        self._preamble = preamble(spec, job, resources, extra=limits)

    def script(self) -> str:
        return self._make_submission_file_text(batch_command(self._job), "")

    def start(self) -> _Record:
        self._submit_command(batch_command(self._job))
        record = _read(self._records, self._job.intent.token)
        assert record is not None
        return record

    def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002
        return "\n".join(["#!/bin/bash", *self._preamble, command, ""])

    def _submit_command(self, command: str) -> LocalJob[Any]:
        script = script_path(self._job)
        script.write_text(self._make_submission_file_text(command, ""), encoding="utf-8")
        status = self.folder / "exit_status"
        status.unlink(missing_ok=True)
        keeper = shlex.join(["/bin/bash", "-c", _KEEPER, "keeper", str(script), str(status)])
        log = shlex.quote(str(batch_log(self._job)))
        # The shell in between ends at once, so that the keeper is not this process's child.
        launcher = f"{keeper} <&3 3<&- >>{log} 2>&1 & echo $!"
        word, give_word = os.pipe()
        try:
            shell = subprocess.Popen(
                ["/bin/sh", "-c", f"exec 3<&0; {launcher}"],
                cwd=self.folder,
                env=_environment(),
                start_new_session=True,
                stdin=word,
                stdout=subprocess.PIPE,
                text=True,
            )
            answer, _ = shell.communicate()
            pid = int(answer)
            record = _Record(
                token=self._job.intent.token,
                job_id=str(pid),
                pid=pid,
                started_at=psutil.Process(pid).create_time(),
                group=shell.pid,
                nodes=self._nodes,
                status=status,
            )
            _write(self._records, record)
            os.write(give_word, b"go\n")
        finally:
            os.close(word)
            os.close(give_word)
        return LocalJob(folder=self.folder, job_id=record.job_id, tasks=[0])


def _choose_nodes(spec: ClusterSpec, resources: Resources) -> tuple[str, ...]:
    if resources.node_list:
        return resources.node_list
    names = _node_names({*spec.exclude, *resources.excluded})
    return tuple(islice(names, resources.wanted_nodes))


def _node_names(excluded: Collection[str]) -> Iterator[str]:
    names = (f"local{number}" for number in count(1))
    return (name for name in names if name not in excluded)


def _environment() -> dict[str, str]:
    """As on Slurm, and the keys that the caller holds: nothing here is stored anywhere."""
    keys = {name: os.environ[name] for name in _AWS_KEYS if name in os.environ}
    return {**command_environment(os.environ), **keys}


def _lives(record: _Record) -> bool:
    try:
        process = psutil.Process(record.pid)
        same = abs(process.create_time() - record.started_at) < _CLOCK_SLACK_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(record: _Record, number: signal.Signals) -> None:
    try:
        os.killpg(record.group, number)
    except ProcessLookupError:
        return


def _last_words(record: _Record) -> tuple[str, str]:
    """State and exit code as Slurm would give them."""
    try:
        code = int(record.status.read_text(encoding="ascii"))
    except FileNotFoundError:
        code = 128 + signal.SIGKILL
    exit_code = f"0:{code - 128}" if code > 128 else f"{code}:0"
    if record.cancelled:
        return f"CANCELLED by {os.getuid()}", exit_code
    if code == TIMED_OUT:
        return "TIMEOUT", exit_code
    return "COMPLETED" if code == 0 else "FAILED", exit_code


def _record_path(folder: Path, token: str) -> Path:
    return folder / f"{token}.json"


def _read(folder: Path, token: str) -> _Record | None:
    try:
        return decode(_Record, _record_path(folder, token).read_bytes())
    except FileNotFoundError:
        return None
    except HeadraceError as error:
        raise SlurmError(f"{_record_path(folder, token)}: {error}") from error


def _write(folder: Path, record: _Record) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = _record_path(folder, record.token)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(encode(record))
    temporary.replace(path)
