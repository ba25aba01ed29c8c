"""What a dev cluster is found to be: its daemons, its nodes, and whether they are all there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurm.devcluster.config import ClusterShape

_ABSENT_STATES = ("down", "unk", "fail", "future")


@dataclass(frozen=True)
class DaemonStatus:
    name: str
    host: str
    pid: int | None
    log: Path


@dataclass(frozen=True)
class NodeStatus:
    name: str
    state: str
    """As Slurm says it; ``*`` at its end means that the node does not answer."""
    is_plugged_in: bool
    address: str

    @property
    def is_present(self) -> bool:
        return is_present(self.state)


def is_present(state: str) -> bool:
    """Whether a node in this state answers and can be given jobs, now or after the present one."""
    return bool(state) and not state.endswith("*") and not state.startswith(_ABSENT_STATES)


@dataclass(frozen=True)
class ClusterStatus:
    shape: ClusterShape
    daemons: tuple[DaemonStatus, ...]
    nodes: tuple[NodeStatus, ...]

    @property
    def is_up(self) -> bool:
        return all(daemon.pid is not None for daemon in self.daemons) and all(
            node.is_present for node in self.nodes
        )
