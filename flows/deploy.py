"""The deployments and their work pool, put into a Prefect server. `prefect.yaml` says the same, for
those who run a server of their own; a test holds the two together.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    WorkPoolCreate,
)
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.flows import Flow
from prefect.utilities.callables import parameter_schema

from flows.opening import BASE_VARIABLE
from flows.pretrain import pretrain
from flows.server import POOL, QUIET, import_settings
from flows.spec import PipelineSpec
from flows.stages import prune
from headrace import application_folder

NIGHTLY_QUEUE = "nightly"
DEFAULT_QUEUE = "default"


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One deployment. A schedule is off until it is given a spec to run."""

    flow: Flow[..., Any]
    name: str
    description: str
    queue: str = DEFAULT_QUEUE
    cron: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def full_name(self) -> str:
        return f"{self.flow.name}/{self.name}"

    @property
    def entrypoint(self) -> str:
        return f"{self.flow.fn.__module__}.{self.flow.fn.__name__}"


MANUAL = Deployment(flow=pretrain, name="manual", description="The whole pipeline, when asked for.")
NIGHTLY = Deployment(
    flow=pretrain,
    name="nightly",
    description="The whole pipeline every night, as a run of its own, one at a time.",
    queue=NIGHTLY_QUEUE,
    cron="0 1 * * *",
    parameters={"dated": True},
)
HOURLY = Deployment(
    flow=prune,
    name="hourly",
    description="Deletes the checkpoints that no rule keeps.",
    cron="23 * * * *",
)
DEPLOYMENTS = (MANUAL, NIGHTLY, HOURLY)
TIMEZONE = "UTC"


def job_variables() -> dict[str, Any]:
    """How the worker starts a flow run.

    Without streamed output a flow run outlives its worker.
    """
    return {
        "stream_output": False,
        "command": f"{sys.executable} -P -m prefect.engine",
        "working_dir": str(application_folder()),
        "env": {
            **QUIET,
            "PREFECT_CLIENT_MAX_RETRIES": "60",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "60",
            **import_settings(),
            BASE_VARIABLE: str(Path.cwd()),
        },
    }


def deploy_all() -> None:
    """Make work pool, queue and deployments, or bring them up to date.

    What a person has set (parameters, schedules, limits) is left alone.
    """
    from prefect.workers.process import ProcessWorker

    with get_client(sync_client=True) as client:
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_work_pool(
                WorkPoolCreate(
                    name=POOL,
                    type=ProcessWorker.type,
                    base_job_template=ProcessWorker.get_default_base_job_template(),
                )
            )
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_work_queue(name=NIGHTLY_QUEUE, concurrency_limit=1, work_pool_name=POOL)
        for deployment in DEPLOYMENTS:
            _deploy(client, deployment)


def schedule(spec: PipelineSpec, *, cron: str, timezone: str) -> None:
    """Run `spec` every time that `cron` says, and prune it by the hour.

    Raises:
        ValidationError: `cron` or `timezone` is no such thing.
    """
    when = CronSchedule(cron=cron, timezone=timezone)
    hourly = CronSchedule(cron=HOURLY.cron or "", timezone=timezone)
    with get_client(sync_client=True) as client:
        for deployment, rhythm in ((NIGHTLY, when), (HOURLY, hourly)):
            _create(
                client,
                deployment,
                parameters={**deployment.parameters, "spec": spec.model_dump(mode="json")},
                schedules=[DeploymentScheduleCreate(schedule=rhythm, active=True)],
            )


def _deploy(client: SyncPrefectClient, deployment: Deployment) -> None:
    try:
        found = client.read_deployment_by_name(deployment.full_name)
    except ObjectNotFound:
        schedules = []
        if deployment.cron is not None:
            rhythm = CronSchedule(cron=deployment.cron, timezone=TIMEZONE)
            schedules = [DeploymentScheduleCreate(schedule=rhythm, active=False)]
        _create(client, deployment, parameters=deployment.parameters, schedules=schedules)
    else:
        client.update_deployment(found.id, DeploymentUpdate(**_code_of(deployment)))


def _create(
    client: SyncPrefectClient,
    deployment: Deployment,
    *,
    parameters: Mapping[str, Any],
    schedules: list[DeploymentScheduleCreate],
) -> None:
    """Makes it, or replaces all that it says."""
    client.create_deployment(
        flow_id=client.create_flow_from_name(deployment.flow.name),
        name=deployment.name,
        parameters=dict(parameters),
        schedules=schedules,
        **_code_of(deployment),
    )


def _code_of(deployment: Deployment) -> dict[str, Any]:
    """What belongs to the code and not to a person."""
    return {
        "description": deployment.description,
        "entrypoint": deployment.entrypoint,
        "work_pool_name": POOL,
        "work_queue_name": deployment.queue,
        "job_variables": job_variables(),
        "parameter_openapi_schema": parameter_schema(deployment.flow).model_dump(
            exclude_unset=True
        ),
        "enforce_parameter_schema": True,
        "pull_steps": [],
    }
