"""What several packages' tests share: one real Slurm cluster for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from slurm.devcluster import ClusterShape, DevCluster, DevClusterUnavailable

os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")

TEST_SHAPE = ClusterShape(name="ht", subnet="10.98.7.0/24", num_nodes=4, cpu_quota=0.4)


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two workers share the tests: one has all that needs the one cluster, the other the rest.

    Its jobs wait more than they compute, so that the two hardly stand in each other's way.
    """
    for item in items:
        needs_cluster = item.get_closest_marker("slurm") is not None
        item.add_marker(pytest.mark.xdist_group("cluster" if needs_cluster else "rest"))


@pytest.fixture(scope="session")
def dev_cluster() -> Iterator[DevCluster]:
    """Four nodes, n1 to n4, of 0.4 cores each; up once for all tests, and down at the end."""
    cluster = DevCluster(TEST_SHAPE)
    try:
        cluster.up(say=print)
    except DevClusterUnavailable as reason:
        pytest.skip(f"no dev cluster here: {reason}")
    try:
        yield cluster
    finally:
        cluster.down()
