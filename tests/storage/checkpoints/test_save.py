"""Saving: a checkpoint is whole and committed, or it does not exist."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
import torch
from awscrt.checksums import crc64nvme
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch

from storage.checkpoint_records import Commit, FileRecord
from storage.checkpoints.commits import newest_commit
from storage.checkpoints.layout import METADATA_NAME, crc_text
from storage.checkpoints.metadata import JsonLoadPlanner, JsonSavePlanner
from storage.checkpoints.reader import ObjectStoreReader
from storage.checkpoints.writer import ObjectStoreWriter
from storage.errors import CheckpointError
from storage.job import JobExit
from storage.ledger import Ledger
from storage.records import Action, Decision, Diagnosis, End, ExitCode, Kind, Stage
from tests.storage.checkpoints import work
from tests.storage.checkpoints.facts import make_commit
from tests.storage.checkpoints.pool import RankPool

pytestmark = pytest.mark.s3


def start(ledger: Ledger, attempt: int = 1) -> Any:
    """An attempt that has an intent and has resumed from nothing."""
    intent = work.make_intent(attempt)
    ledger.claim_intent(intent)
    commit, _ = work.load(ledger.store.spec, intent)
    assert commit is None
    return intent


@pytest.mark.distributed
def test_a_commit_names_every_object_with_its_size_and_checksum(
    ranks: RankPool, ledger: Ledger
) -> None:
    intent = start(ledger)
    commits = ranks.values(work.save, ledger.store.spec, intent, 10, 1.0)
    commit: Commit = commits[0]
    assert commits == [commit, commit]
    assert (commit.step, commit.attempt, commit.world_size) == (10, 1, 2)
    assert newest_commit(ledger) == commit.ref
    folder = ledger.keys.save(1, step=10, save=commit.save)
    held = {info.key for info in ledger.store.list(folder)}
    named = {file.key for file in (commit.metadata, *commit.files)}
    assert held == named | {f"{folder}done.{rank}.json" for rank in range(2)}
    for file in (commit.metadata, *commit.files):
        body = ledger.store.get(file.key)
        assert (len(body), crc_text(crc64nvme(body))) == (file.size_bytes, file.crc64nvme)


@pytest.mark.distributed
def test_nothing_in_a_checkpoint_is_a_pickle(ranks: RankPool, ledger: Ledger) -> None:
    ranks.values(work.save, ledger.store.spec, start(ledger), 10, 1.0)
    for info in ledger.store.list(ledger.keys.checkpoints):
        body = ledger.store.get(info.key)
        if info.key.endswith(".json"):
            json.loads(body)
        else:
            assert info.key.endswith(".bin")
            # A pickle's protocol header, and the zip that torch.save makes.
            assert not any(body.startswith(b"\x80" + bytes([n])) for n in range(2, 6))
            assert b"PK\x03\x04" not in body


@pytest.mark.distributed
def test_a_late_rank_is_waited_for_and_a_dead_one_leaves_no_commit(
    breakable_ranks: RankPool, ledger: Ledger
) -> None:
    """Late means later than the process group's time-out, which would break the group for good."""
    intent, spec = start(ledger), ledger.store.spec
    breakable_ranks.values(work.save, spec, intent, 5, 1.0)
    breakable_ranks.values(work.set_group_timeout, 4.0)
    late = breakable_ranks.values(work.save_with_late_first_rank, spec, intent, 10, 5.0)
    assert newest_commit(ledger) == late[0].ref
    breakable_ranks.values(work.set_group_timeout, 60.0)

    first, last = breakable_ranks.run(work.save_and_die_before_done, spec, intent, 20, 2.0)
    assert last.died
    assert first.kind == "CheckpointError"
    assert "no commit at step 20: the parts of ranks 1 were not in the store" in first.error
    assert newest_commit(ledger) == late[0].ref
    following = work.make_intent(2, floor=late[0].ref)
    ledger.claim_intent(following)
    commit, state = work.load(spec, following)
    assert commit == late[0]
    assert state == work.expected(1.0)


@pytest.mark.distributed
def test_a_foreign_commit_at_the_same_place_fences_every_rank(
    ranks: RankPool, ledger: Ledger
) -> None:
    intent = start(ledger)
    (commit, _) = ranks.values(work.save, ledger.store.spec, intent, 10, 1.0)
    answers = ranks.run(work.save, ledger.store.spec, intent, 10, 2.0)
    assert [answer.kind for answer in answers] == ["JobExit", "JobExit"]
    assert f"committed already, as save {commit.save}" in answers[1].error
    assert newest_commit(ledger) == commit.ref


@pytest.mark.distributed
def test_what_one_rank_cannot_save_stops_all_ranks_before_a_byte_is_written(
    ranks: RankPool, ledger: Ledger
) -> None:
    answers = ranks.run(work.save_with_object_on_last_rank, ledger.store.spec, start(ledger))
    assert [answer.kind for answer in answers] == ["CheckpointError", "CheckpointError"]
    assert all("cannot save 'object' of type object" in answer.error for answer in answers)
    assert list(ledger.store.list(ledger.keys.checkpoints)) == []


def test_a_closed_attempt_cannot_commit(ledger: Ledger) -> None:
    intent = start(ledger)
    end = End(
        diagnosis=Diagnosis(kind=Kind.LOST),
        decision=Decision(action=Action.RESUME, reason="test"),
        by="engine",
        nonce="n",
        at=datetime.now(UTC),
    )
    ledger.claim_end(intent, end)
    with pytest.raises(JobExit) as caught:
        work.save(ledger.store.spec, intent, 10, 1.0)
    assert caught.value.code is ExitCode.FENCED
    assert list(ledger.store.list(ledger.keys.commits)) == []


def test_an_attempt_that_was_replaced_cannot_commit(ledger: Ledger) -> None:
    intent = start(ledger)
    ledger.claim_intent(work.make_intent(2))
    with pytest.raises(JobExit, match="was closed or replaced; no commit at step 10"):
        work.save(ledger.store.spec, intent, 10, 1.0)


def test_a_job_of_another_stage_cannot_save(ledger: Ledger) -> None:
    intent = replace(start(ledger), stage=Stage.SMOKE)
    with pytest.raises(CheckpointError, match="a job of stage smoke cannot save"):
        work.save(ledger.store.spec, intent, 10, 1.0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_s_own_save_and_load_work_with_our_writer_and_reader(ledger: Ledger) -> None:
    """Every dtype, empty and 0-dim tensors, views, over several bounded objects."""
    dtypes = (torch.float64, torch.bfloat16, torch.float8_e5m2, torch.uint16, torch.complex64)
    state: dict[str, Any] = {
        str(dtype): torch.arange(40).reshape(5, 8).to(dtype).t() for dtype in dtypes
    } | {"empty": torch.empty(0, 3), "scalar": torch.tensor(7), "nested": {"x": [1, "a"]}}
    writer = ObjectStoreWriter(ledger.store, "any/folder/", rank=0, object_bytes=256)
    save_by_torch(state, storage_writer=writer, planner=JsonSavePlanner(), no_dist=True)
    assert len(writer.files) > 2
    commit = _commit_of(ledger, writer)
    target: dict[str, Any] = {
        name: torch.zeros_like(value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    } | {"nested": {"x": None}}
    reader = ObjectStoreReader(ledger.store, commit)
    load_by_torch(target, storage_reader=reader, planner=JsonLoadPlanner(), no_dist=True)
    assert target.pop("nested") == state.pop("nested")
    for name, value in state.items():
        assert target[name].dtype == value.dtype
        assert torch.equal(target[name].flatten(), value.flatten()), name


def _commit_of(ledger: Ledger, writer: ObjectStoreWriter) -> Commit:
    body = ledger.store.get(f"any/folder/{METADATA_NAME}")
    metadata = FileRecord(
        key=f"any/folder/{METADATA_NAME}",
        size_bytes=len(body),
        crc64nvme=crc_text(crc64nvme(body)),
    )
    return make_commit(1, metadata=metadata, files=tuple(writer.files))
