"""How often to save: by steps, by time, or as often as what saves cost and how nodes fail suggest.

Rank 0 alone asks, and tells the others in the step's all-reduce; its clock is passed in.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.spec import CheckpointSpec, DiskSpec

FIRST_STEPS = 8
"""With `auto`, the first save comes after so many steps, so that there is something to go by."""
REMEMBERED = 16
MEDIAN_STEPS = 128
TOLD_AGAIN = 1.5
"""An interval that has changed by this factor since it was told is told again."""
_DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class SaveCost:
    """What a save was measured to take, in seconds.

    The loop stood still for `blocked_s`; all steps beside the flush together took `slowed_s` longer
    than others, which for one save may be noise and below 0; the commit stood after `durable_s`.
    """

    blocked_s: float
    slowed_s: float
    durable_s: float


def mean_cost(costs: Sequence[SaveCost]) -> SaveCost:
    """Of at least one save; noise that would make saves a gain is taken for none."""
    return SaveCost(
        blocked_s=statistics.fmean(cost.blocked_s for cost in costs),
        slowed_s=max(0.0, statistics.fmean(cost.slowed_s for cost in costs)),
        durable_s=statistics.fmean(cost.durable_s for cost in costs),
    )


def mttf_s(*, nodes: int, failures_per_node_day: float) -> float:
    """Mean time to a failure of any of the nodes."""
    return _DAY_S / (nodes * failures_per_node_day)


def best_interval_s(cost: SaveCost, *, mttf_s: float) -> float:
    """Young's √(2 · w · MTTF) (1974; the first order of Daly's of 2006), w the time lost to a save.

    At most the MTTF, as Daly has it for saves that cost more than half of that, and never shorter
    than a flush takes.
    """
    lost_s = cost.blocked_s + cost.slowed_s
    return max(min(math.sqrt(2 * lost_s * mttf_s), mttf_s), cost.durable_s)


def slowed_s(beside: Sequence[float], usual: Sequence[float]) -> float:
    """How much longer the steps beside a flush took than as many usual ones, by the medians."""
    if not beside or not usual:
        return 0.0
    return len(beside) * (statistics.median(beside) - statistics.median(usual))


def spell(duration_s: float) -> str:
    """A duration in the two units that matter."""
    if duration_s < 60:
        return f"{duration_s:.3g} s"
    if duration_s < 3600:
        minutes, seconds = divmod(round(duration_s), 60)
        return f"{minutes} min {seconds} s"
    if duration_s < 2 * _DAY_S:
        hours, minutes = divmod(round(duration_s / 60), 60)
        return f"{hours} h {minutes} min"
    return f"{duration_s / _DAY_S:,.1f} days"


class Pace:
    """When rank 0 wants a save. What is due stays so until a save is begun."""

    def __init__(self, spec: CheckpointSpec | DiskSpec, *, nodes: int, now_s: float) -> None:
        self._every_steps = spec.every_steps
        self._every_s = spec.every_s
        self._is_auto, self._mttf_s = False, math.inf
        if isinstance(spec, CheckpointSpec):
            self._is_auto = spec.auto
            self._mttf_s = mttf_s(nodes=nodes, failures_per_node_day=spec.failures_per_node_day)
        self._last_s = now_s
        self._steps = 0
        self._is_due = False
        self._costs: deque[SaveCost] = deque(maxlen=REMEMBERED)
        self._usual: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._beside: list[float] = []
        self._told_s: float | None = None

    def is_due(self, step: int, *, now_s: float) -> bool:
        """Whether a save is wanted after this step; to be asked once for each step."""
        self._steps += 1
        if self._every_steps is not None:
            reached = step % self._every_steps == 0
        elif self._every_s is not None:
            reached = now_s - self._last_s >= self._every_s
        else:
            reached = self._steps == FIRST_STEPS
        self._is_due = self._is_due or reached
        return self._is_due

    def begun(self, *, now_s: float) -> None:
        """A save was begun."""
        self._is_due = False
        self._last_s = now_s

    def failed(self) -> None:
        """A save came to nothing, so the next one is due at once."""
        self._is_due = True

    def stepped(self, step_s: float, *, is_flushing: bool) -> None:
        """What a step took, with or without a save on its way to the store."""
        if is_flushing:
            self._beside.append(step_s)
        else:
            self._usual.append(step_s)

    def measured(self, *, blocked_s: float, durable_s: float) -> None:
        """A save is committed; with `auto` the interval follows from it and those before."""
        slower_s = slowed_s(self._beside, self._usual)
        self._beside.clear()
        self._costs.append(SaveCost(blocked_s=blocked_s, slowed_s=slower_s, durable_s=durable_s))
        if self._is_auto:
            self._every_s = best_interval_s(mean_cost(self._costs), mttf_s=self._mttf_s)

    def news(self) -> str | None:
        """What `auto` has chosen and from which numbers, when that is new."""
        chosen_s, told_s = self._every_s, self._told_s
        if not self._is_auto or chosen_s is None:
            return None
        if told_s is not None and 1 / TOLD_AGAIN < chosen_s / told_s < TOLD_AGAIN:
            return None
        self._told_s = chosen_s
        cost = mean_cost(self._costs)
        steps = max(1, round(chosen_s / statistics.median(self._usual))) if self._usual else None
        often = spell(chosen_s) if steps is None else f"{steps:,} steps ({spell(chosen_s)})"
        text = (
            f"checkpoints every {often}: Young/Daly from {cost.blocked_s + cost.slowed_s:.3g} s a "
            f"save and one failure in {spell(self._mttf_s)}"
        )
        if chosen_s == cost.durable_s:
            text += "; no shorter than a save takes to be committed"
        return text
