"""Entries of jobs whose ranks lose each other: what matters is only that they wait for a peer."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm.peers import Peers
from storage.job import JobContext


def run(context: JobContext) -> Mapping[str, Any]:
    """Waits, deaf to SIGTERM as a rank in a collective is, until the file `go` is there.

    The rank that the payload calls `busy` first holds the interpreter for so many seconds.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    me, folder = context.identity, context.job.folder
    assert isinstance(context.peers, Peers)
    while len(context.peers.neighbours) < _expected(context):
        time.sleep(0.05)
    Path(folder, f"pid.{me.rank}.tmp").write_text(str(os.getpid()))
    Path(folder, f"pid.{me.rank}.tmp").rename(Path(folder, f"pid.{me.rank}"))
    if me.rank == context.job.payload.get("busy"):
        ctypes.PyDLL(None).sleep(context.job.payload["busy_s"])
        Path(folder, "was busy").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.05)
    return {}


def _expected(context: JobContext) -> int:
    """How many neighbours this rank has in the end."""
    me = context.identity
    nodes, per_node = len(me.nodes), me.world_size // len(me.nodes)
    return 1 if me.local_rank > 0 else per_node - 1 + min(2, nodes - 1)
