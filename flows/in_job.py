"""`headrace run --in-job`: the engine inside an allocation, without a Prefect server.

On a login node it sends itself as a small job. Inside a job it carries the run out, and when its
own time is nearly up it leaves and goes back into the queue: the next one adopts what runs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from flows.alone import run_alone
from flows.home import VARIABLE
from flows.interrupts import Wishes, attend
from flows.opening import open_ledger
from flows.spec import PipelineSpec
from flows.watchers import AllEyes
from headrace import command
from slurm.commands import SystemCommands
from slurm.engine_job import EngineJob, may_requeue, requeue, submit_engine
from storage.errors import SlurmError, SpecError
from storage.records import Stage
from tasks.eyes import Eyes
from tasks.pauses import Paused

JOB_ID = "SLURM_JOB_ID"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The engine's job, and the file that its words go to."""

    job_id: str
    log: Path


def is_inside(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs in an allocation."""
    return bool(environ.get(JOB_ID))


def send_engine(
    spec: PipelineSpec,
    *,
    time_limit_min: int,
    forced: Iterable[Stage] = (),
    environ: Mapping[str, str] = os.environ,
) -> Sent:
    """Submit a job that carries the run out; the spec goes with it as it is now.

    Raises:
        SpecError: the spec's cluster has no allocations.
        HeadraceError: the store cannot be reached from here, or sbatch refused the job.
    """
    if not spec.cluster.spans_hosts:
        raise SpecError(
            "cluster.kind: local has no allocations for --in-job; leave --in-job out, or use "
            "`kind: slurm`"
        )
    folder = spec.workdir / spec.run / "engine"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "spec.yaml"
    # Variables were filled in here, and the job has others.
    written = yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False)
    file.write_text(written.replace("${", "$${"), encoding="utf-8")
    # An embedded store is started here, as a node may not have its address.
    with open_ledger(spec):
        pass
    job = EngineJob(
        name=f"headrace-{spec.run}",
        command=command("run", str(file), "--in-job", *(f"--force={stage}" for stage in forced)),
        script=folder / "engine.sh",
        log=folder / "engine.log",
        time_limit_min=time_limit_min,
        variables={
            "PYTHONUNBUFFERED": "1",
            **({VARIABLE: environ[VARIABLE]} if VARIABLE in environ else {}),
        },
    )
    return Sent(job_id=submit_engine(spec.cluster, job), log=job.log)


def run_inside(spec: PipelineSpec, *, eyes: Eyes, say: Say, forced: Iterable[Stage] = ()) -> bool:
    """Carry the run out in this allocation; False when the engine had to leave first.

    USR2, the warning before the time limit, puts this job back into the queue. TERM does not, as
    somebody may have cancelled it.

    Raises:
        HeadraceError: as `run_alone` does.
    """
    wishes = Wishes()
    try:
        attend(
            lambda: run_alone(spec, eyes=AllEyes(eyes, wishes), forced=forced),
            wishes,
            say=say,
            signals=(signal.SIGUSR2, signal.SIGTERM, signal.SIGINT),
        )
    except Paused as pause:
        say(f"Left while it goes on: {pause}")
        _go_back(spec, wishes, say=say)
        return False
    return True


def _go_back(spec: PipelineSpec, wishes: Wishes, *, say: Say) -> None:
    job_id = os.environ.get(JOB_ID)
    by_hand = "the same command, given again, carries on"
    if wishes.left_by != signal.SIGUSR2 or job_id is None:
        say(f"This job was told to end, so it does not go back into the queue; {by_hand}.")
        return
    commands = SystemCommands(slurm_conf=spec.cluster.slurm_conf)
    try:
        if not may_requeue(job_id, commands=commands):
            say(f"Job {job_id} was not submitted with --requeue; {by_hand}.")
            return
        say(f"The time limit is near: job {job_id} goes back into the queue.")
        requeue(job_id, commands=commands)
    except SlurmError as error:
        say(f"Job {job_id} could not go back into the queue: {error}; {by_hand}.")
