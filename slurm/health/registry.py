"""Every node check as a row: what it measures, how it is judged, by which threshold, what to do.

The rows are data. `probe` measures on the node and knows no threshold; `verdict` judges and knows
no node. So a threshold can be changed without a new probe, and judged from recorded measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import Field

from slurm.spec import ClusterSpec, ValidateSpec
from storage.spec import Model

Value = bool | int | float | str


class Status(StrEnum):
    """How a check came out. `UNKNOWN` means that it could not be measured; it is never OK."""

    OK = "ok"
    WARN = "warn"
    CRITICAL = "critical"
    UNKNOWN = "unknown"


class Rule(StrEnum):
    """How a measured value is judged."""

    AT_LEAST = "at least"
    AT_MOST = "at most"
    LIKE_MOST = "like most nodes"
    DONE = "must succeed"
    SHOWN = "shown only"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What a node says of one check: a value, or why there is none.

    `failure` says that the thing itself failed, `unknown` that it could not be measured here.
    """

    value: Value | None = None
    failure: str = ""
    unknown: str = ""


class ProbeJob(Model):
    """The payload of a `slurm.health.probe` job. Sizes and times keep it to a second or so."""

    scratch: Path
    copy_mib: int = Field(32, ge=1, description="Size of the buffer that is copied.")
    matmul_size: int = Field(384, ge=16)
    disk_mib: int = Field(2, ge=1, description="Written and read back a few times.")
    store_kib: int = Field(64, ge=1)
    seconds_each: float = Field(0.25, gt=0, description="How long copying and matmul are timed.")


class AllreduceJob(Model):
    """The payload of a `slurm.health.allreduce` job."""

    size_mib: float = Field(4.0, gt=0, description="Bytes that each rank reduces.")
    rounds: int = Field(5, ge=1, description="Timed rounds, after one that is not.")
    timeout_s: float = Field(60.0, gt=0, description="Bound on meeting and on each round.")


Limit = Callable[[ValidateSpec, ClusterSpec], float]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row. `source` says where its threshold comes from, `severity` what missing it means.

    `tolerance` is the part of the median by which a value may differ under `LIKE_MOST`; without
    one, values are compared as they are.
    """

    name: str
    measures: str
    unit: str = ""
    rule: Rule
    limit: Limit | None = None
    tolerance: float = 0.0
    source: str = ""
    severity: Status
    remedy: str
    in_table: bool = False


PROBE = Check(
    name="probe",
    measures="whether the node can run a job of Headrace at all",
    rule=Rule.DONE,
    severity=Status.CRITICAL,
    remedy="read the probe's log; look at Slurm's state of the node, mounts, Python and the store",
)

SLURM = Check(
    name="slurm",
    measures="whether Slurm can use the node",
    rule=Rule.DONE,
    severity=Status.CRITICAL,
    remedy="look at `scontrol show node` and at slurmd on the node",
)

ALLREDUCE = Check(
    name="allreduce",
    measures="bus bandwidth of an all-reduce over all fit nodes",
    unit="GB/s",
    rule=Rule.AT_LEAST,
    limit=lambda spec, _: spec.min_allreduce_gb_per_s,
    source="validation.min_allreduce_gb_per_s",
    severity=Status.CRITICAL,
    remedy="look at links and routes between the nodes and at the interface that is used "
    "(cluster.env GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or lower the limit",
)

NODE_CHECKS: tuple[Check, ...] = (
    Check(
        name="cores",
        measures="processors of the node",
        rule=Rule.LIKE_MOST,
        source="the other nodes",
        severity=Status.WARN,
        remedy="compare the BIOS settings (SMT) and the node's line in slurm.conf",
    ),
    Check(
        name="memory",
        measures="memory of the node",
        unit="GiB",
        rule=Rule.LIKE_MOST,
        tolerance=0.03,
        source="the other nodes",
        severity=Status.WARN,
        remedy="look for a failed memory module (`dmidecode -t memory`)",
    ),
    Check(
        name="kernel",
        measures="release of the kernel",
        rule=Rule.LIKE_MOST,
        source="the other nodes",
        severity=Status.WARN,
        remedy="install the same image on all nodes",
    ),
    Check(
        name="python",
        measures="version of the Python that runs the jobs",
        rule=Rule.LIKE_MOST,
        source="the other nodes",
        severity=Status.WARN,
        remedy="name one interpreter on a shared file system in cluster.python",
    ),
    Check(
        name="torch",
        measures="version of torch",
        rule=Rule.LIKE_MOST,
        source="the other nodes",
        severity=Status.CRITICAL,
        remedy="install headrace[trainer] for the interpreter in cluster.python",
    ),
    Check(
        name="gpus",
        measures="GPUs that nvidia-smi sees",
        rule=Rule.AT_LEAST,
        limit=lambda _, cluster: cluster.gpus_per_node,
        source="cluster.gpus_per_node",
        severity=Status.CRITICAL,
        remedy="look for a GPU that fell off the bus (`dmesg`, `nvidia-smi -L`)",
    ),
    Check(
        name="memory_copy",
        measures="copying memory, one core",
        unit="GB/s",
        rule=Rule.AT_LEAST,
        limit=lambda spec, _: spec.min_memory_copy_gb_per_s,
        source="validation.min_memory_copy_gb_per_s",
        severity=Status.CRITICAL,
        remedy="look for other load, a throttled or misconfigured CPU, or a slow memory module",
        in_table=True,
    ),
    Check(
        name="matmul",
        measures="multiplying float32 matrices, with the threads of one rank",
        unit="GFLOP/s",
        rule=Rule.AT_LEAST,
        limit=lambda spec, _: spec.min_matmul_gflop_per_s,
        source="validation.min_matmul_gflop_per_s",
        severity=Status.CRITICAL,
        remedy="look for other load or a throttled CPU (`turbostat`, cgroup quotas)",
        in_table=True,
    ),
    Check(
        name="matmul_correct",
        measures="whether a product of matrices is the right one",
        rule=Rule.DONE,
        severity=Status.CRITICAL,
        remedy="take the node out of service: it computes wrong results",
    ),
    Check(
        name="disk_write",
        measures="writing to local scratch, flushed",
        unit="MB/s",
        rule=Rule.AT_LEAST,
        limit=lambda spec, _: spec.min_disk_write_mb_per_s,
        source="validation.min_disk_write_mb_per_s",
        severity=Status.CRITICAL,
        remedy="look for a full, failing or busy disk, or name another validation.scratch",
        in_table=True,
    ),
    Check(
        name="disk_read",
        measures="reading it back",
        unit="MB/s",
        rule=Rule.SHOWN,
        severity=Status.WARN,
        remedy="look at the disk's health",
        in_table=True,
    ),
    Check(
        name="scratch_free",
        measures="free space on local scratch",
        unit="GiB",
        rule=Rule.AT_LEAST,
        limit=lambda _, __: 1.0,
        source="Headrace's own default",
        severity=Status.WARN,
        remedy="clean up validation.scratch, or name a larger one",
    ),
    Check(
        name="store",
        measures="putting, getting, comparing and deleting an object, from the node",
        unit="ms",
        rule=Rule.DONE,
        severity=Status.CRITICAL,
        remedy="check from that node the route to store.endpoint_url and the credentials",
        in_table=True,
    ),
    Check(
        name="clock",
        measures="distance between the node's clock and the store's",
        unit="s",
        rule=Rule.AT_MOST,
        limit=lambda _, __: 5.0,
        source="Headrace's own default",
        severity=Status.WARN,
        remedy="synchronise the clock (chrony or ntpd)",
    ),
)

CHECKS: Mapping[str, Check] = {
    check.name: check for check in (*NODE_CHECKS, PROBE, SLURM, ALLREDUCE)
}
