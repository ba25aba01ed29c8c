"""A real store and a small data set in it; both live for the session."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.embedded import EmbeddedStore, resolved
from storage.keys import DatasetKeys
from storage.object_store import ObjectStore
from storage.shards.build import build_dataset, plan_shards
from storage.spec import DataSpec, StoreSpec
from tests.trainer.jobs import Bench

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


class Unwatched:
    """Stands in for a job's context: nobody looks at this build."""

    def progress(self, *, step: int, **numbers: float) -> None: ...

    def is_fenced(self) -> bool:
        return False


@pytest.fixture(scope="session")
def store_spec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSpec]:
    directory = tmp_path_factory.mktemp("store")
    server = EmbeddedStore(directory=directory, host="127.0.0.1", bucket="headrace")
    try:
        yield resolved(StoreSpec(), server.ensure())
    finally:
        server.stop()
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def manifest_key(store_spec: StoreSpec, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Counting in words: easy enough that a tiny model's loss falls within a few steps."""
    folder = tmp_path_factory.mktemp("documents")
    for number in range(40):
        text = " ".join(WORDS[(number + word) % len(WORDS)] for word in range(60))
        (folder / f"{number:02d}.txt").write_text(text)
    spec = DataSpec(inputs=(str(folder),), validation_fraction=0.2, shard_tokens=4_000)
    job = plan_shards(spec)
    keys = DatasetKeys(prefix=store_spec.prefix, build=job.build)
    store = ObjectStore(store_spec)
    build_dataset(job, store=store, keys=keys, watcher=Unwatched())
    store.close()
    return keys.manifest


@pytest.fixture
def bench(store_spec: StoreSpec, manifest_key: str, tmp_path: Path) -> Bench:
    """A run of the test's own."""
    return Bench(
        store=store_spec, manifest_key=manifest_key, run=f"t{secrets.token_hex(4)}", folder=tmp_path
    )
