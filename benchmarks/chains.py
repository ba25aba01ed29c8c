"""Three ways to run one Slurm job after another, each a process of its own: ours and two peers.

python -m benchmarks.chains WHO JOBS FOLDER, with SLURM_CONF set. Every job runs the same shell
line, which sleeps and then notes the time. Each chain is one that people use: Headrace's loop with
a job that leaves to be resumed; submitit, whose `result()` is waited for; and `sbatch --wait`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from slurm.spec import ClusterSpec
from trainer.spec import CommandSpec

WAIT_S = 1.0


def payload(folder: Path) -> str:
    """What every job does: it works for a moment, then notes when it ended."""
    return f"sleep {WAIT_S}; date +%s.%N >> {folder}/ended"


def run_headrace(jobs: int, folder: Path) -> None:
    """Attempts that leave with "resume me" and a new step each, until the last one is done."""
    from benchmarks.owning import own

    line = (
        f"echo step $HEADRACE_ATTEMPT; {payload(folder)}; "
        f"[ $HEADRACE_ATTEMPT -ge {jobs} ] || exit 75"
    )
    command = CommandSpec(
        argv=("/bin/bash", "-c", line), cwd=folder, progress="step (?P<step>[0-9]+)"
    )
    own(command, folder=folder, cluster=ClusterSpec(kind="slurm", time_limit_min=5))


def run_submitit(jobs: int, folder: Path) -> None:
    """submitit as its README has it: submit a function, ask for its result, submit the next."""
    from submitit import SlurmExecutor

    executor = SlurmExecutor(folder=folder)
    executor.update_parameters(time=5, ntasks_per_node=1, cpus_per_task=1)
    for _ in range(jobs):
        executor.submit(os.system, payload(folder)).result()


def run_sbatch(jobs: int, folder: Path) -> None:
    """`sbatch --wait`, one after the other."""
    for _ in range(jobs):
        command = ["sbatch", "--wait", "--time=5", f"--output={folder}/%j.log"]
        subprocess.run(
            [*command, f"--wrap={payload(folder)}"], check=True, stdout=subprocess.DEVNULL
        )


CHAINS = {"headrace": run_headrace, "submitit": run_submitit, "sbatch --wait": run_sbatch}

if __name__ == "__main__":
    CHAINS[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
