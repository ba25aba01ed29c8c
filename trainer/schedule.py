"""The learning rate as a pure function of the step: a resumed run has nothing to restore."""

from __future__ import annotations

import math

from trainer.spec import ScheduleSpec


def learning_rate(step: int, *, schedule: ScheduleSpec, steps: int) -> float:
    """The rate of optimizer step `step`, counted from 1 to `steps`.

    Rises linearly to the peak at `warmup_steps`, then falls along half a cosine to
    `min_ratio` · peak at the last step.
    """
    peak = schedule.peak_lr
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    done = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * cosine)
