"""The shard job, one of whose elements is killed in its first attempt, in the midst of its part."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from storage.job import JobContext
from storage.shards import build

VICTIM = 3


def run(context: JobContext) -> Mapping[str, Any] | None:
    if context.attempt == 1 and context.element == VICTIM:
        context.progress = _die_in_the_second_task  # type: ignore[method-assign]
    return build.run(context)


def _die_in_the_second_task(*, step: int, **_: float) -> None:
    if step > 1:
        print("a last line before the end", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
