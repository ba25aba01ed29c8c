"""The cluster's part of the spec: where jobs run, which nodes are fit, what is tried again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from slurm.containers import ContainerSpec
from slurm.node_count import NodeCount, bounds
from slurm.site_options import Value, checked_extra
from storage.spec import Model

NodeName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

_SECRET_NAME = re.compile(r"(SECRET|TOKEN|PASSWORD|PASSWD|ACCESS_KEY|API_KEY|AUTH)", re.IGNORECASE)
_SET_BY_SLURM = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|PMI|PMIX|HEADRACE)_")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+:-]*")
_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/:-]*")
_CONSTRAINT = re.compile(r"[A-Za-z0-9_.:=!|&*,()\[\]-]*[A-Za-z0-9_)\]]")


def _site_name(name: str) -> str:
    """Refuses what Slurm takes for no name, or for several."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"value {name!r} must be one name that Slurm knows: letters, digits and any of "
            "'_.@+:-', not beginning with a sign; correct it"
        )
    return name


SiteName = Annotated[str, AfterValidator(_site_name)]


class ClusterSpec(Model):
    """The machines that jobs run on, and how a job asks for them."""

    kind: Literal["local", "slurm"] = Field(
        "local", description="`local` runs nodes × ranks as processes of this host."
    )
    nodes: NodeCount = Field(
        1,
        description="Nodes of the training job: a number, or a range such as `14-16` of which it "
        "takes as many as there are.",
    )
    ranks_per_node: int = Field(1, ge=1, le=64, description="Processes a node; one a GPU.")
    cpus_per_rank: int = Field(1, ge=1, le=1024)
    gpus_per_node: int = Field(0, ge=0, le=64)
    memory_per_node: Annotated[str, StringConstraints(pattern=r"^[0-9]+[MGT]$")] | None = Field(
        None, description="Slurm's --mem, such as `64G`; None leaves it to the site."
    )
    partition: str | tuple[str, ...] | None = Field(
        None,
        description="One name, or a list of which Slurm takes the first that can run the job; by "
        "default the site's own.",
    )
    account: SiteName | None = Field(None, description="Whom the site charges for jobs.")
    qos: SiteName | None = Field(None, description="Slurm's quality of service.")
    reservation: SiteName | None = Field(None, description="A reservation that jobs run in.")
    constraint: str | None = Field(
        None, description="Features of nodes, in Slurm's words: `a100&nvlink`."
    )
    wckey: SiteName | None = Field(
        None, description="Slurm's workload key; none is sent by default, as sites refuse others."
    )
    mpi: SiteName | None = Field(
        None, description="srun's --mpi, such as `pmix`; by default the site's own."
    )
    extra: dict[str, Value] = Field(
        default_factory=dict,
        description="Further options of sbatch by their long names; true for one without a value.",
    )
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
    container: ContainerSpec | None = Field(
        None, description="The container that the ranks run in; the batch step stays on the host."
    )
    modules: tuple[str, ...] = Field(
        (), description="Environment modules, loaded in this order; one that fails ends the job."
    )
    conda: str | None = Field(
        None,
        description="A conda environment's name or path, activated after the modules; its Python "
        "then runs the job, unless `python` names another.",
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
            if _SET_BY_SLURM.match(name):
                raise ValueError(
                    f"env.{name} is for Slurm or Headrace to set, and would change what a job is "
                    "asked for or told; use a field of cluster, cluster.extra or cluster.mpi"
                )
        return env

    @field_validator("partition", mode="before")
    @classmethod
    def _one_partition_or_a_list(cls, value: object) -> object:
        names = value if isinstance(value, list | tuple) else [value]
        if value is None:
            return None
        if not names or any(not isinstance(n, str) or not _NAME.fullmatch(n) for n in names):
            raise ValueError(
                f"partition {value!r} must be a partition's name or a list of such names; write "
                "one as in `gpu`, several as in `[gpu, gpu-long]`"
            )
        return value if isinstance(value, str) else tuple(dict.fromkeys(names))

    @field_validator("constraint")
    @classmethod
    def _constraint_is_of_features(cls, text: str | None) -> str | None:
        if text is not None and not _CONSTRAINT.fullmatch(text):
            raise ValueError(
                f"constraint {text!r} must be features joined as Slurm wants them, without white "
                "space or quotes; write it as in 'a100&nvlink' or '[rack1|rack2]'"
            )
        return text

    @field_validator("modules")
    @classmethod
    def _modules_are_names(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        for name in modules:
            if not _MODULE.fullmatch(name):
                raise ValueError(
                    f"modules: {name!r} must be a module's name, with its version after a '/' if "
                    "any; give each its own item, and other lines in cluster.setup"
                )
        return modules

    @field_validator("conda")
    @classmethod
    def _conda_is_a_name_or_a_path(cls, text: str | None) -> str | None:
        if text is None or (text.isprintable() and text.startswith("/")) or _NAME.fullmatch(text):
            return text
        raise ValueError(
            f"conda {text!r} must be an environment's name or its absolute path; a relative path "
            "would be taken from the job's folder, so write it in full"
        )

    @field_validator("mpi")
    @classmethod
    def _mpi_is_a_type(cls, name: str | None) -> str | None:
        if name == "list":
            raise ValueError(
                "mpi 'list' must be a type that srun starts ranks with, and would only list them; "
                "choose one that `srun --mpi=list` shows"
            )
        return name

    @field_validator("extra", mode="before")
    @classmethod
    def _extra_leaves_ours_alone(cls, extra: object) -> object:
        return checked_extra(extra) if isinstance(extra, dict) else extra

    @property
    def least_nodes(self) -> int:
        """With fewer the training job is not made."""
        return bounds(self.nodes)[0]

    @property
    def most_nodes(self) -> int:
        """The training job takes so many where it can have them."""
        return bounds(self.nodes)[1]

    @property
    def range_end(self) -> int | None:
        """`most_nodes` where the nodes are a range; None where they are a number."""
        return None if isinstance(self.nodes, int) else self.most_nodes

    @property
    def partitions(self) -> tuple[str, ...]:
        """The partitions by name; none where the site's default serves."""
        if self.partition is None:
            return ()
        return (self.partition,) if isinstance(self.partition, str) else self.partition

    @property
    def interpreter(self) -> Path | None:
        """What runs Python on the nodes, where the spec says so."""
        return self.python or (None if self.conda is None else Path("python"))

    @property
    def spans_hosts(self) -> bool:
        """Whether jobs run on other hosts than this one, which do not reach its loopback."""
        return self.kind != "local"

    @model_validator(mode="after")
    def _containers_need_srun(self) -> ClusterSpec:
        if self.container is not None and self.kind == "local":
            raise ValueError(
                "container needs srun, and kind is 'local'; leave container out, or use "
                "`kind: slurm`"
            )
        return self

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
        None,
        ge=1,
        description="Fewer fit nodes stop the run; by default cluster.nodes, or the least of "
        "its range.",
    )
    expires_h: float = Field(24.0, gt=0, description="How long a verdict holds, in hours.")
    min_memory_copy_gb_per_s: float = Field(0.5, gt=0)
    min_matmul_gflop_per_s: float = Field(0.5, gt=0)
    min_disk_write_mb_per_s: float = Field(10.0, gt=0)
    min_allreduce_gb_per_s: float = Field(0.001, gt=0)
    scratch: Path = Field(Path("/tmp"), description="Local scratch folder that is measured.")
    timeout_s: float = Field(120.0, gt=0, description="A probe that takes longer is a finding.")


class RetrySpec(Model):
    """How often each kind of end is tried again before the stage gives up.

    Progress refills all of them; what each covers is listed in docs/attempts.md.
    """

    hardware: int = Field(8, ge=0)
    network: int = Field(8, ge=0)
    storage: int = Field(5, ge=0)
    site: int = Field(5, ge=0)
    hang: int = Field(3, ge=0)
    unknown: int = Field(3, ge=0)
    backoff_s: float = Field(10.0, ge=0, description="First delay; it doubles, with jitter.")
    backoff_max_s: float = Field(600.0, ge=0)
    exclude_h: float = Field(
        24.0, gt=0, description="How long a node that failed is kept out of jobs, in hours."
    )
    wait_for_nodes_s: float = Field(
        600.0,
        ge=0,
        description="Where cluster.nodes is a range, and failures leave fewer nodes than its most: "
        "how long the next attempt waits for them to come back before it takes what there is.",
    )
    max_excluded_ratio: float = Field(
        0.5,
        ge=0,
        le=1,
        description="A stage stops where failures exclude more than this part of the partition.",
    )
    heartbeat_s: float = Field(5.0, gt=0, description="How often each node says it lives.")
    peer_silence_s: float = Field(
        4.0,
        ge=2,
        le=600,
        description="A node whose network acknowledges nothing for so long is dead to the others.",
    )
    lost_after_s: float = Field(
        120.0, gt=0, description="Silent this long and absent from squeue: the job is lost."
    )
