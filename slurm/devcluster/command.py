"""One way to run a command that has to succeed: with a time limit, and its own words on failure."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from slurm.devcluster.errors import DevClusterError

_TIMEOUT_S = 30.0


def run(
    argv: Sequence[str],
    *,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> str:
    """Standard output of a command; ``env`` adds to this process's environment.

    Raises:
        DevClusterError: it failed, or did not end in time.
    """
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **(env or {})},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DevClusterError(f"`{' '.join(argv)}` did not end within {timeout_s:.0f} s") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise DevClusterError(f"`{' '.join(argv)}` ended with {done.returncode}: {said}")
    return done.stdout
