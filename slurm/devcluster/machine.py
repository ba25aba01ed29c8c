"""What this machine must have for a dev cluster: root, namespaces, and packages of Debian."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable

from slurm.devcluster.daemons import SBIN_PATH
from slurm.devcluster.errors import DevClusterError, DevClusterUnavailable

PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurmdbd",
    "slurm-client",
    "munge",
    "mariadb-server",
    "iproute2",
)
INSTALL_COMMAND = f"apt-get install --no-install-recommends {' '.join(PACKAGES)}"

_PROGRAMS = (
    "munged",
    "mariadbd",
    "mariadb-install-db",
    "slurmdbd",
    "slurmctld",
    "slurmd",
    "sbatch",
    "sacctmgr",
    "sinfo",
    "ip",
    "tc",
    "unshare",
    "nsenter",
    "setsid",
    "taskset",
)
_ERROR_TAIL_LINES = 15


def missing_programs(*, path: str = SBIN_PATH) -> tuple[str, ...]:
    return tuple(name for name in _PROGRAMS if shutil.which(name, path=path) is None)


def check_privileges() -> None:
    """Refuse a machine that cannot have hosts of its own.

    Raises:
        DevClusterUnavailable: not root, or the kernel gives no namespaces.
    """
    if os.geteuid() != 0:
        raise DevClusterUnavailable(
            f"no dev cluster here: it needs root, and this is user {os.geteuid()}; run it as root, "
            "or use `kind: local` in the spec"
        )
    probe = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--cgroup", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0:
        raise DevClusterUnavailable(
            f"no dev cluster here: the kernel gives no namespaces ({probe.stderr.strip()}); run it "
            "on a machine or in a privileged container, or use `kind: local` in the spec"
        )


def check_programs(*, path: str = SBIN_PATH) -> None:
    """Refuse a machine without Slurm, munge or MariaDB.

    Raises:
        DevClusterUnavailable: names what is missing and the command that installs it.
    """
    missing = missing_programs(path=path)
    if missing:
        raise DevClusterUnavailable(
            f"no dev cluster here: {', '.join(missing)} missing; run `headrace dev up --install`, "
            f"or `{INSTALL_COMMAND}`"
        )


def install(say: Callable[[str], None]) -> None:
    """Install from Debian what is missing; as root.

    Raises:
        DevClusterError: apt-get is missing or failed; with the end of what it said.
    """
    if not missing_programs():
        return
    if shutil.which("apt-get") is None:
        raise DevClusterUnavailable(
            f"no dev cluster here: {', '.join(missing_programs())} missing, and there is no "
            "apt-get to install them with; install Slurm, munge and MariaDB by hand"
        )
    _apt(["update"], say)
    _apt(["install", "--yes", "--no-install-recommends", *PACKAGES], say)


def _apt(arguments: list[str], say: Callable[[str], None]) -> None:
    argv = ["apt-get", *arguments]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    tail: deque[str] = deque(maxlen=_ERROR_TAIL_LINES)
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as apt:
        assert apt.stdout is not None
        for line in apt.stdout:
            tail.append(line.rstrip())
            say(f"apt-get {arguments[0]}: {line.strip()[:100]}")
    if apt.returncode != 0:
        said = "\n".join(f"  {line}" for line in tail)
        raise DevClusterError(f"`{' '.join(argv)}` ended with {apt.returncode}:\n{said}")
