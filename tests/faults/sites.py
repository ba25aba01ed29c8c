"""Where runs go to meet their faults: a cluster, a store that its nodes reach, a shared folder."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slurm.devcluster import DevCluster
from slurm.snapshot import Snapshot, take_snapshot
from storage.embedded import EmbeddedStore, resolved
from storage.spec import StoreSpec

_THREADS = 64


@dataclass(frozen=True, kw_only=True)
class Site:
    """One snapshot of the code serves all runs; their engines are threads of the pool."""

    cluster: DevCluster
    store: StoreSpec
    workdir: Path
    snapshot: Snapshot
    pool: ThreadPoolExecutor
    closing: threading.Event = field(default_factory=threading.Event)
    """Set at the end of the tests: engines that a failed test left behind cancel their jobs."""

    def slurm(self, *argv: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            argv,
            env={**os.environ, **self.cluster.env()},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout.strip()


@contextmanager
def open_site(cluster: DevCluster, workdir: Path) -> Iterator[Site]:
    """A site on a cluster that is up."""
    server = EmbeddedStore(directory=workdir / "store", host=cluster.host, bucket="headrace")
    endpoint = server.ensure()
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            site = Site(
                cluster=cluster,
                store=resolved(StoreSpec(), endpoint),
                workdir=workdir,
                snapshot=take_snapshot(workdir),
                pool=pool,
            )
            try:
                yield site
            finally:
                site.closing.set()
    finally:
        server.stop()
