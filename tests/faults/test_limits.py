"""A site that takes few jobs of a user: what it refuses for now is waited for, not failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm.devcluster import ClusterShape, DevCluster, DevClusterUnavailable
from slurm.devcluster.config import MAX_SUBMITTED_OF_FEW
from storage.records import Kind
from tests.faults import wrappers
from tests.faults.runs import make_run
from tests.faults.sites import Site, open_site
from tests.faults.wrappers import sbatch_calls

pytestmark = [pytest.mark.slurm, pytest.mark.s3]

LIMITED = ClusterShape(
    name="he", subnet="10.98.11.0/24", num_nodes=1, gpus_per_node=0, accounting="limits"
)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    cluster = DevCluster(LIMITED)
    try:
        cluster.up()
    except DevClusterUnavailable as reason:
        pytest.skip(str(reason))
    try:
        with open_site(cluster, tmp_path_factory.mktemp("limited")) as opened:
            yield opened
    finally:
        cluster.down()


def test_a_submit_limit_is_waited_for(limited: Site) -> None:
    options = ("--parsable", "--partition=few", "--output=/dev/null", "--mem=50M")
    jobs = [
        limited.slurm("sbatch", *options, "--wrap", "sleep 300")
        for _ in range(MAX_SUBMITTED_OF_FEW)
    ]
    counting = wrappers.honest(limited.workdir / "bin")
    few = {"partition": "few"}
    run = make_run(limited, "few", on=("n1",), faulty_until=0, path=counting, cluster=few).start()
    run.until("a second refusal", lambda: len(sbatch_calls(counting)) > 1)
    assert any("QOSMaxSubmitJobPerUserLimit" in line for line in run.listener.said)
    limited.slurm("scancel", jobs[0])
    outcome = run.outcome
    assert outcome.done, outcome.story
    *refused, last = (outcome.diagnosis(one.number).kind for one in outcome.attempts)
    assert last is Kind.DONE
    assert all(kind is Kind.LIMIT for kind in refused), outcome.story
    assert all(one.start is None for one in outcome.attempts[:-1]), outcome.story
