import itertools
import os
import signal
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from storage.checkpoint_records import Commit
from storage.checkpoints.commits import counting_commits
from storage.errors import SpecError
from storage.job import JobContext, JobDescription, RankIdentity
from storage.records import Action, Decision, Diagnosis, End, ExitCode, Kind, Stage, new_nonce
from tests.ranks import ALONE
from tests.trainer.distributed import run_distributed_test
from tests.trainer.jobs import TINY, Bench, Left, run_job
from trainer.main import run
from trainer.spec import TrainSpec

pytestmark = [pytest.mark.distributed, pytest.mark.s3]

SAMPLES = TINY.steps * TINY.global_batch


def changed(**fields: Any) -> TrainSpec:
    return TrainSpec.model_validate(TINY.model_dump() | fields)


def curve(lines: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def commits(bench: Bench) -> list[Commit]:
    return list(counting_commits(bench.ledger()))


def run_and_be_signalled(
    identity: RankIdentity, job: JobDescription, signalled_rank: int, during: str, call: int
) -> Left:
    """As `run_job`; one rank alone gets USR2, in its `call`th training step or validation batch."""
    from trainer.step import Stepper

    method = getattr(Stepper, during)
    calls = itertools.count(1)

    def signalled(self: Stepper, *args: Any, **others: Any) -> Any:
        if next(calls) == call and identity.rank == signalled_rank:
            os.kill(os.getpid(), signal.SIGUSR2)
        return method(self, *args, **others)

    setattr(Stepper, during, signalled)
    return run_job(identity, job)


def test_a_run_left_on_a_signal_and_resumed_is_the_run_that_was_never_left(bench: Bench) -> None:
    """To the bit: losses, gradient norms, and the proof of the samples consumed."""
    whole = replace(bench, run=f"{bench.run}-whole", folder=bench.folder / "whole")
    undisturbed = run_distributed_test(run_job, 2, whole.job())
    left = run_distributed_test(run_and_be_signalled, 2, bench.job(), 1, "train", 3)
    resumed = run_distributed_test(run_job, 2, bench.job(attempt=2))

    assert [(each.code, each.outputs) for each in left] == [
        (ExitCode.RESUME, {"step": 3, "commits": 1})
    ] * 2
    second = bench.ledger().attempt(Stage.TRAIN, 2)
    assert second is not None
    assert second.resume is not None
    assert second.resume.source is not None
    assert (second.resume.source.attempt, second.resume.source.step) == (1, 3)

    assert curve([*bench.metrics(1), *bench.metrics(2)]) == curve(whole.metrics(1))
    assert [commit.step for commit in commits(whole)] == [8, 4]
    assert [commit.step for commit in commits(bench)] == [8, 4, 3]
    for each in (bench, whole):
        newest = commits(each)[0]
        assert (newest.samples_consumed, newest.samples_hash) == (SAMPLES, f":0-{SAMPLES}")
    for rank in resumed:
        for name in ("final_step", "train_loss", "val_loss"):
            assert rank.outputs[name] == undisturbed[0].outputs[name], name


def test_the_loss_falls_and_the_outputs_say_how_far(bench: Bench) -> None:
    (rank,) = run_distributed_test(run_job, 1, bench.job(changed(steps=30)))
    lines = bench.metrics(1)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert [line["step"] for line in lines if "val_loss" in line] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert lines[-1]["tokens"] == 30 * TINY.global_batch * TINY.sequence
    assert rank.outputs["final_step"] == 30
    assert rank.outputs["train_loss"] == lines[-1]["loss"]
    assert rank.outputs["val_loss"] == lines[-1]["val_loss"]
    assert rank.outputs["tokens_per_s"] > 0
    assert rank.outputs["commits"] == len(commits(bench)) >= 3
    assert commits(bench)[0].metrics["val_loss"] == lines[-1]["val_loss"]


def test_another_number_of_ranks_goes_on_where_the_first_stopped(bench: Bench) -> None:
    """Also one that cannot share a batch evenly, and the losses are those of one rank alone, up to
    the order of summation."""
    alone = replace(bench, run=f"{bench.run}-alone", folder=bench.folder / "alone")
    run_distributed_test(run_job, 1, alone.job())
    run_distributed_test(run_and_be_signalled, 2, bench.job(), 0, "train", 5)
    rank, *_ = run_distributed_test(run_job, 3, bench.job(attempt=2))
    assert (rank.code, rank.outputs["final_step"]) == (ExitCode.DONE, TINY.steps)
    pieces = curve([*bench.metrics(1), *bench.metrics(2)])
    for (step, loss, norm), expected in zip(pieces, curve(alone.metrics(1)), strict=True):
        assert (step, loss, norm) == pytest.approx(expected, rel=1e-4)
    newest = commits(bench)[0]
    assert (newest.attempt, newest.world_size, newest.mesh) == (2, 3, {"dp_shard": 3})
    assert newest.samples_hash == f":0-{SAMPLES}"


def test_any_number_of_ranks_trains_on_the_same_batches(bench: Bench) -> None:
    """Also one that cannot share a batch evenly, in micro-batches of any size: losses and gradients
    are those of one rank alone up to the order of summation, and of the same samples."""
    alone = replace(bench, run=f"{bench.run}-alone", folder=bench.folder / "alone")
    (expected,) = run_distributed_test(run_job, 1, alone.job())
    for ranks, micro_batch in ((3, 2), (3, 16), (4, 1)):
        name = f"{bench.run}-{ranks}-{micro_batch}"
        those = replace(bench, run=name, folder=bench.folder / name)
        job = those.job(changed(micro_batch=micro_batch))
        for left in run_distributed_test(run_job, ranks, job):
            assert left.outputs["val_loss"] == pytest.approx(expected.outputs["val_loss"], rel=1e-4)
        for got, wanted in zip(curve(those.metrics(1)), curve(alone.metrics(1)), strict=True):
            assert got == pytest.approx(wanted, rel=1e-4), name
        newest = commits(those)[0]
        assert (newest.world_size, newest.samples_hash) == (ranks, f":0-{SAMPLES}")


def test_a_signal_during_validation_is_heeded_there(bench: Bench) -> None:
    for left in run_distributed_test(run_and_be_signalled, 2, bench.job(), 1, "evaluate", 1):
        assert (left.code, left.outputs) == (ExitCode.RESUME, {"step": 4, "commits": 1})
    (commit,) = commits(bench)
    assert "val_loss" not in commit.metrics


def test_a_run_that_is_finished_already_only_says_so(bench: Bench) -> None:
    (first,) = run_distributed_test(run_job, 1, bench.job())
    (again,) = run_distributed_test(run_job, 1, bench.job(attempt=2))
    assert again.code == ExitCode.DONE
    assert again.outputs == {**first.outputs, "tokens_per_s": None, "commits": 0}
    assert [commit.attempt for commit in commits(bench)] == [1, 1]


def refused(identity: RankIdentity, job: JobDescription) -> str:
    with pytest.raises(SpecError) as error:
        run_job(identity, job)
    return str(error.value)


def test_the_order_of_samples_cannot_be_changed_in_the_middle_of_a_run(bench: Bench) -> None:
    run_distributed_test(run_and_be_signalled, 1, bench.job(), 0, "train", 3)
    (error,) = run_distributed_test(refused, 1, bench.job(changed(seed=7), attempt=2))
    assert error.startswith("train.seed 7 must stay 0")


def test_a_run_beyond_the_last_step_of_the_spec_is_no_finished_one(bench: Bench) -> None:
    """On every rank, and the run goes on as it was once the steps are raised again."""
    run_distributed_test(run_job, 2, bench.job())
    for error in run_distributed_test(refused, 2, bench.job(changed(steps=4), attempt=2)):
        assert error == (
            "train.steps 4 must be at least 8, the step that the run has committed; "
            "raise train.steps to at least 8, or give the run another name"
        )
    assert [commit.step for commit in commits(bench)] == [8, 4]
    for rank in run_distributed_test(run_job, 2, bench.job(changed(steps=9), attempt=3)):
        assert (rank.code, rank.outputs["final_step"]) == (ExitCode.DONE, 9)


def close(bench: Bench, job: JobDescription) -> None:
    end = End(
        diagnosis=Diagnosis(kind=Kind.LOST),
        decision=Decision(action=Action.RESUME, reason="lost"),
        by="test",
        nonce=new_nonce(),
        at=datetime.now(UTC),
    )
    assert bench.ledger().claim_end(job.intent, end).won


def test_an_attempt_that_was_closed_does_not_begin(bench: Bench) -> None:
    job = bench.job()
    close(bench, job)
    for left in run_distributed_test(run_job, 2, job):
        assert left.code == ExitCode.FENCED
        assert "attempt 1 was closed or replaced" in left.message
    assert commits(bench) == []


def run_and_break(identity: RankIdentity, job: JobDescription) -> Left:
    """As `run_job`; the weights of rank 1 alone are spoilt before it begins."""
    from trainer.loop import _Training

    resume = _Training._resume

    def resume_and_break(self: _Training) -> Any:
        loss = resume(self)
        if identity.rank == 1:
            for parameter in self._engine.state.parameters.values():
                parameter.data.fill_(float("nan"))
        return loss

    _Training._resume = resume_and_break  # type: ignore[method-assign]
    return run_job(identity, job)


def test_all_ranks_leave_as_diverged_when_the_loss_is_not_finite(bench: Bench) -> None:
    for left in run_distributed_test(run_and_break, 2, bench.job()):
        assert left.code == ExitCode.DIVERGED
        assert left.message.startswith("step 1: loss nan")
    assert commits(bench) == []


def test_what_cannot_work_is_refused_before_ranks_meet(bench: Bench) -> None:
    with pytest.raises(SpecError, match=r"train\.global_batch 8 .* the 9 ranks"):
        run(JobContext(bench.job(), replace(ALONE, world_size=9)))
    small = changed(model=TINY.model.model_dump() | {"vocab": 64})
    with pytest.raises(SpecError, match=r"train\.model\.vocab 64 .* 257"):
        run(JobContext(bench.job(small, attempt=2), ALONE))
    long = changed(sequence=100_000)
    with pytest.raises(SpecError, match=r"train\.sequence 100000"):
        run(JobContext(bench.job(long, attempt=3), ALONE))
