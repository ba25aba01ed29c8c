"""The dev cluster with a store that its nodes reach, for runs that faults are done to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from slurm.devcluster import DevCluster
from slurm.snapshot import take_snapshot
from storage.embedded import EmbeddedStore, resolved
from storage.spec import StoreSpec
from tests.faults.runs import Site

_THREADS = 64


@pytest.fixture(scope="module")
def site(dev_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The cluster, whole before and after; one snapshot of the code serves all runs."""
    dev_cluster.up()
    workdir = tmp_path_factory.mktemp("faults")
    server = EmbeddedStore(directory=workdir / "store", host=dev_cluster.host, bucket="headrace")
    pool = ThreadPoolExecutor(_THREADS)
    closing = threading.Event()
    try:
        yield Site(
            cluster=dev_cluster,
            store=resolved(StoreSpec(), server.ensure()),
            workdir=workdir,
            snapshot=take_snapshot(workdir),
            pool=pool,
            closing=closing,
        )
    finally:
        closing.set()
        pool.shutdown()
        server.stop()
        dev_cluster.up()
