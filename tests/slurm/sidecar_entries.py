"""Sidecars of the jobs that the tests of `slurm` submit."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from storage.job import JobContext
from storage.records import encode


def run(context: JobContext, leave: threading.Event) -> None:
    """Leaves its process id, waits to be told to leave, works on, and leaves a mark.

    The payload says how long it works, or the file that must be there first, and for each kind of
    misbehaviour on which node it occurs.
    """
    job, node = context.job, context.identity.node
    begun = Path(job.folder, f"begun.{node}")
    with begun.open("a") as pids:
        pids.write(f"{os.getpid()} {os.getppid()}\n")
    if node in job.payload.get("broken", ()):
        raise RuntimeError("the sidecar is broken")
    Path(job.folder, f"identity.{node}").write_bytes(encode(context.identity))
    Path(job.folder, f"modules.{node}").write_text("\n".join(sorted(sys.modules)))
    print("half a line, and its end", flush=True)
    leave.wait()
    Path(job.folder, f"told.{node}").touch()
    deadline = time.monotonic() + job.payload.get("work_s", 0.0)
    awaited = Path(job.folder, job.payload.get("until", "."))
    while (
        time.monotonic() < deadline or not awaited.exists() or node in job.payload.get("stays", ())
    ):
        time.sleep(0.02)
    Path(job.folder, f"done.{node}").touch()
