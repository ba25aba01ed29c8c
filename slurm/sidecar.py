"""The guard of a node's sidecar: keeps it running until the job's ranks are over, and a bit longer.

Run as `python -P -m slurm.sidecar <job.json>` on every node of a job that has a sidecar. It starts
`slurm.sidecar_work` as a child, and again whenever that dies; should this process be killed, the
child goes with it, and the batch step starts another guard. So little is imported here that there
is little to fail. SIGUSR1 says that the ranks are over; what is meant for ranks is ignored.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

LEAVING = "--leaving"
"""Given to a guard that is started after the ranks were over."""
GAVE_UP = 70
"""How it leaves when the sidecar cannot do its last work; starting another would not help."""
FOR_RANKS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 30.0
STEADY_S = 10.0
"""A sidecar that ran for so long did not fall over its own start."""
LAST_TRIES = 3
"""So many sidecars in a row may fall over their start before nothing is hoped for at the end."""

_HEARD = frozenset({signal.SIGUSR1, signal.SIGCHLD})


def pause_s(brief: int) -> float:
    """How long to wait after so many in a row that ended soon after they had started."""
    return float(min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(max(brief - 1, 0), 10)))


def guard(command: Sequence[str], *, leaving: bool) -> int:
    """Keep the command running until it ends with 0, and return the code to leave with."""
    # Blocked, and not handled, so that none is missed; the child is born with them blocked, too.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    for number in FOR_RANKS:
        signal.signal(number, signal.SIG_IGN)
    brief = 0
    while True:
        begin = time.monotonic()
        # The pipe is how the child sees that this process is gone.
        with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
            if leaving:
                child.send_signal(signal.SIGUSR1)
            while (code := child.poll()) is None:
                if signal.sigwait(_HEARD) == signal.SIGUSR1:
                    leaving = True
                    child.send_signal(signal.SIGUSR1)
        if code == 0:
            return 0
        brief = 0 if time.monotonic() - begin > STEADY_S else brief + 1
        how = signal.Signals(-code).name if code < 0 else str(code)
        if leaving and brief >= LAST_TRIES:
            _say(f"the sidecar ended with {how} for the {brief}th time on end; giving it up")
            return GAVE_UP
        wait_s = FIRST_PAUSE_S if leaving else pause_s(brief)
        _say(f"the sidecar ended with {how}; starting it again in {wait_s:g} s")
        if leaving:
            time.sleep(wait_s)
        else:
            leaving = signal.sigtimedwait({signal.SIGUSR1}, wait_s) is not None


def _say(words: str) -> None:
    # A full disk is no reason to let the sidecar go unguarded.
    with contextlib.suppress(OSError):
        print(f"headrace: {words}", flush=True)


def main(arguments: Sequence[str]) -> int:
    command = [sys.executable, "-P", "-m", "slurm.sidecar_work", arguments[0]]
    return guard(command, leaving=LEAVING in arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
