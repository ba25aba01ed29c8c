"""The S3 servers of these tests: a real one for the session, and two that misbehave on request."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.embedded import EmbeddedStore, resolved
from storage.object_store import ObjectStore
from storage.spec import StoreSpec
from tests.storage.meddler import Meddler


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSpec]:
    """The spec of a running embedded server, address and credentials filled in."""
    directory = tmp_path_factory.mktemp("store")
    server = EmbeddedStore(directory=directory, host="127.0.0.1", bucket="headrace")
    try:
        yield resolved(StoreSpec(), server.ensure())
    finally:
        server.stop()
        shutil.rmtree(directory)


@pytest.fixture
def store(store_server: StoreSpec) -> Iterator[ObjectStore]:
    """An empty bucket of its own, so that a test may use any key."""
    bucket = f"test-{secrets.token_hex(6)}"
    fresh = ObjectStore(store_server.model_copy(update={"bucket": bucket}))
    fresh.ensure_bucket()
    yield fresh
    assert fresh.delete(info.key for info in fresh.list("")) == ()
    fresh.client.delete_bucket(Bucket=bucket)
    fresh.close()


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedStore]:
    """A server of the test's own, not started, which may be killed and broken."""
    server = EmbeddedStore(directory=tmp_path / "store", host="127.0.0.1", bucket="headrace")
    yield server
    pid = server.status().pid if (server.directory / "server.json").exists() else None
    if pid is not None:
        # Quicker than a graceful end, which one test tries.
        os.kill(pid, signal.SIGKILL)
    server.stop()
    shutil.rmtree(server.directory, ignore_errors=True)


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    """A server that accepts any credentials, and wrong checksums."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def any_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials from the environment, and nothing of this machine's own AWS files."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_PROFILE", raising=False)


@pytest.fixture
def meddler(moto_url: str, any_credentials: None) -> Iterator[Meddler]:
    """A proxy in front of moto; a test sets its `rule`."""
    with Meddler(moto_url).serving() as proxy:
        yield proxy


@pytest.fixture
def meddled(meddler: Meddler) -> Iterator[ObjectStore]:
    """An empty bucket behind the meddling proxy."""
    spec = StoreSpec(
        bucket=f"test-{secrets.token_hex(6)}",
        endpoint_url=meddler.endpoint_url,
        read_timeout_s=5,
        max_attempts=3,
    )
    store = ObjectStore(spec)
    store.ensure_bucket()
    meddler.seen.clear()
    yield store
    store.close()
