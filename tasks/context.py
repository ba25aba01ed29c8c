"""What every stage needs to run its jobs: the places, the records, the rules and the watchers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm.cluster import Cluster
from slurm.snapshot import Snapshot
from slurm.spec import ClusterSpec, RetrySpec
from storage.ledger import Ledger
from storage.records import Stage
from storage.spec import StoreSpec
from tasks.eyes import Eyes

if TYPE_CHECKING:
    from tasks.engine import Engine


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One run being carried out by one engine, by default one of this process that stays.

    `store` is resolved: it names an endpoint.
    """

    run: str
    workdir: Path
    cluster: Cluster
    cluster_spec: ClusterSpec
    retry: RetrySpec
    store: StoreSpec
    ledger: Ledger
    snapshot: Snapshot
    eyes: Eyes
    forced: frozenset[Stage] = frozenset()
    unfit_nodes: frozenset[str] = frozenset()
    engine: Engine | None = None

    def attempt_folder(self, stage: Stage, attempt: int) -> Path:
        return self.workdir / self.run / stage / f"{attempt:04d}"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A piece of a stage that one job carries out, as often as it takes.

    It needs `nodes` nodes, and takes up to `most_nodes` where that says so and they are there.
    With several `elements` the job is an array, as large as the cluster allows up to that number.
    `folders` are those that it needs beside the attempt's own, and that a container has to hold.
    `sidecar` is what runs once a node beside its ranks.
    """

    name: str
    entry: str
    sidecar: str | None = None
    payload: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 1
    most_nodes: int | None = None
    ranks_per_node: int = 1
    elements: int = 1
    cpus_per_rank: int | None = None
    node_list: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()
    time_limit_min: int | None = None
    resumes: bool = False
    tries: int | None = None

    @property
    def wanted_nodes(self) -> int:
        """As many as it takes where it can have them."""
        return self.nodes if self.most_nodes is None else self.most_nodes
