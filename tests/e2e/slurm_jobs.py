"""What Slurm's own accounting says of a run's jobs."""

from __future__ import annotations

from dataclasses import dataclass

from tests.e2e.conftest import Site


@dataclass(frozen=True)
class Job:
    job_id: str
    token: str
    state: str
    steps: int


def jobs_of(site: Site, run: str, stage: str = "") -> list[Job]:
    """All jobs whose token is of this run (and stage), with the number of steps each one ran.

    The batch script and the external step are Slurm's own; a job that lost its start ran no other.
    """
    prefix = f"{run}-{stage}" if stage else f"{run}-"
    text = site.run(
        "sacct", "-D", "-n", "-P", "--starttime", "now-1days", "-o", "JobID,JobName,State", "-a"
    )
    jobs: dict[str, Job] = {}
    for line in text.splitlines():
        identity, name, state = line.split("|")
        job_id, _, step = identity.partition(".")
        if not step and name.startswith(prefix):
            jobs[job_id] = Job(job_id=job_id, token=name, state=state, steps=0)
        elif job_id in jobs and step not in ("batch", "extern"):
            job = jobs[job_id]
            jobs[job_id] = Job(job_id=job_id, token=job.token, state=job.state, steps=job.steps + 1)
    return list(jobs.values())
