"""What several packages' tests share: one real Slurm cluster for the whole session."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from slurm.devcluster import ClusterShape, DevCluster, DevClusterUnavailable

os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")

# What a shell starts in the background ignores it, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing on a machine that does other things, too.
settings.register_profile(
    "headrace", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("headrace")

# `name:subnet`; two sessions on one machine need a cluster each.
_name, _, _subnet = os.environ.get("HEADRACE_TEST_CLUSTER", "ht:10.98.7.0/24").partition(":")
TEST_SHAPE = ClusterShape(name=_name, subnet=_subnet, num_nodes=4, cpu_quota=0.4)


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
