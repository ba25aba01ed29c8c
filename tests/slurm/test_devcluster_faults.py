"""What the dev cluster offers to those who cause faults: each does what its name says, and ends.

Preemption and outages of daemons are seen at work in `tests/faults`, where runs go through them.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.devcluster import ClusterShape, DevCluster, DevClusterError, DevClusterUnavailable
from slurm.devcluster.config import MAX_SUBMITTED_OF_FEW

pytestmark = pytest.mark.slurm

LIMITED = ClusterShape(
    name="he", subnet="10.98.11.0/24", num_nodes=1, gpus_per_node=0, accounting="limits"
)
DEADLINE_S = 60.0


def call(cluster: DevCluster, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **cluster.env()}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


def said(cluster: DevCluster, *argv: str) -> str:
    done = call(cluster, *argv)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout.strip()


def wait_for_state(cluster: DevCluster, job: str, *states: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while (state := said(cluster, "sacct", "-nPX", "-j", job, "-o", "state")) not in states:
        assert time.monotonic() < deadline, f"job {job} is {state!r}, never {states}"
        time.sleep(0.1)


def submit(cluster: DevCluster, command: str, *options: str) -> str:
    return said(cluster, "sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", command)


@pytest.fixture(scope="module")
def limited() -> Iterator[DevCluster]:
    cluster = DevCluster(LIMITED)
    try:
        cluster.up()
    except DevClusterUnavailable as reason:
        pytest.skip(str(reason))
    try:
        yield cluster
    finally:
        cluster.down()


def test_a_folder_goes_wrong_for_one_node_and_comes_back(
    dev_cluster: DevCluster, tmp_path: Path
) -> None:
    def write(node: str, megabytes: int) -> bool:
        command = f"dd if=/dev/zero of={tmp_path}/{node} bs=1M count={megabytes}"
        return call(dev_cluster, "srun", f"--nodelist={node}", *command.split()).returncode == 0

    dev_cluster.make_tiny("n2", tmp_path, size_mb=1)
    assert not write("n2", 2)
    dev_cluster.restore("n2", tmp_path)
    dev_cluster.make_readonly("n2", tmp_path)
    assert not write("n2", 1)
    assert write("n3", 1)
    dev_cluster.restore("n2", tmp_path)
    assert write("n2", 2)
    with pytest.raises(DevClusterError):
        dev_cluster.restore("n2", tmp_path)


def test_a_partition_refuses_more_than_a_few_jobs_of_a_user(limited: DevCluster) -> None:
    jobs = [submit(limited, "sleep 300", "--partition=few") for _ in range(MAX_SUBMITTED_OF_FEW)]
    refused = call(limited, "sbatch", "--partition=few", "--output=/dev/null", "--wrap", "true")
    assert refused.returncode != 0
    assert "QOSMaxSubmitJobPerUserLimit" in refused.stderr
    said(limited, "scancel", jobs[0])
    wait_for_state(limited, jobs[0], f"CANCELLED by {os.getuid()}")
    assert submit(limited, "true", "--partition=few")
