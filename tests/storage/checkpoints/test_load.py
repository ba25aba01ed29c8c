"""Resuming: the newest whole checkpoint on every rank, or an error; never less, never half."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pytest
import torch

from storage.checkpoint_records import Commit, CommitRef, SweepJournal
from storage.checkpoints.commits import counting_commits, newest_commit
from storage.checkpoints.load import load_newest
from storage.checkpoints.quarantine import quarantined, read_doubts
from storage.checkpoints.reader import ObjectStoreReader
from storage.errors import CheckpointError
from storage.job import JobExit
from storage.ledger import Ledger
from storage.records import ExitCode, Intent, Stage, encode
from tests.storage.checkpoints import work
from tests.storage.checkpoints.pool import RankPool

pytestmark = pytest.mark.s3


def claim(
    ledger: Ledger, attempt: int, *, floor: Commit | None = None, ceiling: int | None = None
) -> Intent:
    intent = work.make_intent(attempt, floor=None if floor is None else floor.ref, ceiling=ceiling)
    assert ledger.claim_intent(intent).won
    return intent


def saved(ledger: Ledger, steps: Iterable[int] = (10, 20)) -> list[Commit]:
    """Commits of attempt 1, by one rank; the state of each step is made by its number."""
    intent = claim(ledger, 1)
    work.load(ledger.store.spec, intent)
    return [work.save(ledger.store.spec, intent, step, float(step)) for step in steps]


def damage(ledger: Ledger, commit: Commit, file: str) -> None:
    """Flips one bit in the middle of an object, so that its size stays."""
    key = ledger.keys.save(commit.attempt, step=commit.step, save=commit.save) + file
    body = bytearray(ledger.store.get(key))
    body[len(body) // 2] ^= 1
    ledger.store.put(key, bytes(body))


def source_of(ledger: Ledger, attempt: int) -> CommitRef | None:
    found = ledger.attempt(Stage.TRAIN, attempt)
    assert found is not None
    assert found.resume is not None
    return found.resume.source


@pytest.mark.distributed
def test_what_was_saved_comes_back_to_the_bit_on_any_number_of_ranks(
    ranks: RankPool, ledger: Ledger
) -> None:
    spec = ledger.store.spec
    first = claim(ledger, 1)
    assert [commit for commit, _ in ranks.values(work.load, spec, first)] == [None, None]
    by_two = ranks.values(work.save, spec, first, 10, 3.5)[0]
    expected = work.expected(3.5)
    assert ranks.values(work.expected, 3.5) == [expected, expected]

    second = claim(ledger, 2, floor=by_two)
    assert ranks.values(work.load, spec, second) == [(by_two, expected)] * 2
    assert source_of(ledger, 2) == by_two.ref

    third = claim(ledger, 3, floor=by_two)
    assert work.load(spec, third) == (by_two, expected)

    by_one = work.save(spec, third, 20, 4.5)
    fourth = claim(ledger, 4, floor=by_one)
    assert ranks.values(work.load, spec, fourth) == [(by_one, work.expected(4.5))] * 2


@pytest.mark.distributed
def test_a_rank_reads_no_more_bytes_than_its_share(ranks: RankPool, ledger: Ledger) -> None:
    intent = claim(ledger, 1)
    context = work.make_context(ledger.store.spec, intent)
    load_newest(context, work.make_large(), model_hash="model", dataset_id="data")
    commit = work.save_state(context, work.make_large(), step=10)
    for read, needed in ranks.values(work.bytes_read_for_large, ledger.store.spec, commit):
        assert needed <= read <= 1.05 * needed


@pytest.mark.distributed
def test_damage_that_one_rank_meets_makes_all_ranks_step_back(
    ranks: RankPool, ledger: Ledger
) -> None:
    spec = ledger.store.spec
    first = claim(ledger, 1)
    ranks.values(work.load, spec, first)
    older, newer = (ranks.values(work.save, spec, first, step, step / 8)[0] for step in (10, 20))
    damage(ledger, newer, "data.1.0.bin")
    second = claim(ledger, 2, floor=newer)
    expected = work.expected(10 / 8)
    assert ranks.values(work.load, spec, second) == [(older, expected)] * 2
    resume = ledger.attempts(Stage.TRAIN)[1].resume
    assert resume is not None
    assert resume.source == older.ref
    (reason,) = resume.passed
    assert reason.startswith("the checkpoint of step 20 (attempt 1")
    assert "data.1.0.bin" in reason


@pytest.mark.distributed
def test_an_attempt_that_has_resumed_already_is_fenced_on_every_rank(
    ranks: RankPool, ledger: Ledger
) -> None:
    first = claim(ledger, 1)
    ranks.values(work.load, ledger.store.spec, first)
    answers = ranks.run(work.load, ledger.store.spec, first)
    assert [answer.kind for answer in answers] == ["JobExit", "JobExit"]


@pytest.mark.parametrize("file", ["data.0.0.bin", "metadata.json"])
def test_a_flipped_bit_is_stepped_back_from(ledger: Ledger, file: str) -> None:
    older, newer = saved(ledger)
    damage(ledger, newer, file)
    commit, state = work.load(ledger.store.spec, claim(ledger, 2, floor=newer))
    assert commit == older
    assert state == work.expected(10.0)


@pytest.mark.parametrize("file", ["data.0.0.bin", "metadata.json"])
def test_an_object_that_is_gone_or_cut_short_is_stepped_back_from(
    ledger: Ledger, file: str
) -> None:
    older, newer, newest = saved(ledger, (10, 20, 30))
    folders = [
        ledger.keys.save(1, step=commit.step, save=commit.save) for commit in (newer, newest)
    ]
    ledger.store.put(folders[0] + file, ledger.store.get(folders[0] + file)[:-1])
    ledger.store.delete([folders[1] + file])
    commit, _ = work.load(ledger.store.spec, claim(ledger, 2, floor=newest))
    assert commit == older


def test_a_run_whose_checkpoints_are_all_damaged_stops_and_names_each(ledger: Ledger) -> None:
    commits = saved(ledger)
    for commit in commits:
        damage(ledger, commit, "data.0.0.bin")
    with pytest.raises(CheckpointError, match="none of them can be loaded") as caught:
        work.load(ledger.store.spec, claim(ledger, 2, floor=commits[-1]))
    assert all(f"of step {step}" in str(caught.value) for step in (10, 20))
    assert ledger.store.head(ledger.keys.attempt_record("train", 2, "resume")) is None


def test_a_save_without_a_commit_is_never_resumed_from(ledger: Ledger) -> None:
    older, _ = saved(ledger)
    ledger.store.delete([ledger.keys.commit(1, step=20)])
    commit, _ = work.load(ledger.store.spec, claim(ledger, 2, floor=older))
    assert commit == older


def test_a_floor_that_is_gone_stops_the_run_though_older_commits_are_there(
    ledger: Ledger,
) -> None:
    _, newer = saved(ledger)
    ledger.store.delete([ledger.keys.commit(1, step=20)])
    with pytest.raises(CheckpointError, match=r"step 20 \(attempt 1, save \w+\), is gone"):
        work.load(ledger.store.spec, claim(ledger, 2, floor=newer))


def test_a_floor_that_is_gone_stops_the_run_instead_of_starting_at_step_0(
    ledger: Ledger,
) -> None:
    (commit,) = saved(ledger, (10,))
    ledger.store.delete(info.key for info in ledger.store.list(ledger.keys.checkpoints))
    with pytest.raises(CheckpointError, match="is gone, and nothing newer counts"):
        work.load(ledger.store.spec, claim(ledger, 2, floor=commit))


def test_a_floor_that_is_gone_is_no_matter_where_something_newer_counts(ledger: Ledger) -> None:
    older, newer = saved(ledger)
    ledger.store.delete([ledger.keys.commit(1, step=10)])
    commit, _ = work.load(ledger.store.spec, claim(ledger, 2, floor=older))
    assert commit == newer


def test_a_run_that_had_commits_does_not_start_over_even_without_a_floor(ledger: Ledger) -> None:
    (commit,) = saved(ledger, (10,))
    work.load(ledger.store.spec, claim(ledger, 2, floor=commit))
    ledger.store.delete(info.key for info in ledger.store.list(ledger.keys.checkpoints))
    with pytest.raises(CheckpointError, match="the run has commits"):
        work.load(ledger.store.spec, claim(ledger, 3))


def test_a_ceiling_is_honoured_and_zero_means_a_fresh_start(ledger: Ledger) -> None:
    older, newer = saved(ledger)
    commit, _ = work.load(ledger.store.spec, claim(ledger, 2, floor=newer, ceiling=15))
    assert commit == older
    with pytest.raises(CheckpointError, match="with a ceiling at step 5"):
        work.load(ledger.store.spec, claim(ledger, 3, floor=older, ceiling=5))
    commit, _ = work.load(ledger.store.spec, claim(ledger, 4, floor=older, ceiling=0))
    assert commit is None
    assert source_of(ledger, 4) is None


def test_a_journaled_save_is_passed_over(ledger: Ledger) -> None:
    older, newer = saved(ledger)
    journal = SweepJournal(sweep="s", refs=(newer.ref,), at=datetime.now(UTC))
    ledger.store.put(ledger.keys.sweep("s"), encode(journal))
    commit, _ = work.load(ledger.store.spec, claim(ledger, 2, floor=older))
    assert commit == older


def test_the_marker_is_put_before_the_journals_are_read_and_names_what_may_be_read(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = saved(ledger)
    context = work.make_context(ledger.store.spec, claim(ledger, 2, floor=commits[-1]))
    calls: list[str] = []
    put, listing = context.store.put, context.store.list

    def recorded_put(key: str, body: bytes) -> None:
        calls.append(f"put {key}")
        put(key, body)

    def recorded_list(prefix: str) -> Any:
        calls.append(f"list {prefix}")
        return listing(prefix)

    monkeypatch.setattr(context.store, "put", recorded_put)
    monkeypatch.setattr(context.store, "list", recorded_list)
    state = work.make_state(seed=-1.0)
    load_newest(context, state, model_hash="model", dataset_id="data")
    marker = ledger.keys.attempt_record("train", 2, "loading")
    assert f"list {ledger.keys.sweeps}" in calls[calls.index(f"put {marker}") :]
    body = ledger.store.get(marker).decode()
    assert all(commit.save in body for commit in commits)


@pytest.mark.parametrize(
    ("model_hash", "dataset_id", "said"),
    [
        ("other", "data", "saved with model 'model', this job has 'other'"),
        ("model", "more", "saved with data set 'data', this job has 'more'"),
    ],
)
def test_a_checkpoint_of_another_model_or_data_set_is_an_error_with_both_values(
    ledger: Ledger, model_hash: str, dataset_id: str, said: str
) -> None:
    commit = saved(ledger)[-1]
    context = work.make_context(ledger.store.spec, claim(ledger, 2, floor=commit))
    state = work.make_state(seed=-1.0)
    with pytest.raises(CheckpointError, match=said):
        load_newest(context, state, model_hash=model_hash, dataset_id=dataset_id)


def test_a_state_that_does_not_fit_is_an_error_and_no_step_back(ledger: Ledger) -> None:
    commit = saved(ledger)[-1]
    context = work.make_context(ledger.store.spec, claim(ledger, 2, floor=commit))
    state = work.make_state(seed=-1.0) | {"flags": torch.zeros(4, dtype=torch.bool)}
    with pytest.raises(CheckpointError, match=r"'flags' is bool \[3\] in the checkpoint"):
        load_newest(context, state, model_hash="model", dataset_id="data")
    assert ledger.store.head(ledger.keys.attempt_record("train", 2, "resume")) is None


@pytest.mark.distributed
def test_the_hosts_that_could_not_load_a_checkpoint_leave_their_word(
    ranks: RankPool, ledger: Ledger
) -> None:
    spec = ledger.store.spec
    first = claim(ledger, 1)
    ranks.values(work.load, spec, first)
    _, newer = (ranks.values(work.save, spec, first, step, step / 8)[0] for step in (10, 20))
    damage(ledger, newer, "data.1.0.bin")
    second = claim(ledger, 2, floor=newer)
    ranks.values(work.load, spec, second, "n7")
    (said,) = read_doubts(ledger)
    assert (said.ref, said.host, said.attempt) == (newer.ref, "n7", 2)
    assert said.fault.startswith("rank 1: ")
    assert quarantined(ledger) == {}


def test_what_a_sweep_deletes_while_it_is_read_is_no_reason_to_doubt_it(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweeper that planned long ago deletes the data; its journal was there before."""
    older, newer = saved(ledger)
    context = work.make_context(ledger.store.spec, claim(ledger, 2, floor=older))
    read = ObjectStoreReader.read_metadata

    def swept_first(reader: ObjectStoreReader) -> Any:
        monkeypatch.undo()
        journal = SweepJournal(sweep="s", refs=(newer.ref,), at=datetime.now(UTC))
        ledger.store.put(ledger.keys.sweep("s"), encode(journal))
        folder = ledger.keys.save(1, step=20, save=newer.save)
        ledger.store.delete(info.key for info in ledger.store.list(folder))
        return read(reader)

    monkeypatch.setattr(ObjectStoreReader, "read_metadata", swept_first)
    state = work.make_state(seed=-1.0)
    assert load_newest(context, state, model_hash="model", dataset_id="data") == older
    assert read_doubts(ledger) == ()


def test_a_zombie_that_goes_on_saving_changes_nothing_for_its_successor_or_the_next(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempt 1 was cut off with its step 30 half done; 2 has taken over from 20 when it wakes."""
    spec = ledger.store.spec
    first = claim(ledger, 1)
    work.load(spec, first)
    _, taken = (work.save(spec, first, step, float(step)) for step in (10, 20))
    second = claim(ledger, 2, floor=taken)
    assert work.load(spec, second) == (taken, work.expected(20.0))
    newest = work.save(spec, second, 25, 25.0)

    with pytest.raises(JobExit, match="was closed or replaced"):
        work.save(spec, first, 30, 30.0)
    with monkeypatch.context() as before_the_successor:
        # It asked whether it is fenced just before there was a successor.
        before_the_successor.setattr(Ledger, "is_superseded", lambda *_: False)
        for step in (21, 30, 1000):
            assert work.save(spec, first, step, float(step)).attempt == 1
    assert newest_commit(ledger) == newest.ref
    later = work.save(spec, second, 30, 30.5)
    third = claim(ledger, 3, floor=later)
    assert work.load(spec, third) == (later, work.expected(30.5))
    assert [commit.ref for commit in counting_commits(ledger)][:3] == [
        later.ref,
        newest.ref,
        taken.ref,
    ]


def test_an_attempt_that_was_replaced_while_it_loaded_takes_nothing_over(ledger: Ledger) -> None:
    (commit,) = saved(ledger, (10,))
    second = claim(ledger, 2, floor=commit)
    claim(ledger, 3, floor=commit)
    with pytest.raises(JobExit) as caught:
        work.load(ledger.store.spec, second)
    assert caught.value.code is ExitCode.FENCED
    assert ledger.store.head(ledger.keys.attempt_record("train", 2, "resume")) is None


def test_a_lost_resume_record_has_the_code_for_fenced(ledger: Ledger) -> None:
    intent = claim(ledger, 1)
    work.load(ledger.store.spec, intent)
    with pytest.raises(JobExit) as caught:
        work.load(ledger.store.spec, intent)
    assert caught.value.code is ExitCode.FENCED
