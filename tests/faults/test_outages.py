"""Slurm's daemons go away and come back while runs are under way: nothing fails, nothing is twice.

The short forms are part of every test run. The whole pipeline under each outage is for
`make campaign`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm.devcluster import ClusterShape, DevCluster
from storage.records import Action, Kind
from tests.faults.runs import FaultRun, Outcome, make_run
from tests.faults.sites import Site, open_site

pytestmark = [pytest.mark.slurm, pytest.mark.s3, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
ALL = ("n1", "n2", "n3", "n4")
UNACCOUNTED = ClusterShape(
    name="hf", subnet="10.98.12.0/24", num_nodes=4, cpu_quota=0.4, accounting="off"
)


@pytest.fixture(scope="module")
def unaccounted(tmp_path_factory: pytest.TempPathFactory, site: Site) -> Iterator[Site]:
    """A cluster whose site has no accounting at all."""
    cluster = DevCluster(UNACCOUNTED)
    cluster.up()
    try:
        with open_site(cluster, tmp_path_factory.mktemp("unaccounted")) as opened:
            yield opened
    finally:
        cluster.down()


@pytest.fixture(scope="module")
def unaccounted_runs(unaccounted: Site) -> dict[str, FaultRun]:
    """A run of each end; they go on while the other cluster's daemons come and go."""
    return {
        "done": make_run(unaccounted, "done", on=ALL, faulty_until=0).start(),
        "killed": make_run(unaccounted, "killed", on=ALL, ranks_per_node=2).start(
            lambda run: run.kill_rank(1)
        ),
        "memory": make_run(unaccounted, "memory", on=ALL, part="take memory").start(),
        "cancelled": make_run(unaccounted, "cancelled", on=ALL).start(_scancel),
    }


@contextmanager
def without(site: Site, daemon: str) -> Iterator[None]:
    """Inside, the daemon is stopped; afterwards it runs, whatever happened."""
    site.cluster.stop(daemon)
    try:
        yield
    finally:
        site.cluster.start(daemon)


def ends_and_failures(site: Site) -> dict[str, FaultRun]:
    """Runs of each simple end: one that works at once, one that works on and one that fails."""
    runs = {
        "works-on": make_run(site, "works-on", on=ALL, payload={"go": str(site.workdir / "go-on")}),
        "killed": make_run(site, "killed", on=ALL, ranks_per_node=2),
        "ends": make_run(site, "ends", on=ALL, payload={"go": str(site.workdir / "go-end")}),
    }
    return {name: run.start() for name, run in runs.items()}


def went_well(outcome: Outcome, *, kind: Kind | None = None) -> None:
    """It completed; where `kind` is given, after one attempt that ended so."""
    assert outcome.done, outcome.story
    kinds = [outcome.diagnosis(one.number).kind for one in outcome.attempts]
    assert kinds == ([kind] if kind is not None else []) + [Kind.DONE], outcome.story
    started = [one for one in outcome.attempts if one.start is not None and one.start.job]
    jobs = [one.start.job.job_id for one in started]
    assert len(set(jobs)) == len(outcome.attempts), outcome.story


def controller_away(site: Site, *, seconds: float) -> None:
    """One job ends, one fails and one goes on while nobody answers for the cluster."""
    runs = ends_and_failures(site)
    for run in runs.values():
        run.wait_for_heartbeats()
    with without(site, "slurmctld"):
        (site.workdir / "go-end").touch()
        runs["killed"].kill_rank(1)
        time.sleep(seconds)
    goes_on = runs["works-on"]
    goes_on.until("the cluster to answer", lambda: says(goes_on, "answers again"))
    assert says(goes_on, "does not answer")
    (site.workdir / "go-on").touch()
    went_well(goes_on.outcome)
    went_well(runs["ends"].outcome)
    went_well(runs["killed"].outcome, kind=Kind.UNKNOWN)


def says(run: FaultRun, words: str) -> bool:
    return any(words in line for line in run.listener.said)


def test_jobs_outlive_an_absent_controller(
    site: Site, unaccounted_runs: dict[str, FaultRun]
) -> None:
    controller_away(site, seconds=10)


def test_a_run_needs_no_accounting_daemon(site: Site) -> None:
    """slurmdbd is away from before the first sbatch until after the end."""
    with without(site, "slurmdbd"):
        done = make_run(site, "no-dbd", on=ALL, faulty_until=0).start()
        killed = make_run(site, "no-dbd-killed", on=ALL, ranks_per_node=2)
        killed.start(lambda run: run.kill_rank(1))
        went_well(done.outcome)
        went_well(killed.outcome, kind=Kind.UNKNOWN)


def test_a_run_needs_no_accounting_at_all(unaccounted_runs: dict[str, FaultRun]) -> None:
    """What accounting would tell of an end is asked of the job's own record, then of scontrol."""
    outcomes = {name: run.outcome for name, run in unaccounted_runs.items()}
    went_well(outcomes["done"])
    went_well(outcomes["killed"], kind=Kind.UNKNOWN)
    memory, cancelled = outcomes["memory"], outcomes["cancelled"]
    assert memory.diagnosis().kind is Kind.MEMORY, memory.story
    assert cancelled.diagnosis().kind is Kind.OPERATOR, cancelled.story
    assert cancelled.decision().action is Action.STOP


def _scancel(run: FaultRun) -> None:
    run.wait_for_marks()
    run.site.slurm("scancel", run.job_id())


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("absent", ["slurmctld for two minutes", "slurmdbd", "accounting"])
def test_the_whole_pipeline_completes_without(
    absent: str, site: Site, unaccounted: Site, tmp_path: Path
) -> None:
    """`pipelines/slurm-dev.yaml` as it is shipped, from the command line."""
    where = unaccounted if absent == "accounting" else site
    with _pipeline(where.cluster, tmp_path) as pipeline:
        if absent == "slurmdbd":
            with without(site, "slurmdbd"):
                assert pipeline.wait(timeout=840) == 0, (tmp_path / "run.log").read_text()[-3000:]
            return
        if absent.startswith("slurmctld"):
            training = tmp_path / ".headrace-dev" / "slurm-dev" / "train" / "0001" / "batch.log"
            deadline = time.monotonic() + 600
            while not training.exists():
                assert pipeline.poll() is None, (tmp_path / "run.log").read_text()[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.5)
            with without(site, "slurmctld"):
                time.sleep(120)
        assert pipeline.wait(timeout=840) == 0, (tmp_path / "run.log").read_text()[-3000:]


@contextmanager
def _pipeline(cluster: DevCluster, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The shipped pipeline under way on a cluster, in a home of its own."""
    shipped = ROOT / "pipelines" / "slurm-dev.yaml"
    environ = {
        **os.environ,
        **cluster.env(),
        "HEADRACE_HOME": str(folder / "home"),
        "HEADRACE_CORPUS": str(Path(os.__file__).parent),
        "PYTHONPATH": str(ROOT),
    }
    headrace = [sys.executable, "-P", "-m", "headrace"]
    with (folder / "run.log").open("wb") as log:
        running = subprocess.Popen(
            [*headrace, "run", shipped], cwd=folder, env=environ, stdout=log, stderr=log
        )
        try:
            yield running
        finally:
            running.kill()
            running.wait()
            subprocess.run([*headrace, "down", shipped], cwd=folder, env=environ, check=True)
