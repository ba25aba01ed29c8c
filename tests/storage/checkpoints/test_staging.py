"""A snapshot is of the moment it was begun at; what is sealed reaches the store whoever dies."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from storage.checkpoints.buffers import BufferFolder, Outcome, Result, Sealed, allocate
from storage.checkpoints.commit import commit_parts
from storage.checkpoints.commits import counting_commits
from storage.checkpoints.flush import send_part
from storage.checkpoints.flusher import Flusher
from storage.checkpoints.layout import BLOCK_BYTES, RankPart
from storage.checkpoints.sealing import decode_sealed
from storage.checkpoints.staging import SMALL_BYTES, Stager
from storage.errors import CheckpointError
from storage.job import JobContext
from storage.ledger import Ledger
from storage.records import Action, Decision, Diagnosis, End, Kind
from storage.spec import StoreSpec
from tests.storage.checkpoints import work
from tests.storage.checkpoints.facts import make_facts

LARGE = 3 * SMALL_BYTES // 4


def make_state() -> dict[str, Any]:
    return {
        "large": torch.arange(float(LARGE)),
        "buffer": torch.full((LARGE,), 2.0),
        "small": torch.tensor([1.0, 2.0]),
        "order": {"seed": 1},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[BufferFolder]:
    root = Path("/dev/shm") / f"headrace-tests-{os.getpid()}"
    root.mkdir()
    yield BufferFolder.of(token=tmp_path.name, node="n1", root=root)
    subprocess.run(["rm", "-r", root], check=True)


@pytest.fixture
def stager(folder: BufferFolder) -> Iterator[Stager]:
    made = Stager(folder)
    yield made
    made.close()


@pytest.fixture
def context(ledger: Ledger) -> JobContext:
    intent = work.make_intent(1)
    assert ledger.claim_intent(intent).won
    commit, _ = work.load(ledger.store.spec, intent)
    assert commit is None
    return work.make_context(ledger.store.spec, intent)


def snapshot(stager: Stager, state: dict[str, Any], step: int) -> None:
    stager.begin(state, make_facts(step))
    stager.finish()
    wait_for_the_seal(stager)


def wait_for_the_seal(stager: Stager) -> None:
    wait_until(lambda: stager._copy is not None and stager._copy.is_over)


def wait_until(true: Any, *, deadline_s: float = 30.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def drain(context: JobContext, folder: BufferFolder) -> list[Outcome]:
    leave = threading.Event()
    leave.set()
    Flusher(context, folder, leave).work()
    return folder.take_outcomes()


def loaded(context: JobContext, attempt: int = 2) -> dict[str, Any]:
    intent = work.make_intent(attempt)
    assert context.ledger.claim_intent(intent).won
    state: dict[str, Any] = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else {"seed": 0}
        for name, value in make_state().items()
    }
    from storage.checkpoints.load import load_newest

    later = work.make_context(context.store.spec, intent)
    load_newest(later, state, model_hash="model", dataset_id="data")
    return state


@pytest.mark.s3
def test_a_snapshot_is_of_the_moment_it_was_begun_at(
    stager: Stager, folder: BufferFolder, context: JobContext
) -> None:
    """Small tensors and those that forward changes are taken at once, the rest until `finish`."""
    state = make_state()
    stager.prepare(state, volatile=["buffer"])
    stager.begin(state, make_facts(5))
    state["buffer"].fill_(-1)
    state["small"].fill_(-1)
    state["order"]["seed"] = -1
    stager.finish()
    state["large"].fill_(-1)
    wait_for_the_seal(stager)
    assert [outcome.result for outcome in drain(context, folder)] == [Result.COMMITTED]
    found, wanted = loaded(context), make_state()
    for name in ("large", "buffer", "small"):
        assert torch.equal(found[name], wanted[name]), name
    assert found["order"] == wanted["order"]


@pytest.mark.s3
def test_a_buffer_that_is_being_sent_is_not_filled_again(
    stager: Stager, folder: BufferFolder, context: JobContext
) -> None:
    state = make_state()
    stager.prepare(state)
    for step in (1, 2):
        assert stager.is_free
        state["large"].fill_(step)
        snapshot(stager, state, step)
    assert not stager.is_free
    with pytest.raises(CheckpointError, match="no buffer is free for the snapshot of step 3"):
        stager.begin(state, make_facts(3))
    outcomes = drain(context, folder)
    assert [(outcome.step, outcome.result) for outcome in outcomes] == [
        (1, Result.COMMITTED),
        (2, Result.COMMITTED),
    ]
    assert stager.is_free
    assert [commit.step for commit in counting_commits(context.ledger)] == [2, 1]
    assert loaded(context)["large"].unique().tolist() == [2.0]


def test_a_tensor_that_was_replaced_is_not_saved_as_it_once_was(stager: Stager) -> None:
    state = make_state()
    stager.prepare(state)
    state["large"] = torch.zeros(LARGE)
    with pytest.raises(CheckpointError, match="'large' is another tensor than when the job began"):
        stager.begin(state, make_facts(1))


def test_what_could_not_be_copied_whole_is_never_sealed(
    stager: Stager, folder: BufferFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state()
    stager.prepare(state)
    stager._bound[0].source = torch.zeros(3)
    monkeypatch.setattr(stager, "_require_bound", lambda state: None)
    stager.begin(state, make_facts(1))
    with pytest.raises(CheckpointError, match="the snapshot could not be completed"):
        stager.finish()
    assert folder.sealed() == []


def test_the_flusher_finds_the_checksums_of_every_block(
    stager: Stager, folder: BufferFolder, context: JobContext
) -> None:
    state = make_state()
    stager.prepare(state)
    snapshot(stager, state, 1)
    drain(context, folder)
    keys, (commit,) = context.ledger.keys, counting_commits(context.ledger)
    done = keys.done(1, step=1, save=commit.save, rank=0)
    part = decode_sealed(RankPart, context.store.get(done))
    (chunk,) = part.layout.tensors["large"].chunks
    assert len(chunk.blocks) // 4 * 3 // 8 == -(-LARGE * 4 // BLOCK_BYTES)
    assert part.layout.tensors["small"].chunks[0].blocks == ""


def flush_for_ever(spec: StoreSpec, folder: BufferFolder) -> None:
    """A flusher as a process of its own."""
    context = work.make_context(spec, work.make_intent(1))
    with folder.flushing():
        Flusher(context, folder, threading.Event()).work()


@pytest.mark.s3
def test_a_flusher_goes_on_where_a_killed_one_was(
    stager: Stager, folder: BufferFolder, context: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with one save sent and not committed, and another not sent: both are committed."""
    state = make_state()
    stager.prepare(state)
    for step in (1, 2):
        snapshot(stager, state, step)
    first, _ = folder.sealed()
    plan = folder.plan(0)
    part = send_part(
        context.store,
        context.ledger.keys,
        attempt=1,
        facts=first.facts,
        rank=0,
        files=plan.files,
        layout=first.layout(plan),
        data=memoryview(folder.buffer(0, first.slot).read_bytes()),
    )
    folder.free(first)
    commit_parts(context.ledger, context.job.intent, first.facts, [part])
    process = get_context("spawn").Process(
        target=flush_for_ever, args=(context.store.spec, folder), daemon=True
    )
    process.start()
    wait_until(lambda: len(list(folder.path.glob("outcome.*"))) == 2, deadline_s=60)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert [(one.step, one.result) for one in folder.take_outcomes()] == [
        (1, Result.COMMITTED),
        (2, Result.COMMITTED),
    ]
    assert [commit.step for commit in counting_commits(context.ledger)] == [2, 1]


@pytest.mark.s3
def test_an_attempt_that_was_closed_is_told_so_and_commits_nothing(
    stager: Stager, folder: BufferFolder, context: JobContext
) -> None:
    end = End(
        diagnosis=Diagnosis(kind=Kind.LOST),
        decision=Decision(action=Action.RESUME, reason="lost"),
        by="test",
        nonce="n",
        at=datetime.now(UTC),
    )
    assert context.ledger.claim_end(context.job.intent, end).won
    state = make_state()
    stager.prepare(state)
    snapshot(stager, state, 1)
    (outcome,) = drain(context, folder)
    assert outcome.result is Result.FENCED
    assert counting_commits(context.ledger) == ()
    assert stager.is_free


@pytest.mark.s3
def test_a_part_that_never_comes_is_not_awaited_when_the_ranks_are_over(
    folder: BufferFolder, context: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 died before it had sealed its part: no commit, and the job is not held up."""
    monkeypatch.setattr("storage.checkpoints.flusher.LAST_PATIENCE_S", 0.2)
    with_one = Stager(folder)
    state = make_state()
    with_one.prepare(state)
    with_one.begin(state, make_facts(1, world_size=2))
    with_one.close()
    (outcome,) = drain(context, folder)
    assert outcome.result is Result.FAILED
    assert "the parts of ranks 1 were not in the store" in outcome.message
    assert counting_commits(context.ledger) == ()


def test_memory_that_does_not_hold_the_buffers_is_told_before_a_step(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
    try:
        with pytest.raises(CheckpointError, match=r"buffer of 8\.0 MiB does not fit into .*small"):
            allocate(small / "0.0.buffer", 8 * 2**20)
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_what_a_dead_job_left_is_removed_and_what_a_live_one_holds_is_not(
    folder: BufferFolder,
) -> None:
    folder.make()
    root = folder.path.parent.parent.parent
    left, live = (BufferFolder.of(token=token, node="n1", root=root) for token in ("left", "live"))
    for other in (left, live):
        with other.held():
            other.buffer(0, 0).write_bytes(b"x")
    with live.held():
        assert folder.remove_leftovers() == [left.path]
    assert not left.path.exists()
    assert live.buffer(0, 0).exists()


def test_a_snapshot_that_is_sealed_while_it_is_looked_for_is_whole(folder: BufferFolder) -> None:
    folder.make()
    record = Sealed(rank=1, slot=0, facts=make_facts(1), values={})
    folder.seal(record)
    (folder.path / "1.1.sealed.tmp1").write_text("half")
    assert folder.sealed() == [record]
    folder.free(record)
    assert folder.sealed() == folder.waiting() == []
    first = replace(record, rank=0)
    folder.seal(first)
    folder.free(first)
    assert folder.waiting() == [first]


def seal_and_be_cut_off(folder: BufferFolder) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))
    folder.seal(Sealed(rank=0, slot=0, facts=make_facts(1), values={}))


def test_a_seal_of_which_the_memory_takes_only_a_part_is_none(folder: BufferFolder) -> None:
    folder.make()
    process = get_context("fork").Process(target=seal_and_be_cut_off, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 1, "all of it fitted"
    assert folder.sealed() == []
    assert folder.is_free(0, 0)
