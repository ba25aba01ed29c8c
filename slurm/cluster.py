"""What the rest of Headrace sees of a place that runs jobs: one protocol, two kinds behind it.

`open_cluster` holds the only branch on `cluster.kind`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from slurm.spec import ClusterSpec
from storage.errors import SlurmError, SubmitRejected
from storage.job import JobDescription


class JobState(StrEnum):
    """Where a job stands. `UNKNOWN` is neither success nor failure; `ABSENT` is no proof."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of a job, as accounting tells it: the worst step decides.

    `max_rss` is the most memory that one of its tasks held, in Slurm's words (`3021456K`).
    """

    name: str
    state: str
    exit_code: str
    max_rss: str = ""


@dataclass(frozen=True, kw_only=True)
class JobObservation:
    """What the cluster says of one token now. States, codes and memory are its own words.

    `accounting_silence` is what accounting said last in place of an answer, if the job has left.
    """

    token: str
    state: JobState
    job_id: str | None = None
    raw_state: str = ""
    reason: str = ""
    exit_code: str = ""
    derived_exit_code: str = ""
    memory_asked: str = ""
    nodes: tuple[str, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    accounting_silence: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """A node as the cluster sees it; `responds` is false for a node that is down or silent."""

    name: str
    raw_state: str
    responds: bool
    idle: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one job asks for, or each element of an array of jobs. Nodes that are named are asked
    for by name. With `most_nodes` it takes what there is at its start, from `nodes` up to that."""

    nodes: int
    most_nodes: int | None = None
    ranks_per_node: int
    elements: int = 1
    cpus_per_rank: int = 1
    gpus_per_node: int = 0
    memory_per_node: str | None = None
    node_list: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    time_limit_min: int = 60
    signal_lead_s: int = 120

    @property
    def wanted_nodes(self) -> int:
        """As many as it takes where it can have them."""
        return self.nodes if self.most_nodes is None else self.most_nodes


class SubmitLimited(SubmitRejected):
    """Refused for now: as many jobs are submitted as the site lets be; its text names the limit."""


class SubmitDoubtful(SlurmError):
    """sbatch ended without an answer that can be trusted: the job may exist, now or later."""


class Cluster(Protocol):
    """A place that runs jobs. Every call has a time-out of its own and may raise SlurmError."""

    @property
    def name(self) -> str:
        """The cluster's own name; an attempt of another cluster is never adopted from here."""
        ...

    @property
    def gates(self) -> bool:
        """Whether a scaling figure measured here can be believed (ranks do not share cores)."""
        ...

    @property
    def replaces_nodes(self) -> bool:
        """Whether there is always another node for an excluded one: nodes that are only names."""
        ...

    @property
    def max_elements(self) -> int:
        """Of how many elements one array of jobs may consist; 1 where there are no arrays, as on
        one host, whose cores a single job can use as well."""
        ...

    def script(self, job: JobDescription, resources: Resources) -> str:
        """The batch script that `submit` would send, for people to read."""
        ...

    def submit(self, job: JobDescription, resources: Resources) -> str:
        """Submit once and return the job id.

        Raises:
            SubmitRejected: it was refused, and nothing is queued.
            SubmitLimited: as above, until fewer jobs are submitted.
            SubmitDoubtful: nobody knows whether it is queued.
        """
        ...

    def observe(self, tokens: Sequence[str]) -> Mapping[str, JobObservation]:
        """What is known of each token: the queue first, then accounting."""
        ...

    def queue(self) -> Mapping[str, JobObservation]:
        """All of this user's jobs that wait or run now, by their names, tokens or not."""
        ...

    def cancel(self, *, job_id: str, token: str) -> None:
        """End the job if id and token belong together; a job that is gone is no error."""
        ...

    def nodes(self) -> tuple[NodeState, ...]:
        """The nodes that jobs of this spec could use (the partition's)."""
        ...


def open_cluster(spec: ClusterSpec, *, workdir: Path) -> Cluster:
    """The cluster that `spec` names."""
    if spec.kind == "local":
        from slurm.local import LocalCluster

        return LocalCluster(spec, workdir=workdir)
    from slurm.submit import SlurmCluster

    return SlurmCluster(spec)
