"""Batches: the same samples in the same order, whatever the world size, cache or process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from storage.errors import DataError, StoreError
from storage.keys import DatasetKeys
from storage.object_store import ObjectStore
from storage.records import encode, new_nonce
from storage.shards.build import build_dataset, plan_shards
from storage.shards.loader import ShardLoader
from storage.shards.manifest import Manifest, Split
from storage.shards.order import sample_index
from storage.spec import DataSpec, StoreSpec

pytestmark = pytest.mark.s3

SEQUENCE = 128


class Quiet:
    def progress(self, *, step: int, **numbers: float) -> None:
        return

    def is_fenced(self) -> bool:
        return False


def build(store: ObjectStore, folder: Path) -> tuple[Manifest, str]:
    """A data set of several shards, and the key of its manifest."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(30):
        (corpus / f"{number:02d}.txt").write_text(f"{number}: " + "abc " * (10 + 7 * number))
    job = plan_shards(DataSpec(inputs=(str(corpus),), shard_tokens=1000, validation_fraction=0.1))
    keys = DatasetKeys(prefix=f"test-{new_nonce()}", build=job.build)
    return build_dataset(job, store=store, keys=keys, watcher=Quiet()), keys.manifest


@pytest.fixture(scope="module")
def store(store_server: StoreSpec) -> Iterator[ObjectStore]:
    """One for all these tests, like the data set, which they only read."""
    shared = ObjectStore(store_server)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def data(store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, str]:
    return build(store, tmp_path_factory.mktemp("data"))


def loader(
    store: ObjectStore,
    manifest: Manifest,
    cache: Path,
    *,
    split: Split = "train",
    sequence: int = SEQUENCE,
    seed: int = 3,
) -> ShardLoader:
    return ShardLoader(store, manifest, split=split, sequence=sequence, seed=seed, cache=cache)


def test_samples_are_windows_over_the_joined_shards(
    store: ObjectStore, tmp_path: Path, data: tuple[Manifest, str]
) -> None:
    manifest, _ = data
    shards = manifest.of_split("train")
    assert len(shards) > 5
    joined = np.concatenate([np.frombuffer(store.get(s.data.key), "<u2") for s in shards])
    samples = loader(store, manifest, tmp_path / "cache")
    assert samples.num_samples == (len(joined) - 1) // SEQUENCE
    batch = samples.batch(0, samples.num_samples)
    assert batch.dtype == np.int64
    assert batch.shape == (samples.num_samples, SEQUENCE + 1)
    for position, row in enumerate(batch):
        index = sample_index(position, num_samples=samples.num_samples, seed=3)
        assert row.tolist() == joined[index * SEQUENCE : (index + 1) * SEQUENCE + 1].tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 12])
def test_the_samples_of_a_step_do_not_depend_on_the_world_size(
    store: ObjectStore, tmp_path: Path, data: tuple[Manifest, str], world_size: int
) -> None:
    manifest, _ = data
    samples = loader(store, manifest, tmp_path / "cache")
    start = samples.num_samples - 5
    whole = samples.batch(start, 12)
    parts = [samples.batch(start, 12, rank=r, world_size=world_size) for r in range(world_size)]
    joined = np.empty_like(whole)
    for rank, part in enumerate(parts):
        joined[rank::world_size] = part
    assert np.array_equal(joined, whole)


def test_seeds_and_epochs_change_the_order(
    store: ObjectStore, tmp_path: Path, data: tuple[Manifest, str]
) -> None:
    manifest, _ = data
    one = loader(store, manifest, tmp_path / "cache")
    other = loader(store, manifest, tmp_path / "cache", seed=4)
    epoch = one.batch(0, one.num_samples)
    assert not np.array_equal(epoch, other.batch(0, one.num_samples))
    again = one.batch(one.num_samples, one.num_samples)
    assert not np.array_equal(epoch, again)
    assert sorted(map(bytes, epoch)) == sorted(map(bytes, again))


def test_a_split_smaller_than_a_sample_says_what_to_do(
    store: ObjectStore, tmp_path: Path, data: tuple[Manifest, str]
) -> None:
    manifest, _ = data
    samples = loader(store, manifest, tmp_path / "cache", split="validation", sequence=10**6)
    assert samples.num_samples == 0
    with pytest.raises(DataError, match=r"validation split .*data\.validation_fraction"):
        samples.batch(0, 1)


def test_a_count_of_which_a_rank_would_get_nothing_is_refused(
    store: ObjectStore, tmp_path: Path, data: tuple[Manifest, str]
) -> None:
    samples = loader(store, data[0], tmp_path / "cache")
    with pytest.raises(ValueError, match="count 2 at least the world size 3"):
        samples.batch(0, 2, rank=0, world_size=3)


def test_a_cached_shard_is_not_fetched_again_and_a_cut_one_is(
    store: ObjectStore, tmp_path: Path, data: tuple[Manifest, str]
) -> None:
    manifest, _ = data
    cache = tmp_path / "cache"
    first = loader(store, manifest, cache)
    expected = first.batch(0, first.num_samples)
    folder = cache / manifest.dataset_id
    names = {shard.name for shard in manifest.of_split("train")}
    stamps = {name: (folder / name).stat().st_mtime_ns for name in names}
    cut = sorted(names)[0]
    os.truncate(folder / cut, 10)

    again = loader(store, manifest, cache)
    assert np.array_equal(again.batch(0, again.num_samples), expected)
    refetched = {name for name in names if (folder / name).stat().st_mtime_ns != stamps[name]}
    assert refetched == {cut}
    assert not list(folder.glob("*.tmp"))


def test_a_damaged_shard_is_refused_and_leaves_nothing_in_the_cache(
    store: ObjectStore, tmp_path: Path
) -> None:
    manifest, _ = build(store, tmp_path)
    for shard in manifest.of_split("train"):
        store.put(shard.data.key, bytes(shard.data.size_bytes))
    samples = loader(store, manifest, tmp_path / "cache")
    with pytest.raises(StoreError, match=r"CRC64-NVME .* changed or damaged"):
        samples.batch(0, 1)
    folder = tmp_path / "cache" / manifest.dataset_id
    assert all(path.suffix == ".lock" for path in folder.iterdir())


PROCESS = """
import sys
from pathlib import Path
from storage.object_store import ObjectStore
from storage.records import decode
from storage.shards.loader import ShardLoader
from storage.shards.manifest import load_manifest
from storage.spec import StoreSpec

spec, key, cache = sys.argv[1:]
store = ObjectStore(decode(StoreSpec, Path(spec).read_bytes()))
loader = ShardLoader(
    store, load_manifest(store, key), split="train", sequence=128, seed=3, cache=Path(cache)
)
print(loader.batch(0, loader.num_samples).sum())
"""


def test_processes_of_one_host_share_a_cache(
    store: ObjectStore, tmp_path: Path, data: tuple[Manifest, str]
) -> None:
    manifest, key = data
    spec = tmp_path / "store.json"
    spec.write_bytes(encode(store.spec))
    command = [sys.executable, "-c", PROCESS, str(spec), key, str(tmp_path / "shared")]
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(3)
    ]
    sums = {process.communicate(timeout=60)[0] for process in processes}
    alone = loader(store, manifest, tmp_path / "own")
    assert sums == {f"{alone.batch(0, alone.num_samples).sum()}\n"}
    cached = [path for path in (tmp_path / "shared").rglob("*") if path.suffix == ".tokens"]
    assert len(cached) == len(manifest.of_split("train"))
