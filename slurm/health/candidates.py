"""Which nodes are probed now: pure, from what Slurm says of them and their last verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum

from slurm.cluster import NodeState
from storage.errors import SpecError

_AT_WORK = ("allocated", "mixed", "completing")


class Standing(Enum):
    """What can be done with a node now."""

    IDLE = "idle"
    BUSY = "busy"
    OUT = "out of use"


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """`kept` are busy nodes that keep a good verdict, `out` those that no job can use, and why."""

    probe: tuple[str, ...]
    kept: tuple[str, ...]
    out: Mapping[str, str]


def standing(node: NodeState) -> Standing:
    """What can be done with the node. Whoever is at work on it will be done some time."""
    if node.idle:
        return Standing.IDLE
    if node.responds and node.raw_state.lower().startswith(_AT_WORK):
        return Standing.BUSY
    return Standing.OUT


def choose(
    nodes: Sequence[NodeState],
    *,
    named: Iterable[str] = (),
    excluded: Iterable[str] = (),
    last_healthy: AbstractSet[str] = frozenset(),
    needed: int,
) -> Candidates:
    """Sorts the nodes that may be used: named ones, else all; never those that are excluded.

    A busy node keeps a good verdict, for a probe would wait until its job is over, which may be the
    run's own training. Without one it is probed only if there are not enough nodes otherwise.

    Raises:
        SpecError: a node is named that does not exist.
    """
    known = {node.name: node for node in nodes}
    wanted = tuple(dict.fromkeys(named)) or tuple(sorted(known))
    missing = [name for name in wanted if name not in known]
    if missing:
        raise SpecError(
            f"validation.nodes names {', '.join(missing)}, and the partition has only "
            f"{', '.join(sorted(known))}; correct the names, or cluster.partition"
        )
    candidates = [known[name] for name in wanted if name not in set(excluded)]
    by_standing = {one: [node for node in candidates if standing(node) is one] for one in Standing}
    idle = [node.name for node in by_standing[Standing.IDLE]]
    busy = [node.name for node in by_standing[Standing.BUSY]]
    kept = [name for name in busy if name in last_healthy]
    unknown = [name for name in busy if name not in last_healthy]
    lacking = max(0, needed - len(idle) - len(kept))
    return Candidates(
        probe=(*idle, *unknown[:lacking]),
        kept=tuple(kept),
        out={node.name: _why_out(node) for node in by_standing[Standing.OUT]},
    )


def _why_out(node: NodeState) -> str:
    reason = f" ({node.reason})" if node.reason else ""
    if not node.responds:
        return f"does not respond: Slurm says {node.raw_state}{reason}"
    return f"is kept out of use: Slurm says {node.raw_state}{reason}"
