"""The learning rate as a pure function of the step: a resumed run has nothing to restore."""

from __future__ import annotations

import math

from trainer.spec import ScheduleSpec


def learning_rate(step: int, *, schedule: ScheduleSpec, steps: int) -> float:
    """The rate of optimizer step `step`, counted from 1 to `steps`.

    Rises linearly to the peak at the end of the warm-up, then falls along half a cosine to
    `min_ratio` · peak at the last step.
    """
    peak, warmup = schedule.peak_lr, schedule.warmup(steps)
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * cosine)
