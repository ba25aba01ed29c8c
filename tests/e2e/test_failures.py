"""Real faults in the middle of training: a cut link, a killed engine, two engines at once."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.devcluster import DevCluster
from storage.records import Action, Kind, Stage
from tests.e2e.browser import Browser
from tests.e2e.conftest import Site
from tests.e2e.runs import Run, wait_for
from tests.e2e.slurm_jobs import jobs_of

pytestmark = [pytest.mark.slurm, pytest.mark.s3, pytest.mark.e2e, pytest.mark.timeout(600)]


def _short(site: Site, name: str, *, nodes: int, steps: int) -> Path:
    """A pipeline whose stages before training are as short as they can be."""
    return site.spec(
        name,
        cluster={"nodes": nodes},
        smoke={"rungs": [1], "steps": 4, "warmup_steps": 1},
        data={"max_documents": 30},
        train={
            "steps": steps,
            "checkpoint": {"every_steps": 10},
            "step_timeout_s": 20,
            "global_batch": 12,
            "micro_batch": 2,
        },
    )


@pytest.fixture
def healed(dev_cluster: DevCluster) -> Iterator[DevCluster]:
    yield dev_cluster
    dev_cluster.heal("n2")


def test_a_node_cut_off_in_training_is_named_and_avoided(
    site: Site, healed: DevCluster, browser: Browser, screenshots: Path
) -> None:
    spec = _short(site, "cut", nodes=3, steps=80)
    engine = site.start(*site.headrace("run", spec), log=site.folder / "cut.log")
    run = Run(site, spec)
    try:
        wait_for("two commits", lambda: len(run.commits()) >= 2 and run.training_step(1) >= 25)
        healed.cut("n2")
        assert engine.wait(timeout=400) == 0, (site.folder / "cut.log").read_text()[-3000:]
        first, second = run.attempts(Stage.TRAIN)
        assert first.end is not None
        assert first.end.diagnosis.kind in (Kind.HARDWARE, Kind.NETWORK), first.end
        assert first.end.diagnosis.culprit_nodes == ("n2",), first.end
        assert first.end.decision.action is Action.RETRY_ELSEWHERE
        assert "n2" in second.intent.excluded
        assert second.start is not None
        assert "n2" not in second.start.nodes
        assert second.resume is not None
        source = second.resume.source
        assert source is not None
        assert source == second.intent.floor
        assert source.step >= 20
        before, after = run.losses(1), run.losses(2)
        kept = {step for step in before if step <= source.step} | set(after)
        assert kept == set(range(2, 81, 2))
        assert min(after) == source.step + 2
    finally:
        engine.kill()
        run.close()
    flow_run = site.flow_run("cut")
    assert flow_run is not None
    browser.log_in()
    browser.open(f"/runs/flow-run/{flow_run['id']}")
    browser.show_tab("Task Runs")
    browser.wait_for_text(f"train · attempt 2 · from step {source.step} · without n2")
    browser.screenshot(screenshots / "flow-run.png")


def test_a_killed_engine_adopts_its_running_job(site: Site) -> None:
    spec = _short(site, "killed", nodes=2, steps=120)
    engine = site.start(*site.headrace("run", spec), log=site.folder / "killed.log")
    run = Run(site, spec)
    try:
        wait_for("training to be under way", lambda: run.training_step(1) >= 10)
        engine.send_signal(signal.SIGKILL)
        engine.wait(timeout=30)
        before = jobs_of(site, "killed")
        site.run(*site.headrace("run", spec))
        submitted = Counter(job.token for job in jobs_of(site, "killed"))
        of_training = jobs_of(site, "killed", Stage.TRAIN)
        assert len(of_training) == 1
        assert of_training[0].state == "COMPLETED"
        assert len(run.attempts(Stage.TRAIN)) == 1
        for job in before:
            assert submitted[job.token] == 1
        earlier = {job.token for job in before}
        new = {token for token in submitted if token not in earlier}
        assert all(token.startswith("killed-prune") for token in new), new
    finally:
        engine.kill()
        run.close()


def test_two_engines_at_once_run_each_attempt_once(site: Site) -> None:
    spec = _short(site, "twice", nodes=2, steps=20)
    engines = [
        site.start(*site.headrace("run", spec), log=site.folder / f"twice-{number}.log")
        for number in (1, 2)
    ]
    try:
        for number, engine in enumerate(engines, start=1):
            log = site.folder / f"twice-{number}.log"
            assert engine.wait(timeout=400) == 0, log.read_text()[-3000:]
    finally:
        for engine in engines:
            engine.kill()
    ran = Counter(job.token for job in jobs_of(site, "twice") if job.steps)
    assert {token.split("-")[1] for token in ran} == {str(stage) for stage in Stage}
    assert set(ran.values()) == {1}, ran
