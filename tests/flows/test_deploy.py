"""The deployments: made alike by `headrace serve` and `prefect deploy`, left as people set them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import get_current_settings
from pydantic import ValidationError

from flows.deploy import DEPLOYMENTS, deploy_all, schedule
from flows.loading import load_spec
from flows.server import POOL

pytestmark = pytest.mark.usefixtures("prefect_server")

ROOT = Path(__file__).resolve().parents[2]


def deployed() -> dict[str, DeploymentResponse]:
    with get_client(sync_client=True) as client:
        return {one.full_name: client.read_deployment_by_name(one.full_name) for one in DEPLOYMENTS}


def said(deployment: DeploymentResponse) -> dict[str, Any]:
    """What both ways of deploying must agree on."""
    variables = deployment.job_variables
    shared = {"stream_output", "env"}
    ours = {"PYTHONPATH", "HEADRACE_BASE", "PREFECT_CLI_PROMPT"}
    quiet = {"PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT"}
    return {
        "entrypoint": deployment.entrypoint,
        "description": deployment.description,
        "pool": deployment.work_pool_name,
        "queue": deployment.work_queue_name,
        "parameters": deployment.parameters,
        "schema": deployment.parameter_openapi_schema,
        "enforced": deployment.enforce_parameter_schema,
        "schedules": [
            (one.schedule.cron, one.schedule.timezone, one.active) for one in deployment.schedules
        ],
        "variables": {name: variables[name] for name in shared - {"env"}},
        "env": {
            name: value for name, value in variables["env"].items() if name not in ours | quiet
        },
    }


@pytest.fixture(scope="module")
def example() -> Path:
    return ROOT / "pipelines" / "tiny.yaml"


def test_serve_and_prefect_yaml_make_the_same_deployments() -> None:
    deploy_all()
    served = {name: said(one) for name, one in deployed().items()}
    assert served["pretrain/nightly"]["schedules"] == [("0 1 * * *", "UTC", False)]
    assert served["prune/hourly"]["schedules"] == [("23 * * * *", "UTC", False)]
    assert served["pretrain/manual"]["schedules"] == []
    with get_client(sync_client=True) as client:
        for deployment in deployed().values():
            client.delete_deployment(deployment.id)
        assert client.read_work_queue_by_name("nightly", POOL).concurrency_limit == 1
    url = get_current_settings().api.url
    assert url
    told = subprocess.run(
        [sys.executable, "-P", "-m", "prefect", "--no-prompt", "deploy", "--all"],
        cwd=ROOT,
        env={**os.environ, "PREFECT_API_URL": url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert {name: said(one) for name, one in deployed().items()} == served


def test_the_parameters_are_the_spec_and_unknown_keys_are_refused(example: Path) -> None:
    deploy_all()
    spec = load_spec(example).model_dump(mode="json")
    manual = deployed()["pretrain/manual"]
    with get_client(sync_client=True) as client:
        run = client.create_flow_run_from_deployment(manual.id, parameters={"spec": spec})
        assert run.parameters["spec"]["run"] == "tiny"
        client.delete_flow_run(run.id)
        spec["train"]["model"]["dmi"] = 3
        with pytest.raises(PrefectHTTPStatusError, match="dmi"):
            client.create_flow_run_from_deployment(manual.id, parameters={"spec": spec})


def test_a_schedule_that_a_person_set_outlives_the_next_serve(example: Path) -> None:
    deploy_all()
    spec = load_spec(example)
    schedule(spec, cron="30 2 * * 1-5", timezone="Europe/Berlin")
    deploy_all()
    nightly, hourly = deployed()["pretrain/nightly"], deployed()["prune/hourly"]
    assert said(nightly)["schedules"] == [("30 2 * * 1-5", "Europe/Berlin", True)]
    assert nightly.parameters == {"dated": True, "spec": spec.model_dump(mode="json")}
    assert said(hourly)["schedules"] == [("23 * * * *", "Europe/Berlin", True)]
    assert hourly.parameters == {"spec": spec.model_dump(mode="json")}


def test_a_schedule_that_is_none_is_refused(example: Path) -> None:
    with pytest.raises(ValidationError):
        schedule(load_spec(example), cron="every night", timezone="UTC")
    with pytest.raises(ValidationError):
        schedule(load_spec(example), cron="0 1 * * *", timezone="Mars/Base")
