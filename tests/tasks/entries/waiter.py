"""The job of the engines' tests: leaves a mark that it worked, and goes on until it is let go."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storage.job import JobContext

DEADLINE_S = 80.0


def run(context: JobContext) -> Mapping[str, Any]:
    mark = f"worked.{os.environ['SLURM_JOB_ID']}"
    if context.identity.rank == 0:
        (context.job.folder / mark).touch()
        print("the work has begun", flush=True)
    context.progress(step=1)
    go = Path(context.job.payload["go"])
    deadline = time.monotonic() + DEADLINE_S
    while not go.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody made {go}")
        time.sleep(0.05)
    return {"mark": mark}
