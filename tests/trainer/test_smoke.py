import statistics
from typing import Any

import pytest

from storage.job import JobDescription, RankIdentity
from storage.records import Stage
from tests.trainer.distributed import run_distributed_test
from tests.trainer.jobs import TINY, Bench, Left, run_job
from trainer.smoke import RankTimes, slowest_of
from trainer.spec import SmokeRun


def run_with_a_slow_rank(identity: RankIdentity, job: JobDescription, slow_rank: int) -> Left:
    """As `run_job`; the model of one rank takes its time."""
    import time

    from trainer.model import Decoder

    forward = Decoder.forward

    def slow_forward(self: Decoder, *args: Any) -> Any:
        time.sleep(1.0 * (identity.rank == slow_rank))
        return forward(self, *args)

    Decoder.forward = slow_forward  # type: ignore[method-assign]
    return run_job(identity, job)


@pytest.mark.s3
@pytest.mark.distributed
def test_a_rung_measures_the_steps_after_the_warm_up_and_names_the_slow_rank(
    bench: Bench,
) -> None:
    """Three ranks do not divide the global batch: a rung's load is that of its ranks."""
    job = bench.job(smoke=SmokeRun(steps=5, warmup_steps=2), nodes=3)
    ranks = run_distributed_test(run_with_a_slow_rank, 3, job, 1, nodes=3)
    outputs = ranks[0].outputs
    assert (outputs["nodes"], outputs["world_size"], len(outputs["step_s"])) == (3, 3, 3)
    tokens = 3 * TINY.micro_batch * TINY.sequence
    assert outputs["tokens_per_s"] == tokens / statistics.median(outputs["step_s"])
    assert (outputs["slowest_rank"], outputs["slowest_node"]) == (1, "n2")
    assert outputs["split_s"].keys() == {"data_s", "compute_s", "comm_s", "other_s"}
    assert bench.ledger().store.get_if_exists(bench.ledger().keys.metrics(Stage.SMOKE, 1)) is None
    assert list(bench.ledger().store.list(bench.ledger().keys.checkpoints)) == []


def test_nobody_is_called_slow_where_compute_is_not_told_apart() -> None:
    times = [RankTimes(rank=0, node="n1", split={"compute_and_comm_s": 1.0})]
    assert slowest_of(times) is None
