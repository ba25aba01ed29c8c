"""Where the jobs of these tests run: this host, and the dev cluster, each with a real store."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm.devcluster import DevCluster
from slurm.local import LocalCluster
from slurm.spec import ClusterSpec
from slurm.submit import SlurmCluster
from storage.embedded import EmbeddedStore, resolved
from storage.spec import StoreSpec
from tests.slurm.jobs import ENTRIES, Workplace


@contextmanager
def _serving(directory: Path, *, host: str) -> Iterator[StoreSpec]:
    server = EmbeddedStore(directory=directory, host=host, bucket="headrace")
    try:
        yield resolved(StoreSpec(), server.ensure())
    finally:
        server.stop()


@pytest.fixture(scope="session")
def host_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSpec]:
    """A store that jobs of this host reach."""
    with _serving(tmp_path_factory.mktemp("host-store"), host="127.0.0.1") as spec:
        yield spec


@pytest.fixture(scope="session")
def bridge_store(
    dev_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoreSpec]:
    """A store that the dev cluster's nodes reach."""
    with _serving(tmp_path_factory.mktemp("bridge-store"), host=dev_cluster.host) as spec:
        yield spec


@pytest.fixture
def here(host_store: StoreSpec, tmp_path: Path) -> Workplace:
    """A local cluster with a run of its own."""
    spec = ClusterSpec(kind="local", nodes=2, env={"PYTHONPATH": str(ENTRIES)})
    cluster = LocalCluster(spec, workdir=tmp_path)
    return Workplace(cluster=cluster, store=host_store, workdir=tmp_path, name=_new_run())


@pytest.fixture(scope="session")
def slurm_spec(dev_cluster: DevCluster) -> ClusterSpec:
    return ClusterSpec(
        kind="slurm",
        nodes=2,
        slurm_conf=dev_cluster.slurm_conf,
        setup=("true", "export SET_UP='by a line'"),
        env={"PYTHONPATH": str(ENTRIES)},
    )


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder for jobs that several tests look at, with a name that is easy to break."""
    return tmp_path_factory.mktemp("jobs 100%t 'of' all")


@pytest.fixture
def there(slurm_spec: ClusterSpec, bridge_store: StoreSpec, tmp_path: Path) -> Workplace:
    """The dev cluster with a run of its own."""
    return Workplace(
        cluster=SlurmCluster(slurm_spec), store=bridge_store, workdir=tmp_path, name=_new_run()
    )


def _new_run() -> str:
    return f"run-{secrets.token_hex(4)}"
