"""Many jobs and several engines cost Slurm no more than few jobs and one, on a real cluster."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_ENGINES = 4


@dataclass(frozen=True)
class Counted:
    """Slurm's commands behind wrappers that write down by which process each was called."""

    folder: Path

    @classmethod
    def install(cls, folder: Path) -> Counted:
        (folder / "bin").mkdir()
        for name in ("squeue", "sacct", "scontrol"):
            script = folder / "bin" / name
            script.write_text(
                f'#!/bin/sh\necho "{name} $PPID" >>{folder}/calls\nexec {shutil.which(name)} "$@"\n'
            )
            script.chmod(0o755)
        return cls(folder)

    @property
    def environ(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "TMPDIR": str(self.folder)}

    def calls(self, name: str, *, by: int | None = None) -> int:
        lines = (self.folder / "calls").read_text().splitlines()
        calls = [line.split() for line in lines]
        return sum(what == name and by in (None, int(pid)) for what, pid in calls)


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
    """All together call squeue about as often as one would, and each sacct once a batch."""
    looks = [one["looks"] for one in told]
    assert counted.calls("squeue") <= 1.5 * max(looks) + NUM_ENGINES
    for one in told:
        assert counted.calls("sacct", by=one["pid"]) <= one["batches"] + one["lags"]
        assert one["grown_bytes"] < 60 * 2**20
    assert not counted.calls("scontrol")


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
    print({name: counted.calls(name) for name in ("squeue", "sacct", "scontrol")})
    check_calls(counted, told)
    assert max(one["cpu"] for one in told) < 0.05
