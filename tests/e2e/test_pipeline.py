"""The whole pipeline on a real Slurm, started as a deployment and looked at in a browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.records import Stage
from tests.e2e.browser import Browser
from tests.e2e.conftest import ROOT, Site
from tests.e2e.runs import Run, wait_for
from tests.e2e.slurm_jobs import jobs_of

pytestmark = [pytest.mark.slurm, pytest.mark.s3, pytest.mark.e2e, pytest.mark.timeout(600)]

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@pytest.fixture(scope="module")
def finished(site: Site) -> Iterator[tuple[Run, dict[str, object]]]:
    """`pipelines/slurm-dev.yaml` as it is shipped, run by `prefect deployment run`."""
    spec = site.folder / "slurm-dev.yaml"
    shutil.copy(ROOT / "pipelines" / "slurm-dev.yaml", spec)
    parameters = site.run(*site.headrace("spec", spec))
    site.run("prefect", "deployment", "run", "pretrain/manual", "--params", "-", input=parameters)
    run = Run(site, spec)

    def ended() -> dict[str, object] | None:
        found = site.flow_run("slurm-dev")
        return found if found is not None and found["state_type"] in FINAL else None

    flow_run = wait_for("the deployment's flow run to end", ended, timeout_s=420)
    yield run, flow_run
    run.close()


def test_the_deployment_goes_through_all_five_stages(
    site: Site, finished: tuple[Run, dict[str, object]]
) -> None:
    run, flow_run = finished
    assert flow_run["state_type"] == "COMPLETED", site.said(flow_run)
    for stage in Stage:
        assert run.ledger.stage_records(stage), f"no completion record of {stage}"
        jobs = jobs_of(site, "slurm-dev", stage)
        assert jobs, f"sacct shows no job of {stage}"
        assert all(job.state == "COMPLETED" for job in jobs), jobs


def test_the_loss_falls(finished: tuple[Run, dict[str, object]]) -> None:
    run, _ = finished
    losses = run.losses(1)
    assert max(losses) == run.spec.train.steps
    assert losses[max(losses)] < 0.8 * losses[min(losses)]


def test_prune_leaves_what_the_rule_keeps(finished: tuple[Run, dict[str, object]]) -> None:
    run, _ = finished
    assert len(run.commits()) == run.spec.retention.keep.last


def test_each_attempt_is_a_task_run_of_its_own(
    site: Site, finished: tuple[Run, dict[str, object]]
) -> None:
    _, flow_run = finished
    names = [
        task["name"]
        for task in site.api(
            "POST", "/task_runs/filter", flow_runs={"id": {"any_": [flow_run["id"]]}}
        )
    ]
    assert any(name.startswith("train · attempt 1") for name in names), names
    assert sum(name.startswith("smoke") for name in names) == 3, names


@pytest.mark.ui
def test_the_report_shows_table_plot_and_curve_in_the_browser(
    site: Site, finished: tuple[Run, dict[str, object]], browser: Browser, screenshots: Path
) -> None:
    _, flow_run = finished
    artifacts = site.api(
        "POST", "/artifacts/latest/filter", artifacts={"key": {"any_": ["slurm-dev-report"]}}
    )
    assert len(artifacts) == 1, artifacts
    browser.log_in()
    browser.open(f"/artifacts/artifact/{artifacts[0]['latest_id']}")
    shown = browser.wait_for_report()
    assert shown.tables >= 2
    assert "n1" in shown.text
    assert len(shown.image_sizes) >= 2
    assert all(width > 200 and height > 100 for width, height in shown.image_sizes)
    browser.screenshot(screenshots / "report.png")
    browser.open(f"/runs/flow-run/{flow_run['id']}")
    browser.show_tab("Task Runs")
    browser.wait_for_text("train · attempt 1")
    browser.screenshot(screenshots / "task-runs.png")


def test_a_second_run_of_the_same_spec_submits_nothing(
    site: Site, finished: tuple[Run, dict[str, object]]
) -> None:
    before = jobs_of(site, "slurm-dev")
    site.run(*site.headrace("run", "slurm-dev.yaml"))
    assert jobs_of(site, "slurm-dev") == before
    again = site.flow_run("slurm-dev")
    assert again is not None
    assert again["id"] != finished[1]["id"]
    assert again["state_type"] == "COMPLETED", json.dumps(again["state"])
