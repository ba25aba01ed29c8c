"""The sidecar of a node itself: hands its module the context, and word of when to leave.

Started and restarted by `slurm.sidecar`, with which it ends. It has no heartbeat and writes no exit
record: what it says goes to its log, and what it does not do is noticed by the ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm.sidecar import FOR_RANKS
from storage.job import JobContext, JobDescription, RankIdentity


def node_identity(environ: Mapping[str, str] = os.environ) -> RankIdentity:
    """The node's place among the nodes of the job, whichever of them its step was started on."""
    nodes = environ["HEADRACE_NODES"].split(",")
    here = {
        "SLURM_PROCID": str(nodes.index(environ["SLURMD_NODENAME"])),
        "SLURM_NTASKS": str(len(nodes)),
        "SLURM_LOCALID": "0",
    }
    return RankIdentity.from_environment({**environ, **here})


def _hear(leave: threading.Event) -> None:
    """In a thread: a handler would run inside whatever the main thread does with the event."""
    while True:
        signal.sigwait({signal.SIGUSR1})
        leave.set()


def _end_with_guard() -> None:
    """The guard writes nothing to the pipe that is standard input here, which ends with it."""
    os.read(0, 1)
    os._exit(1)


def main(arguments: Sequence[str]) -> int:
    faulthandler.enable()
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR1})
    for number in FOR_RANKS:
        signal.signal(number, signal.SIG_IGN)
    leave = threading.Event()
    threading.Thread(target=_hear, args=(leave,), daemon=True).start()
    threading.Thread(target=_end_with_guard, daemon=True).start()
    try:
        job = JobDescription.read(Path(arguments[0]))
        assert job.sidecar is not None
        context = JobContext(job, node_identity())
        importlib.import_module(job.sidecar).run(context, leave)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    left_with = main(sys.argv[1:])
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # A thread that the module left behind must not keep it.
    os._exit(left_with)
