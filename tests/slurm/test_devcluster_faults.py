"""What the dev cluster offers to those who cause faults: each does what its name says, and ends.

Preemption, limits and outages of daemons are seen at work in `tests/faults`, where runs go through
them.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slurm.devcluster import DevCluster, DevClusterError

pytestmark = pytest.mark.slurm


def call(cluster: DevCluster, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **cluster.env()}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


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
