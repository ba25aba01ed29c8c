"""Entries of the jobs that the tests of `slurm` submit: each a job's whole work in a few lines."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storage.errors import DataError
from storage.job import JobContext, JobExit
from storage.records import ExitCode


def run(context: JobContext) -> Mapping[str, Any]:
    """Carry out the part that the payload names."""
    outputs: Mapping[str, Any] = _PARTS[context.job.payload["part"]](context)
    return outputs


def _meet(context: JobContext) -> Mapping[str, Any]:
    """All ranks say where they are; rank 0 tells what it heard, and its environment."""
    print("half a line, ", end="", flush=True)
    here = Path(context.job.folder, "met")
    here.mkdir(exist_ok=True)
    me = context.identity
    (here / str(me.rank)).write_text(f"{me.node} {me.local_rank} {me.world_size}")
    while len(list(here.iterdir())) < me.world_size:
        time.sleep(0.05)
    print("and its end", flush=True)
    return {
        "places": [(here / str(rank)).read_text() for rank in range(me.world_size)],
        "nodes": list(me.nodes),
        "environment": dict(os.environ),
        "path": sys.path,
        "folder": str(Path.cwd()),
        "modules": sorted(sys.modules),
    }


def _fail(context: JobContext) -> Mapping[str, Any]:
    if context.identity.rank == context.job.payload["rank"]:
        _until_others_wait(context)
        raise DataError("document 7 cannot be read")
    return _wait(context)


def _until_others_wait(context: JobContext) -> None:
    me = context.identity
    others = [rank for rank in range(me.world_size) if rank != me.rank]
    while not all(Path(context.job.folder, f"waiting.{rank}").exists() for rank in others):
        time.sleep(0.05)


def _leave(context: JobContext) -> Mapping[str, Any]:
    raise JobExit(ExitCode.RESUME, "told to leave", outputs={"step": 3})


def _killed(context: JobContext) -> Mapping[str, Any]:
    if context.identity.rank == context.job.payload["rank"]:
        _until_others_wait(context)
        print("a last line before the end", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return _wait(context)


def _silent(context: JobContext) -> Mapping[str, Any]:
    os._exit(0)


def _peer_lost(context: JobContext) -> Mapping[str, Any]:
    """Rank 1 ends as by a fault; rank 0 notices at once, as a collective would."""
    if context.identity.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")


def _greedy(context: JobContext) -> Mapping[str, Any]:
    """Takes memory past any limit, page by page."""
    taken = []
    while len(taken) < context.job.payload["megabytes"]:
        taken.append(bytearray(2**20))
    return {}


def _wait(context: JobContext) -> Mapping[str, Any]:
    """Until told by a signal, which leaves a mark."""
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, _: told.append(number))
    Path(context.job.folder, f"waiting.{context.identity.rank}").touch()
    while not told:
        time.sleep(0.05)
    Path(context.job.folder, f"told.{context.identity.rank}").write_text(str(told[0]))
    raise JobExit(ExitCode.RESUME, f"told by {signal.Signals(told[0]).name}")


def _go(context: JobContext) -> Mapping[str, Any]:
    """Until a file says so."""
    Path(context.job.folder, f"waiting.{context.identity.rank}").touch()
    while not Path(context.job.folder, "go").exists():
        time.sleep(0.05)
    return {}


def _stubborn(context: JobContext) -> Mapping[str, Any]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(context.job.folder, f"waiting.{context.identity.rank}").touch()
    while True:
        time.sleep(1)


_PARTS = {
    "fail": _fail,
    "go": _go,
    "greedy": _greedy,
    "killed": _killed,
    "leave": _leave,
    "meet": _meet,
    "peer lost": _peer_lost,
    "silent": _silent,
    "stubborn": _stubborn,
    "wait": _wait,
}
