import pytest

from tests.trainer.distributed import run_distributed_test
from tests.trainer.jobs import TINY, Bench, run_job

pytestmark = [pytest.mark.distributed, pytest.mark.s3]


def test_a_run_ends_at_its_last_step_with_the_loss_fallen(bench: Bench) -> None:
    outcomes = run_distributed_test(run_job, 2, bench.job())
    print(outcomes)
    for l in bench.metrics(1): print(l)
    assert 0
