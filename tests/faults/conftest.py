"""The session's dev cluster as a site for runs that faults are done to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm.devcluster import DevCluster
from tests.faults.sites import Site, open_site


@pytest.fixture(scope="module")
def site(dev_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The cluster is whole before and after."""
    dev_cluster.up()
    try:
        with open_site(dev_cluster, tmp_path_factory.mktemp("faults")) as opened:
            yield opened
    finally:
        dev_cluster.up()
