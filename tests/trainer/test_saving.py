"""Saves in the background: of the step they name, in nobody's way, and told once they stand."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage.checkpoint_records import Commit
from storage.checkpoints.buffers import BufferFolder
from storage.checkpoints.commits import counting_commits
from storage.job import JobContext, JobDescription, RankIdentity
from storage.records import ExitCode, Stage
from tests.trainer.distributed import RankProcess, run_distributed_test, start_ranks
from tests.trainer.jobs import TINY, Bench, Left, run_job
from tests.trainer.test_loop import close, curve, run_and_be_signalled
from trainer.spec import TrainSpec

pytestmark = [pytest.mark.distributed, pytest.mark.s3]

SIDECAR = "storage.checkpoints.flusher"
DEADLINE_S = 60.0


def saving(steps: int = 8, **checkpoint: Any) -> TrainSpec:
    """As TINY, with these checkpoints and a validation at the end alone."""
    changed = {"steps": steps, "checkpoint": checkpoint, "validate_every_steps": 1000}
    return TrainSpec.model_validate(TINY.model_dump() | changed)


def another(bench: Bench, name: str) -> Bench:
    return replace(bench, run=f"{bench.run}-{name}", folder=bench.folder / name)


def commits(bench: Bench) -> dict[int, Commit]:
    """By step, the newest first."""
    return {commit.step: commit for commit in counting_commits(bench.ledger())}


def checksums(commit: Commit) -> list[str]:
    return [file.crc64nvme for file in commit.files]


def said(job: JobDescription, rank: int = 0) -> str:
    return (job.folder / f"rank.{rank}.log").read_text()


def run_logged(identity: RankIdentity, job: JobDescription, copy_s: float = 0.0) -> Left:
    """As `run_job`, with its words in a file; no tensor is copied at once, and the copy is slow."""
    from storage.checkpoints import staging

    def slow_copy(self: Any) -> None:
        time.sleep(copy_s)
        copy(self)

    copy = staging._Copy.copy
    staging._Copy.copy = slow_copy  # type: ignore[method-assign]
    staging.SMALL_BYTES = 0
    job.folder.mkdir(parents=True, exist_ok=True)
    sys.stdout = (job.folder / f"rank.{identity.rank}.log").open("w", buffering=1)
    return run_job(identity, job)


def flush(identity: RankIdentity, job: JobDescription, over: Path) -> None:
    """The sidecar, which leaves when there is a file that says that the ranks are over."""
    from storage.checkpoints import flusher

    leave = threading.Event()

    def look() -> None:
        wait_until(over.exists)
        leave.set()

    threading.Thread(target=look, daemon=True).start()
    flusher.run(JobContext(job, identity), leave)


@contextmanager
def running(*groups: list[RankProcess]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in [each for group in groups for each in group]:
            process.kill()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_come_to(job: JobDescription, step: int) -> Callable[[], bool]:
    return lambda: job.metrics_file.exists() and f'"step": {step},' in job.metrics_file.read_text()


def test_a_snapshot_is_of_its_step_and_changes_nothing_even_if_the_flusher_is_stopped(
    bench: Bench,
) -> None:
    """A copy takes longer than a step's forward and backward pass, so that the update waits."""
    unsaved, stopped = another(bench, "unsaved"), another(bench, "stopped")
    run_distributed_test(run_job, 2, unsaved.job(saving(10, every_steps=1000)))
    run_distributed_test(run_and_be_signalled, 2, stopped.job(saving(10)), 1, "train", 3)
    job = bench.job(saving(10, every_steps=3))
    run_distributed_test(run_logged, 2, job, 0.3)

    assert curve(bench.metrics(1)) == curve(unsaved.metrics(1))
    assert list(commits(unsaved)) == [10]
    assert checksums(commits(bench)[3]) == checksums(commits(stopped)[3])
    assert checksums(commits(bench)[10]) == checksums(commits(unsaved)[10])
    assert "checkpoints every 3 steps: 2 buffers of " in said(job)
    assert "checkpoint_s" in bench.metrics(1)[3]["split"]

    held = another(bench, "held")
    job = replace(held.job(saving(10, every_steps=3)), sidecar=SIDECAR)
    over = bench.folder / "over"
    flusher = start_ranks(flush, 1, job, over)
    os.kill(flusher[0].pid, signal.SIGSTOP)
    ranks = start_ranks(run_logged, 2, job)
    with running(ranks, flusher):
        wait_until(has_come_to(job, 10))
        time.sleep(0.5)
        assert "committed" not in said(job)
        assert commits(held) == {}
        os.kill(flusher[0].pid, signal.SIGCONT)
        for rank in ranks:
            good, left = rank.outcome()
            assert good, left
            assert (left.code, left.outputs["commits"]) == (ExitCode.DONE, 3)
        over.touch()
        assert flusher[0].outcome() == (True, None)
    assert list(commits(held)) == [10, 6, 3]
    for step in (3, 10):
        assert checksums(commits(held)[step]) == checksums(commits(bench)[step])
    assert said(job).count("the save of step 9 waits: on 2 of 2 ranks no buffer is free") == 1
    assert said(job).count("committed step") == 3
    assert curve(held.metrics(1)) == curve(unsaved.metrics(1))
    assert not BufferFolder.of_job(job, node="n1").path.exists()


def memory_of(bench: Bench) -> str:
    """Where none who starts a job on this host takes anything for the leftover of a dead one."""
    memory = bench.folder / "memory"
    memory.mkdir()
    return str(memory)


def test_a_last_save_that_does_not_come_to_stand_is_an_error(bench: Bench) -> None:
    """There is no flusher at all. What it finds when it comes is committed, curve and all."""
    spec = saving(every_steps=3, buffers=1, last_save_timeout_s=0.5, buffer_dir=memory_of(bench))
    job = replace(bench.job(spec), sidecar=SIDECAR)
    for left in run_distributed_test(run_logged, 2, job):
        assert left.code == ExitCode.STORAGE
        assert "step 8 is not committed" in left.message
        assert "train.checkpoint.last_save_timeout_s 0.5" in left.message
    assert commits(bench) == {}

    run_distributed_test(flush, 1, job, bench.folder)
    assert list(commits(bench)) == [3]
    assert [line["step"] for line in bench.metrics(1)][:3] == [1, 2, 3]


def test_what_a_rank_had_sealed_when_it_was_killed_is_committed_and_resumed_from(
    bench: Bench,
) -> None:
    spec = saving(steps=10_000, every_steps=3, buffer_dir=memory_of(bench))
    job = replace(bench.job(spec), sidecar=SIDECAR)
    folder = BufferFolder.of_job(job, node="n1")
    ranks = start_ranks(run_job, 2, job)
    with running(ranks):
        wait_until(lambda: folder.path.exists() and len(folder.sealed()) == 4)
    first, *_, newest = [sealed.facts.step for sealed in folder.sealed()]
    run_distributed_test(flush, 1, job, bench.folder)
    assert list(commits(bench)) == [newest, first]
    assert len(bench.metrics(1)) >= newest

    job = bench.job(saving(newest + 1), attempt=2)
    (left,) = run_distributed_test(run_job, 1, job)
    assert (left.code, left.outputs["final_step"]) == (ExitCode.DONE, newest + 1)
    second = bench.ledger().attempt(Stage.TRAIN, 2)
    assert second is not None
    assert second.resume is not None
    assert second.resume.source is not None
    assert second.resume.source.step == newest


def run_and_be_closed(identity: RankIdentity, bench: Bench, job: JobDescription) -> Left:
    """As `run_job`; the attempt is closed during the third step."""
    from trainer.step import Stepper

    train = Stepper.train

    def closing(self: Stepper, *args: Any, step: int, **others: Any) -> Any:
        if step == 3 and identity.rank == 0:
            close(bench, job)
        return train(self, *args, step=step, **others)

    Stepper.train = closing  # type: ignore[method-assign]
    return run_job(identity, job)


def test_an_attempt_that_is_closed_leaves_by_itself_and_commits_nothing_more(
    bench: Bench,
) -> None:
    job = bench.job(saving(steps=100_000, every_steps=4))
    for left in run_distributed_test(run_and_be_closed, 2, bench, job):
        assert left.code == ExitCode.FENCED
    assert commits(bench) == {}


def test_saves_by_time_and_by_what_they_cost(bench: Bench) -> None:
    """An interval shorter than any step makes each step due; auto's, a first save and the last."""
    by_time, auto = another(bench, "time"), another(bench, "auto")
    run_distributed_test(run_logged, 2, by_time.job(saving(every_s=1e-6)))
    steps = list(commits(by_time))
    assert (steps[-1], steps[0]) == (1, 8)

    job = auto.job(saving(steps=12, auto=True))
    run_distributed_test(run_logged, 1, job)
    assert list(commits(auto)) == [12, 8]
    assert "Young/Daly from " in said(job)
    assert "one failure in 153.8 days" in said(job)


@pytest.mark.parametrize("place", ["/proc", "/no/such/memory"])
def test_buffers_that_cannot_be_made_are_told_before_the_first_step(
    bench: Bench, place: str
) -> None:
    job = bench.job(saving(every_steps=3, buffer_dir=place))
    for left in run_distributed_test(run_job, 2, job):
        assert left.code == ExitCode.BAD_CONFIG
        assert f"train.checkpoint.buffer_dir {place!r} must be memory that n1 may" in left.message
    assert not job.metrics_file.read_text()
    assert not Path("/no").exists()


def run_and_die(identity: RankIdentity, job: JobDescription, step: int, folder: Path) -> Left:
    """As `run_job`; all ranks are gone in this step, once the save before it is on the disk."""
    from trainer.step import Stepper

    train = Stepper.train

    def dying(self: Stepper, *args: Any, **others: Any) -> Any:
        if others["step"] == step:
            done = f"**/{step - 1:012d}.*/done.*.json"
            while len(list(folder.glob(done))) < identity.world_size:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return train(self, *args, **others)

    Stepper.train = dying  # type: ignore[method-assign]
    return run_job(identity, job)


def test_a_run_goes_on_from_its_disk_where_the_store_has_nothing_as_new(bench: Bench) -> None:
    """To the bit, and what follows is committed in the store as ever."""
    folder = bench.folder / "disk"
    folder.mkdir()
    train = saving(every_steps=1000, disk={"folder": str(folder), "every_steps": 3})
    whole = another(bench, "whole")
    run_distributed_test(run_job, 2, whole.job(saving(every_steps=1000)))
    for rank in start_ranks(run_and_die, 2, bench.job(train), 7, folder):
        assert rank.exit_code() == -signal.SIGKILL
    assert commits(bench) == {}
    run_distributed_test(run_job, 2, bench.job(train, attempt=2))
    second = bench.ledger().attempt(Stage.TRAIN, 2)
    assert second is not None
    assert second.resume is not None
    assert second.resume.source is not None
    assert (second.resume.source.attempt, second.resume.source.step) == (1, 6)
    assert curve(bench.metrics(2)) == curve(whole.metrics(1))[6:]
    assert checksums(commits(bench)[8]) == checksums(commits(whole)[8])


def test_a_run_that_finds_its_last_step_on_its_disk_commits_it(bench: Bench) -> None:
    """Whoever saved it there was killed before the store had it."""
    folder = bench.folder / "disk"
    folder.mkdir()
    checkpoint = {"every_steps": 1000, "disk": {"folder": str(folder), "every_steps": 3}}
    whole = another(bench, "whole")
    run_distributed_test(run_job, 2, whole.job(saving(every_steps=6)))
    for rank in start_ranks(run_and_die, 2, bench.job(saving(**checkpoint)), 7, folder):
        assert rank.exit_code() == -signal.SIGKILL
    for left in run_distributed_test(run_job, 2, bench.job(saving(6, **checkpoint), attempt=2)):
        assert (left.code, left.outputs["commits"]) == (ExitCode.DONE, 1)
    assert [(one.attempt, step) for step, one in commits(bench).items()] == [(2, 6)]
    assert checksums(commits(bench)[6]) == checksums(commits(whole)[6])
    for left in run_distributed_test(run_job, 2, bench.job(saving(6, **checkpoint), attempt=3)):
        assert (left.code, left.outputs["commits"]) == (ExitCode.DONE, 0)
