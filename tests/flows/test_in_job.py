"""An engine as a job of a real Slurm, and ticks that take the run over from it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from flows.console import Lines
from flows.in_job import send_engine
from flows.ticking import Standing, tick
from slurm.devcluster import DevCluster
from storage.errors import SpecError
from tests.flows.own_runs import Place, a_place
from tests.flows.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.s3]

DEADLINE_S = 180.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with a_place(tmp_path_factory.mktemp("in-job")) as place:
        yield place


def test_an_engine_in_a_job_goes_back_into_the_queue_and_ticks_may_finish_its_run(
    place: Place, dev_cluster: DevCluster
) -> None:
    environ = {**os.environ, **dev_cluster.env()}

    def slurm(*words: str) -> str:
        done = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
        return done.stdout

    spec = place.spec(
        "moved",
        cluster={
            "kind": "slurm",
            "slurm_conf": environ["SLURM_CONF"],
            "partition": "dev",
            "memory_per_node": "1G",
            "time_limit_min": 10,
        },
        store={
            "embedded": {
                "host": environ["HEADRACE_DEV_HOST"],
                "directory": place.folder / "store",
            }
        },
        validation={"nodes": ["n2"]},
    )
    sent = send_engine(spec, time_limit_min=10)
    wait_for("training", lambda: place.has_begun("moved"), timeout_s=DEADLINE_S)
    slurm("scancel", "--batch", "--signal=USR2", sent.job_id)

    def is_back() -> bool:
        told = slurm("scontrol", "show", "job", "--oneliner", sent.job_id)
        return "Restarts=1 " in told and "JobState=PENDING" in told

    wait_for("the engine to be requeued", is_back, timeout_s=DEADLINE_S)
    assert f"job {sent.job_id} goes back into the queue" in sent.log.read_text()
    slurm("scancel", sent.job_id)

    going_on = tick(spec, eyes=Lines(), stay_s=0.0)
    assert going_on.standing is Standing.GOING_ON
    assert "train: attempt 1" in going_on.message
    place.let_end("moved")
    deadline = time.monotonic() + DEADLINE_S
    while tick(spec, eyes=Lines(), stay_s=0.0).standing is Standing.GOING_ON:
        assert time.monotonic() < deadline
        time.sleep(1.0)
    (attempt,) = place.attempts(spec)
    assert attempt.exit is not None
    assert attempt.exit.code == 0
    trained = slurm("sacct", "-X", "-n", "-P", "-o", "State", f"--name={attempt.intent.token}")
    assert trained.split() == ["COMPLETED"]


def test_a_cluster_without_allocations_has_no_room_for_an_engine(place: Place) -> None:
    with pytest.raises(SpecError, match=r"cluster\.kind"):
        send_engine(place.spec("nowhere"), time_limit_min=10)
