"""Does the trainer scale: pure, from what the rungs measured to a table and a verdict.

Weak scaling: the load of a rank is constant, so tokens/s should grow with the nodes. Efficiency is
E(N) = T(N)·N₀ / (N·T(N₀)), against the smallest rung N₀; the gain of a doubling is T(2N)/T(N). Both
gate, for 1.6 at each of three doublings alone would let through what is worth half of its nodes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.spec import SmokeSpec

_ADVICE: Mapping[str | None, str] = {
    "data_s": "look at the shard cache and at reading from the object store",
    "compute_s": "look at that rank's node: other load, throttling, cores that ranks share",
    "comm_s": "look at the links between the nodes and the interface in use "
    "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), or raise train.micro_batch",
    "compute_and_comm_s": "look at the links between the nodes and at that rank's node, or raise "
    "train.micro_batch",
    "checkpoint_s": "look at the object store",
}
_ADVICE_OTHERWISE = "look at the rank's log for what it waits for"


@dataclass(frozen=True, kw_only=True)
class Rung:
    """What one node count measured. `split_s` are the seconds a step that each part takes."""

    nodes: int
    world_size: int
    tokens_per_s: float
    step_s: float
    split_s: Mapping[str, float]
    slowest_rank: int | None = None
    slowest_node: str | None = None

    @classmethod
    def from_outputs(cls, outputs: Mapping[str, Any]) -> Rung:
        """A rung from the outputs of its job."""
        return cls(
            nodes=outputs["nodes"],
            world_size=outputs["world_size"],
            tokens_per_s=outputs["tokens_per_s"],
            step_s=statistics.median(outputs["step_s"]),
            split_s=outputs["split_s"],
            slowest_rank=outputs["slowest_rank"],
            slowest_node=outputs["slowest_node"],
        )


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The part of a step that grew the most since the rung before."""

    part: str
    from_s: float
    to_s: float

    def __str__(self) -> str:
        name = self.part.removesuffix("_s").replace("comm", "communication").replace("_", " ")
        return f"{name} grew from {self.from_s:.3g} to {self.to_s:.3g} s a step"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A rung against those below it. `ratio` and `min_ratio` are None at the first one."""

    rung: Rung
    efficiency: float
    ratio: float | None = None
    min_ratio: float | None = None
    growth: Growth | None = None

    @property
    def scales(self) -> bool:
        """Whether the gain over the rung before is enough."""
        if self.ratio is None or self.min_ratio is None:
            return math.isfinite(self.rung.tokens_per_s) and self.rung.tokens_per_s > 0
        return self.ratio >= self.min_ratio

    @property
    def cause(self) -> str:
        """Which part of a step grew, which rank is the slowest, and what to look at."""
        told = []
        if self.growth is not None:
            told.append(str(self.growth))
        if self.rung.slowest_rank is not None:
            told.append(f"the slowest is rank {self.rung.slowest_rank} on {self.rung.slowest_node}")
        part = None if self.growth is None else self.growth.part
        return "; ".join((*told, _ADVICE.get(part, _ADVICE_OTHERWISE)))

    def to_json(self) -> dict[str, Any]:
        """The row as it stands in the stage's record."""
        return {
            "nodes": self.rung.nodes,
            "world_size": self.rung.world_size,
            "tokens_per_s": self.rung.tokens_per_s,
            "step_s": self.rung.step_s,
            "efficiency": self.efficiency,
            "ratio": self.ratio,
            "min_ratio": self.min_ratio,
            "split_s": dict(self.rung.split_s),
            "grew": None if self.growth is None else str(self.growth),
            "slowest_rank": self.rung.slowest_rank,
            "slowest_node": self.rung.slowest_node,
        }


@dataclass(frozen=True, kw_only=True)
class ScalingVerdict:
    """The table, and what it falls short of. Without `gates` that is reported and stops nothing."""

    rows: tuple[Row, ...]
    gates: bool
    shortcomings: tuple[str, ...]

    @property
    def refused(self) -> bool:
        return self.gates and bool(self.shortcomings)

    @property
    def reason(self) -> str:
        """The verdict in words."""
        if not self.shortcomings:
            top = self.rows[-1]
            return f"scales to {top.rung.nodes} nodes with efficiency {top.efficiency:.2f}"
        told = "; ".join(self.shortcomings)
        if not self.gates:
            return f"{told}; reported only, for ranks here share the host's cores"
        return f"{told}. {self.rows[-1].cause}"


def judge(rungs: Sequence[Rung], *, top_nodes: int, spec: SmokeSpec, gates: bool) -> ScalingVerdict:
    """The verdict on the rungs run so far, smallest first.

    Efficiency is judged at the rung of `top_nodes` only, since it may fall on the way there.
    """
    rows: list[Row] = []
    shortcomings: list[str] = []
    for rung in rungs:
        row = _row(rung, rows, min_ratio=spec.min_ratio)
        rows.append(row)
        if not row.scales:
            shortcomings.append(_too_little_gain(rows, min_ratio=spec.min_ratio))
        if rung.nodes == top_nodes and not row.efficiency >= spec.min_efficiency:
            shortcomings.append(
                f"efficiency at {rung.nodes} nodes is {row.efficiency:.2f}, less than "
                f"smoke.min_efficiency {spec.min_efficiency:g}"
            )
    return ScalingVerdict(rows=tuple(rows), gates=gates, shortcomings=tuple(shortcomings))


def to_text(verdict: ScalingVerdict) -> str:
    """The table for a terminal or a log, and the verdict below it."""
    lines = ["nodes  ranks  tokens/s    gain  efficiency  step s"]
    for row in verdict.rows:
        gain = "-" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(
            f"{row.rung.nodes:5d}  {row.rung.world_size:5d}  {row.rung.tokens_per_s:8.0f}  "
            f"{gain:>6}  {row.efficiency:10.2f}  {row.rung.step_s:6.3f}"
        )
    return "\n".join([*lines, verdict.reason])


def _row(rung: Rung, below: Sequence[Row], *, min_ratio: float) -> Row:
    if not below:
        return Row(rung=rung, efficiency=1.0)
    base, before = below[0].rung, below[-1].rung
    return Row(
        rung=rung,
        efficiency=_quotient(rung.tokens_per_s * base.nodes, rung.nodes * base.tokens_per_s),
        ratio=_quotient(rung.tokens_per_s, before.tokens_per_s),
        # A step that is no doubling is held to the same gain a doubling.
        min_ratio=min_ratio ** math.log2(rung.nodes / before.nodes),
        growth=_growth(before, rung),
    )


def _quotient(value: float, by: float) -> float:
    return value / by if by > 0 else math.nan


def _growth(before: Rung, after: Rung) -> Growth | None:
    growths = [
        Growth(part=part, from_s=before.split_s.get(part, 0.0), to_s=seconds)
        for part, seconds in after.split_s.items()
    ]
    grown = max(growths, key=lambda growth: growth.to_s - growth.from_s, default=None)
    return grown if grown is not None and grown.to_s > grown.from_s else None


def _too_little_gain(rows: Sequence[Row], *, min_ratio: float) -> str:
    row = rows[-1]
    if row.ratio is None or row.min_ratio is None:
        return f"{row.rung.nodes} nodes measured {row.rung.tokens_per_s:g} tokens/s"
    return (
        f"{row.rung.nodes} nodes do {row.ratio:.2f} times the tokens/s of {rows[-2].rung.nodes}, "
        f"less than {row.min_ratio:.2f}, for smoke.min_ratio {min_ratio:g} a doubling"
    )
