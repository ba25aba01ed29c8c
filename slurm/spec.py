"""The cluster's part of the spec: where jobs run, which nodes are fit, what is tried again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from storage.spec import Model

NodeName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

_SECRET_NAME = re.compile(r"(SECRET|TOKEN|PASSWORD|PASSWD|ACCESS_KEY|API_KEY|AUTH)", re.IGNORECASE)


class ClusterSpec(Model):
    """The machines that jobs run on, and how a job asks for them."""

    kind: Literal["local", "slurm"] = Field(
        "local", description="`local` runs nodes × ranks as processes of this host."
    )
    nodes: int = Field(1, ge=1, le=100_000, description="Nodes of the training job.")
    ranks_per_node: int = Field(1, ge=1, le=64, description="Processes a node; one a GPU.")
    cpus_per_rank: int = Field(1, ge=1, le=1024)
    gpus_per_node: int = Field(0, ge=0, le=64)
    memory_per_node: Annotated[str, StringConstraints(pattern=r"^[0-9]+[MGT]$")] | None = Field(
        None, description="Slurm's --mem, such as `64G`; None leaves it to the site."
    )
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit_min: int = Field(60, ge=1, description="Time limit of each job, in minutes.")
    signal_lead_s: int = Field(
        120, ge=5, description="Seconds before the time limit at which the job is told to save."
    )
    slurm_conf: Path | None = Field(
        None, description="Path for SLURM_CONF, where it is not the site's default."
    )
    exclude: tuple[NodeName, ...] = Field((), description="Nodes never to be used.")
    python: Path | None = Field(
        None, description="Interpreter on the nodes; by default the one that runs Headrace."
    )
    setup: tuple[str, ...] = Field(
        (), description="Shell lines before the job; one that fails ends the job."
    )
    env: dict[EnvName, str] = Field(
        default_factory=dict, description="Variables for every job, such as NCCL_SOCKET_IFNAME."
    )

    @field_validator("env")
    @classmethod
    def _no_secret_in_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if _SECRET_NAME.search(name):
                raise ValueError(
                    f"env.{name} looks like a secret, and a spec is stored in the bucket; "
                    "put credentials in a file that nodes can read (store.credentials_file)"
                )
        return env

    @property
    def spans_hosts(self) -> bool:
        """Whether jobs run on other hosts than this one, which do not reach its loopback."""
        return self.kind != "local"

    @model_validator(mode="after")
    def _lead_fits_the_limit(self) -> ClusterSpec:
        if self.signal_lead_s >= self.time_limit_min * 60:
            raise ValueError(
                f"signal_lead_s {self.signal_lead_s} must be below the time limit of "
                f"{self.time_limit_min * 60} s; lower it or raise time_limit_min"
            )
        return self


class ValidateSpec(Model):
    """Which nodes count as fit."""

    nodes: tuple[NodeName, ...] = Field(
        (), description="Candidates; by default all idle nodes of the partition."
    )
    min_healthy: int | None = Field(
        None, ge=1, description="Fewer fit nodes stop the run; by default cluster.nodes."
    )
    expires_h: float = Field(24.0, gt=0, description="How long a verdict holds, in hours.")
    min_memory_copy_gb_per_s: float = Field(0.5, gt=0)
    min_matmul_gflop_per_s: float = Field(0.5, gt=0)
    min_disk_write_mb_per_s: float = Field(10.0, gt=0)
    min_allreduce_gb_per_s: float = Field(0.001, gt=0)
    scratch: Path = Field(Path("/tmp"), description="Local scratch folder that is measured.")
    timeout_s: float = Field(120.0, gt=0, description="A probe that takes longer is a finding.")


class RetrySpec(Model):
    """How often each kind of end is tried again before the stage gives up."""

    hardware: int = Field(8, ge=0)
    network: int = Field(8, ge=0)
    storage: int = Field(5, ge=0)
    site: int = Field(5, ge=0)
    hang: int = Field(3, ge=0)
    unknown: int = Field(3, ge=0)
    backoff_s: float = Field(10.0, ge=0, description="First delay; it doubles, with jitter.")
    backoff_max_s: float = Field(600.0, ge=0)
    heartbeat_s: float = Field(5.0, gt=0, description="How often each node says it lives.")
    lost_after_s: float = Field(
        120.0, gt=0, description="Silent this long and absent from squeue: the job is lost."
    )
