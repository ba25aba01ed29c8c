import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slurm.peers import Peers
from slurm.rank import watched
from storage.job import JobContext, JobDescription, RankIdentity
from storage.records import ExitCode, Stage
from tests.trainer.distributed import start_ranks
from tests.trainer.jobs import Bench
from trainer.parallel.clock import CollectiveClock
from trainer.parallel.mesh import start_process_group
from trainer.spec import WatchdogSpec
from trainer.vitals.watchdog import Watchdog, hang_limit_s

SPEC = WatchdogSpec(factor=10, floor_s=2)


def test_the_limit_grows_with_the_median_step_and_has_a_floor() -> None:
    spec = WatchdogSpec(factor=10, floor_s=60)
    assert hang_limit_s([], spec=spec) == math.inf
    assert hang_limit_s([1.0, 1.0, 500.0], spec=spec) == 60
    assert hang_limit_s([8.0, 9.0, 8.0], spec=spec) == 80


def hang(identity: RankIdentity, job: JobDescription, logs: Path, waiting: tuple[int, ...]) -> None:
    """Makes two steps, then none; the ranks in `waiting` stand in a collective."""
    sys.stderr = (logs / f"rank.{identity.rank}.log").open("w")
    collectives = CollectiveClock()
    context = JobContext(job, identity)
    start_process_group(identity, device=torch.device("cpu"), timeout_s=60)
    dist.barrier()
    with Watchdog(context, spec=SPEC, collectives=collectives) as watchdog:
        watchdog.stepped(1)
        watchdog.stepped(2)
        collectives.is_waiting = identity.rank in waiting
        time.sleep(60)


@pytest.mark.s3
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("waiting", "rank", "node"),
    [((0,), 1, "n2"), ((0, 1), None, "")],
    ids=["the stuck rank names itself", "victims name nobody"],
)
def test_a_rank_without_steps_leaves_and_says_who_is_stuck(
    bench: Bench, waiting: tuple[int, ...], rank: int | None, node: str
) -> None:
    ranks = start_ranks(hang, 2, bench.job(), bench.folder, waiting, nodes=2)
    try:
        assert [each.exit_code() for each in ranks] == [ExitCode.HANG] * 2
    finally:
        for each in ranks:
            each.kill()
    attempt = bench.ledger().attempt(Stage.TRAIN, 1)
    assert attempt is not None
    assert attempt.exit is not None
    assert (attempt.exit.code, attempt.exit.rank, attempt.exit.node) == (ExitCode.HANG, rank, node)
    assert attempt.exit.blamed_nodes == ((node,) if node else ())
    assert "no step since step 2" in attempt.exit.error
    assert "in hang" in (bench.folder / "rank.1.log").read_text()


def stop(identity: RankIdentity, job: JobDescription) -> None:
    """Rank 1 is stopped as a whole, its watchdog with it; rank 0 waits for it."""
    context, collectives = JobContext(job, identity), CollectiveClock()
    with (
        watched(context),
        context,
        Watchdog(context, spec=SPEC, collectives=collectives) as watchdog,
    ):
        assert isinstance(context.peers, Peers)
        while not context.peers.neighbours:
            time.sleep(0.05)
        watchdog.stepped(1)
        watchdog.stepped(2)
        if identity.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        collectives.is_waiting = True
        time.sleep(60)


@pytest.mark.s3
@pytest.mark.distributed
def test_a_stopped_rank_is_named_by_those_that_wait_for_it(bench: Bench) -> None:
    waiting, stopped = start_ranks(stop, 2, bench.job(), nodes=2)
    try:
        assert waiting.exit_code() == ExitCode.HANG
    finally:
        waiting.kill()
        stopped.kill()
    attempt = bench.ledger().attempt(Stage.TRAIN, 1)
    assert attempt is not None
    assert attempt.exit is not None
    assert (attempt.exit.code, attempt.exit.blamed_nodes) == (ExitCode.HANG, ("n2",))
    assert "rank 1 on n2 answers nothing" in attempt.exit.error


def pause(identity: RankIdentity, job: JobDescription) -> str:
    with Watchdog(JobContext(job, identity), spec=SPEC, collectives=CollectiveClock()) as watchdog:
        watchdog.stepped(1)
        watchdog.stepped(2)
        with watchdog.suspended():
            time.sleep(2 * SPEC.floor_s)
    return "alive"


@pytest.mark.s3
@pytest.mark.distributed
def test_a_long_save_is_no_hang(bench: Bench) -> None:
    (rank,) = start_ranks(pause, 1, bench.job())
    try:
        assert rank.outcome() == (True, "alive")
    finally:
        rank.kill()
