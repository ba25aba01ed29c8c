"""A forked run goes on from the weights of another run, and leaves that run as it was."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from storage.checkpoint_records import CommitRef
from storage.checkpoints.commits import counting_commits
from storage.records import RunRecord, new_nonce
from tests.trainer.distributed import run_distributed_test
from tests.trainer.jobs import TINY, Bench, run_job
from trainer.spec import TrainSpec

pytestmark = [pytest.mark.distributed, pytest.mark.s3]


def changed(**fields: Any) -> TrainSpec:
    return TrainSpec.model_validate(TINY.model_dump() | fields)


def fork(bench: Bench, point: CommitRef) -> Bench:
    """A run that says it was forked from `bench` at this commit."""
    child = replace(bench, run=f"{bench.run}-fork", folder=bench.folder / "fork")
    record = RunRecord(
        run=child.run,
        forked_from=bench.run,
        fork_point=point,
        spec={},
        code="",
        git_commit=None,
        git_dirty=None,
        store_probe={},
        nonce=new_nonce(),
        at=datetime.now(UTC),
    )
    assert child.ledger().claim_run(record).won
    return child


def test_a_fork_goes_on_with_weights_and_step_and_takes_its_samples_from_the_first(
    bench: Bench,
) -> None:
    run_distributed_test(run_job, 1, bench.job(changed(steps=30)))
    point = counting_commits(bench.ledger())[0].ref
    child = fork(bench, point)
    train = changed(steps=34, seed=7, global_batch=4)
    (rank,) = run_distributed_test(run_job, 1, child.job(train))

    assert (rank.code, rank.outputs["final_step"]) == (0, 34)
    lines = child.metrics(1)
    assert [line["step"] for line in lines] == [31, 32, 33, 34]
    assert lines[0]["loss"] < bench.metrics(1)[0]["loss"] - 1
    newest = counting_commits(child.ledger())[0]
    assert (newest.step, newest.samples_consumed, newest.samples_hash) == (34, 16, ":0-16")
    assert counting_commits(bench.ledger())[0].ref == point

    second = changed(steps=36, seed=7, global_batch=4)
    (rank,) = run_distributed_test(run_job, 1, child.job(second, attempt=2))
    assert [line["step"] for line in child.metrics(2)] == [35, 36]


def test_a_fork_point_that_is_gone_is_never_replaced_by_step_0(bench: Bench) -> None:
    child = fork(bench, CommitRef(step=8, attempt=1, save="gone"))
    with pytest.raises(AssertionError, match=r"CheckpointError: .* is gone"):
        run_distributed_test(run_job, 1, child.job())
    assert counting_commits(child.ledger()) == ()
