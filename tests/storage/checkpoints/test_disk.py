"""The disk tier: nearer and newer where it is whole, and never believed where it is not."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from storage.checkpoint_records import Commit, CommitRef, Resume
from storage.checkpoints.buffers import BufferFolder, Tier
from storage.checkpoints.disk import Disk
from storage.checkpoints.flusher import Flusher
from storage.checkpoints.load import load_newest
from storage.checkpoints.staging import Stager
from storage.errors import ObjectMissing, StoreError
from storage.job import JobContext
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.records import Intent
from storage.spec import StoreSpec
from tests.storage.checkpoints import work
from tests.storage.checkpoints.facts import make_facts
from tests.storage.checkpoints.pool import RankPool

BOTH = (Tier.DISK, Tier.STORE)


def context_of(spec: StoreSpec, intent: Intent, folder: Path) -> JobContext:
    context = work.make_context(spec, intent)
    payload = {
        "train": {
            "checkpoint": {"buffer_dir": "/dev/shm", "disk": {"folder": str(folder)}},
        }
    }
    node = f"n{context.identity.rank}"
    identity = replace(context.identity, local_rank=0, node=node)
    return JobContext(replace(context.job, payload=payload), identity)


def save_to(
    spec: StoreSpec, intent: Intent, folder: Path, saves: list[tuple[int, tuple[Tier, ...]]]
) -> None:
    """Every rank stages its part of each save and flushes it, as the flusher of its node."""
    context = context_of(spec, intent, folder)
    world_size = context.identity.world_size
    buffers = BufferFolder.of_job(context.job, node=context.identity.node)
    leave = threading.Event()
    leave.set()
    with buffers.held():
        for step, tiers in saves:
            state = work.make_state(seed=float(step))
            stager = Stager(buffers)
            stager.prepare(state)
            stager.begin(state, make_facts(step, world_size=world_size), tiers=tiers)
            stager.close()
            Flusher(context, buffers, leave).work()
        buffers.remove()


def load_from(
    spec: StoreSpec, intent: Intent, folder: Path
) -> tuple[Commit | None, dict[str, Any]]:
    state = work.make_state(seed=-1.0)
    context = context_of(spec, intent, folder)
    commit = load_newest(context, state, model_hash="model", dataset_id="data")
    return commit, work.whole(state)


def node_local(folder: Path) -> Path:
    own = folder / f"node{dist.get_rank() if dist.is_initialized() else 0}"
    own.mkdir(exist_ok=True)
    return own


def save_on_own_disk(
    spec: StoreSpec, intent: Intent, folder: Path, saves: list[tuple[int, tuple[Tier, ...]]]
) -> None:
    save_to(spec, intent, node_local(folder), saves)


def load_from_own_disk(
    spec: StoreSpec, intent: Intent, folder: Path, shift: int = 0
) -> tuple[Commit | None, dict[str, Any]]:
    """With `shift` every rank is on a node of another one than when it saved."""
    node = (dist.get_rank() + shift) % dist.get_world_size()
    return load_from(spec, intent, folder / f"node{node}")


@pytest.fixture
def begun(ledger: Ledger) -> Intent:
    """The first attempt, which has resumed from nothing."""
    intent = work.make_intent(1)
    assert ledger.claim_intent(intent).won
    claim_resume(ledger, intent, None)
    return intent


def claim_resume(ledger: Ledger, intent: Intent, source: CommitRef | None) -> None:
    record = Resume(source=source, world_size=2, nonce="n", at=datetime.now(UTC))
    assert ledger.claim_resume(intent, record).won


def follow(ledger: Ledger, attempt: int = 2) -> Intent:
    intent = work.make_intent(attempt)
    assert ledger.claim_intent(intent).won
    return intent


def objects(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.s3
@pytest.mark.distributed
def test_a_newer_save_on_disk_is_resumed_from_and_recorded(
    ranks: RankPool, ledger: Ledger, begun: Intent, tmp_path: Path
) -> None:
    spec = ledger.store.spec
    ranks.values(save_to, spec, begun, tmp_path, [(2, BOTH), (3, (Tier.DISK,))])
    later = follow(ledger)
    for commit, state in ranks.values(load_from, spec, later, tmp_path):
        assert (commit.step, commit.attempt, commit.samples_consumed) == (3, 1, 24)
        assert state == ranks.values(work.expected, 3.0)[0]
    resumed = ledger.attempt(later.stage, 2)
    assert resumed is not None
    assert resumed.resume is not None
    assert resumed.resume.from_disk
    assert resumed.resume.source == CommitRef(step=3, attempt=1, save="save3")


@pytest.mark.s3
@pytest.mark.distributed
def test_of_the_same_save_the_nearer_copy_is_read(
    ranks: RankPool, ledger: Ledger, begun: Intent, tmp_path: Path
) -> None:
    """The store's data are gone, which nobody notices who does not read them."""
    spec = ledger.store.spec
    ranks.values(save_to, spec, begun, tmp_path, [(2, BOTH)])
    data = [info.key for info in ledger.store.list(ledger.keys.attempt_saves(1))]
    assert ledger.store.delete(data) == ()
    commit, state = ranks.values(load_from, spec, follow(ledger), tmp_path)[0]
    assert commit.step == 2
    assert state == ranks.values(work.expected, 2.0)[0]


@pytest.mark.s3
def test_a_run_without_commits_goes_on_from_disk_again_and_without_the_disk_from_nothing(
    ledger: Ledger, begun: Intent, tmp_path: Path
) -> None:
    """Nothing was ever committed, so there is nothing that is missed."""
    spec = ledger.store.spec
    save_to(spec, begun, tmp_path, [(3, (Tier.DISK,))])
    for attempt in (2, 3):
        commit, state = load_from(spec, follow(ledger, attempt), tmp_path)
        assert commit is not None
        assert (commit.step, commit.attempt) == (3, 1)
        assert state == work.expected(3.0)
    empty = tmp_path / "another"
    empty.mkdir()
    commit, _ = load_from(spec, follow(ledger, 4), empty)
    assert commit is None


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


@pytest.mark.s3
@pytest.mark.parametrize(
    ("harm", "name"),
    [
        (flip, "data.0.0.bin"),
        (flip, "done.0.json"),
        (Path.unlink, "data.0.0.bin"),
        (Path.unlink, "done.0.json"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "data.0.0.bin"),
    ],
    ids=["byte", "record", "file", "part", "cut"],
)
def test_what_is_not_whole_on_disk_leads_back_to_the_store(
    ledger: Ledger, begun: Intent, tmp_path: Path, *, harm: Callable[[Path], object], name: str
) -> None:
    spec = ledger.store.spec
    save_to(spec, begun, tmp_path, [(2, (Tier.STORE,)), (3, (Tier.DISK,))])
    (path,) = tmp_path.rglob(name)
    harm(path)
    (tmp_path / ledger.keys.checkpoints / "data" / "0005").mkdir()
    (tmp_path / ledger.keys.checkpoints / "data" / "0005" / "000000009999.x").write_text("stray")
    commit, state = load_from(spec, follow(ledger), tmp_path)
    assert commit is not None
    assert commit.step == 2
    assert state == work.expected(2.0)


@pytest.mark.s3
@pytest.mark.distributed
def test_a_zombies_save_on_a_shared_disk_is_inert(
    ranks: RankPool, ledger: Ledger, begun: Intent, tmp_path: Path
) -> None:
    """Attempt 1 goes on saving although attempt 2 took over at step 2 and has saved step 3."""
    spec = ledger.store.spec
    ranks.values(save_to, spec, begun, tmp_path, [(2, BOTH)])
    second = follow(ledger)
    claim_resume(ledger, second, CommitRef(step=2, attempt=1, save="save2"))
    ranks.values(save_to, spec, second, tmp_path, [(3, (Tier.DISK,))])
    ranks.values(save_to, spec, begun, tmp_path, [(9, (Tier.DISK,))])
    commit, _ = ranks.values(load_from, spec, follow(ledger, 3), tmp_path)[0]
    assert (commit.step, commit.attempt) == (3, 2)


@pytest.mark.s3
def test_any_number_of_zombies_saves_hides_no_save_that_counts(
    ledger: Ledger, begun: Intent, tmp_path: Path
) -> None:
    """Four attempts that were replaced go on saving, further than the one that counts."""
    spec = ledger.store.spec
    save_to(spec, begun, tmp_path, [(2, BOTH)])
    intents = [begun, *(follow(ledger, attempt) for attempt in (2, 3, 4, 5))]
    for intent in intents[1:]:
        claim_resume(ledger, intent, CommitRef(step=2, attempt=1, save="save2"))
    save_to(spec, intents[-1], tmp_path, [(3, (Tier.DISK,))])
    for zombie in reversed(intents[:-1]):
        save_to(spec, zombie, tmp_path, [(8, (Tier.DISK,)), (9, (Tier.DISK,))])
    commit, _ = load_from(spec, follow(ledger, 6), tmp_path)
    assert commit is not None
    assert (commit.step, commit.attempt) == (3, 5)


@pytest.mark.s3
@pytest.mark.distributed
def test_disks_of_the_nodes_own_serve_the_ranks_that_are_where_they_were(
    ranks: RankPool, ledger: Ledger, begun: Intent, tmp_path: Path
) -> None:
    """Put on each other's nodes, they find half of what they need, and turn to the store."""
    spec = ledger.store.spec
    saves = [(2, (Tier.STORE,)), (3, (Tier.DISK,))]
    ranks.values(save_on_own_disk, spec, begun, tmp_path, saves)
    commit, _ = ranks.values(load_from_own_disk, spec, follow(ledger), tmp_path, 1)[0]
    assert commit.step == 2


class Saves:
    """Parts of saves on a disk, put there without a run, as attempt 2 of 2 ranks finds them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._disk = Disk(folder)
        self._keys = RunKeys(prefix="", run="demo")

    def put(self, attempt: int, step: int, *ranks: int) -> None:
        for rank in ranks:
            folder = self._keys.save(attempt, step=step, save="s")
            self._disk.put(f"{folder}data.{rank}.0.bin", b"data")
            self._disk.put(f"{folder}done.{rank}.json", b"{}")

    def make_room(self, rank: int) -> None:
        self._disk.make_room(self._keys, attempt=2, rank=rank, world_size=2)

    def left(self) -> list[tuple[int, int, int]]:
        """Attempt, step, and rank of each part."""
        found = [(ref.attempt, ref.step, rank) for ref, rank in self._disk.parts(self._keys)]
        assert len(list(self._folder.rglob("data.*"))) == len(found)
        return sorted(found)


@pytest.fixture
def saves(tmp_path: Path) -> Saves:
    return Saves(tmp_path)


def test_only_the_newest_saves_of_a_rank_stay(saves: Saves) -> None:
    for step in (10, 15, 40):
        saves.put(1, step, 0, 1, 2)
    saves.make_room(0)
    assert len(saves.left()) == 9
    saves.put(2, 20, 0, 1)
    saves.make_room(0)
    saves.make_room(1)
    assert saves.left() == [(1, 15, 0), (1, 15, 1), (1, 15, 2), (2, 20, 0), (2, 20, 1)]
    saves.put(2, 30, 0)
    saves.make_room(0)
    assert saves.left() == [(1, 15, 1), (2, 20, 0), (2, 20, 1), (2, 30, 0)]
    saves.put(2, 35, 0)
    saves.make_room(0)
    assert saves.left() == [(1, 15, 1), (2, 20, 0), (2, 20, 1), (2, 30, 0), (2, 35, 0)], (
        "20 is whole"
    )
    saves.put(2, 30, 1)
    saves.make_room(1)
    saves.make_room(0)
    assert saves.left() == [(2, 20, 1), (2, 30, 0), (2, 30, 1), (2, 35, 0)]


def test_what_was_resumed_from_stays_until_its_step_is_whole_again(saves: Saves) -> None:
    saves.put(1, 10, 0, 1)
    saves.put(2, 10, 0)
    saves.make_room(0)
    assert saves.left() == [(1, 10, 0), (1, 10, 1), (2, 10, 0)]
    saves.put(2, 10, 1)
    saves.put(2, 20, 0, 1)
    saves.make_room(0)
    saves.make_room(1)
    assert saves.left() == [(2, 10, 0), (2, 10, 1), (2, 20, 0), (2, 20, 1)]


@pytest.mark.s3
def test_what_died_half_written_with_its_node_is_removed_by_the_next_to_save(
    ledger: Ledger, begun: Intent, tmp_path: Path
) -> None:
    keys = ledger.keys
    for step, names in ((3, ("data.0.0.bin", "data.0.1.bin.tmp")), (4, ("done.0.json.tmp",))):
        for name in (*names, "data.1.0.bin"):
            path = tmp_path / f"{keys.save(1, step=step, save='torn')}{name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"data")
    second = follow(ledger)
    claim_resume(ledger, second, None)
    save_to(ledger.store.spec, second, tmp_path, [(2, (Tier.DISK,))])
    torn = {path.name for path in objects(tmp_path) if path.parent.name.endswith("torn")}
    assert torn == set(), "there is but one rank now"


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.s3
def test_a_full_disk_costs_a_save_there_and_none_in_the_store(
    ledger: Ledger, begun: Intent, full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (full / "filler").write_bytes(bytes(2**20))
    save_to(ledger.store.spec, begun, full, [(2, BOTH)])
    assert [path.name for path in full.rglob("*")].count("filler") == 1
    assert objects(full) == [full / "filler"]
    assert "step 2 is not on the disk tier" in capsys.readouterr().out
    commit, _ = load_from(ledger.store.spec, follow(ledger), full)
    assert commit is not None
    assert commit.step == 2


def test_a_disk_tells_what_is_missing_from_what_fails(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    with pytest.raises(ObjectMissing):
        disk.get("a/b")
    assert disk.head("a/b") is None
    disk.put("a/b", b"12345")
    found = disk.head("a/b")
    assert found is not None
    assert (found.size_bytes, disk.get("a/b")) == (5, b"12345")
    into = memoryview(bytearray(3))
    disk.read_into("a/b", into, start=2)
    assert bytes(into) == b"345"
    with pytest.raises(StoreError, match="ends at 5, and bytes up to 6 were asked for"):
        disk.read_into("a/b", into, start=3)
    with pytest.raises(StoreError, match=r"could not write .*No such file"):
        Disk(tmp_path / "not-mounted").put("a", b"")
    with pytest.raises(StoreError, match=r"could not write .*b/c.*look at train\.checkpoint\.disk"):
        disk.put("a/b/c", b"")
