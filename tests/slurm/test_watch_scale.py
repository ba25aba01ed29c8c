"""Many jobs and several engines cost Slurm no more than few jobs and one, on a real cluster."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slurm.devcluster import DevCluster
from slurm.shared_queue import SHORTEST_S

pytestmark = pytest.mark.slurm

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_ENGINES = 4


@dataclass(frozen=True)
class Counted:
    """Slurm's commands behind wrappers that write down when each was called, and by whom."""

    folder: Path

    @classmethod
    def install(cls, folder: Path) -> Counted:
        (folder / "bin").mkdir()
        for name in ("squeue", "sacct", "scontrol"):
            script = folder / "bin" / name
            script.write_text(
                "#!/bin/sh\n"
                f'read -r now rest </proc/uptime; echo "{name} $now $PPID" >>{folder}/calls\n'
                f'exec {shutil.which(name)} "$@"\n'
            )
            script.chmod(0o755)
        return cls(folder)

    @property
    def environ(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "TMPDIR": str(self.folder)}

    def times_s(self, name: str) -> list[float]:
        lines = (self.folder / "calls").read_text().splitlines()
        return sorted(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def watched(
    cluster: DevCluster, folder: Path, *, num_tasks: int, num_jobs: int
) -> tuple[Counted, list[dict[str, Any]]]:
    """An array and many jobs, seen to their ends by several engines at once."""
    counted = Counted.install(folder)
    name = f"scale-{secrets.token_hex(4)}"
    tokens = [f"{name}-{number:04d}" for number in range(num_jobs)]
    environ = {**counted.environ, "SLURM_CONF": str(cluster.slurm_conf)}
    options = ["--mem=8M", "--output=/dev/null", "--time=5", "--no-requeue"]
    array = ["sbatch", *options, f"--job-name={name}", f"--array=0-{num_tasks - 1}"]
    subprocess.run([*array, "--wrap=sleep 1"], env=environ, check=True, capture_output=True)
    shares = [[name, *tokens[index::NUM_ENGINES]] for index in range(NUM_ENGINES)]
    for token in tokens:
        job = ["sbatch", *options, f"--job-name={token}", "--wrap=sleep 2"]
        subprocess.run(job, env=environ, check=True, capture_output=True)
    engines = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.slurm.observer", str(cluster.slurm_conf), *share],
            cwd=REPOSITORY,
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in shares
    ]
    told = [json.loads(engine.communicate()[0]) for engine in engines]
    for one in told:
        assert set(one["states"].values()) == {"COMPLETED"}
        assert one["steps"] == len(one["states"])
    return counted, told


def check_calls(counted: Counted, told: list[dict[str, Any]]) -> None:
    """One squeue an interval for all, and fewer sacct than looks: none for what was told before."""
    begins = counted.times_s("squeue")
    # /proc/uptime is told in hundredths of a second, a moment after the call began.
    assert min(after - before for before, after in pairwise(begins)) > SHORTEST_S - 0.1
    looks = sum(one["looks"] for one in told)
    assert len(begins) < looks
    assert len(counted.times_s("sacct")) < looks
    assert not counted.times_s("scontrol")
    assert max(one["grown_bytes"] for one in told) < 60 * 2**20


def test_several_engines_and_many_jobs_cost_one_squeue_an_interval(
    dev_cluster: DevCluster, tmp_path: Path
) -> None:
    counted, told = watched(dev_cluster, tmp_path, num_tasks=60, num_jobs=20)
    check_calls(counted, told)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_a_thousand_tasks_and_two_hundred_jobs_cost_little(
    dev_cluster: DevCluster, tmp_path: Path
) -> None:
    counted, told = watched(dev_cluster, tmp_path, num_tasks=1000, num_jobs=200)
    print(json.dumps([{k: v for k, v in one.items() if k != "states"} for one in told], indent=1))
    print({name: len(counted.times_s(name)) for name in ("squeue", "sacct", "scontrol")})
    check_calls(counted, told)
    assert max(one["cpu"] for one in told) < 0.05
