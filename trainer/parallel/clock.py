"""How long a rank stands in collectives, measured where that can be told apart.

On the CPU a collective of gloo holds the calling thread until it is done, so the time spent in the
call *is* the time spent on communication and on waiting for peers. On an accelerator the call only
queues work; nothing is measured there, and nothing claimed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)


class CollectiveClock:
    """Counts seconds in collectives; `is_waiting` tells the watchdog that a peer is awaited."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_waiting = False

    @contextmanager
    def measured(self) -> Iterator[None]:
        start = time.perf_counter()
        self.is_waiting = True
        yield
        # Left set when the collective raises: whoever failed in one was waiting for a peer.
        self.is_waiting = False
        self.seconds += time.perf_counter() - start


class TimedAllGather(DefaultAllGather):
    """FSDP's all-gather of parameters, on the clock."""

    def __init__(self, clock: CollectiveClock) -> None:
        self._clock = clock

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        with self._clock.measured():
            return super().__call__(*args, **kwargs)


class TimedReduceScatter(DefaultReduceScatter):
    """FSDP's reduce-scatter of gradients, on the clock."""

    def __init__(self, clock: CollectiveClock) -> None:
        self._clock = clock

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work:
        with self._clock.measured():
            return super().__call__(*args, **kwargs)
