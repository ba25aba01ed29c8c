"""The daemons of a dev cluster: how each is called, started, recognised again and waited for.

A daemon is known by the process id and start time that it recorded, by its cgroup and by its
network namespace; never by a name, which another cluster's daemon has as well.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm.devcluster.cgroups import CgroupTree, reap
from slurm.devcluster.config import HEAD, ClusterShape, Layout
from slurm.devcluster.errors import DevClusterError
from slurm.devcluster.hosts import in_namespace

SBIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LOG_TAIL_LINES = 15
_FRESH_DATABASE = ".db-new"
_POLL_S = 0.05
_KILL_DEADLINE_S = 10.0
_STOP_DEADLINE_S = 20.0


@dataclass(frozen=True)
class Daemon:
    """One program on one host."""

    name: str
    host: str
    argv: tuple[str, ...]

    def pid_file(self, layout: Layout) -> Path:
        return layout.run_dir / f"{self.host}-{self.name}.pid"

    def log(self, layout: Layout) -> Path:
        """All that it said, its first words included."""
        return layout.log_dir / f"{self.host}-{self.name}.log"


def munged(layout: Layout) -> Daemon:
    argv = (
        "munged",
        "--foreground",
        f"--socket={layout.munge_socket}",
        f"--key-file={layout.munge_key}",
        f"--pid-file={layout.run_dir}/munged.pid",
        f"--seed-file={layout.run_dir}/munged.seed",
        f"--log-file={layout.log_dir}/munged-internal.log",
    )
    return Daemon("munged", HEAD, argv)


def mariadbd(layout: Layout) -> Daemon:
    """Without any flush to the disk: the data outlive a killed process, and need no more."""
    argv = (
        "mariadbd",
        "--no-defaults",
        "--user=root",
        f"--datadir={layout.database}",
        f"--socket={layout.database_socket}",
        f"--pid-file={layout.run_dir}/mariadbd-internal.pid",
        "--skip-networking",
        "--skip-name-resolve",
        "--skip-log-bin",
        "--performance-schema=OFF",
        "--innodb-buffer-pool-size=64M",
        "--innodb-log-file-size=16M",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-flush-method=nosync",
        "--innodb-lock-wait-timeout=900",
    )
    return Daemon("mariadbd", HEAD, argv)


def slurmdbd() -> Daemon:
    return Daemon("slurmdbd", HEAD, ("slurmdbd", "-D"))


def slurmctld(layout: Layout) -> Daemon:
    return Daemon("slurmctld", HEAD, ("slurmctld", "-D", "-f", str(layout.slurm_conf)))


def slurmd(layout: Layout, node: str) -> Daemon:
    return Daemon("slurmd", node, ("slurmd", "-D", "-N", node, "-f", str(layout.slurm_conf)))


def all_daemons(shape: ClusterShape, layout: Layout) -> tuple[Daemon, ...]:
    """In the order in which they need each other."""
    accounting = () if shape.accounting == "off" else (mariadbd(layout), slurmdbd())
    control = (munged(layout), *accounting, slurmctld(layout))
    return (*control, *(slurmd(layout, node) for node in shape.nodes))


def initialise_database(layout: Layout) -> None:
    """Make the database's directory, whole or not at all."""
    for leftover in layout.root.glob(f"*{_FRESH_DATABASE}"):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh = layout.root / f"{secrets.token_hex(4)}{_FRESH_DATABASE}"
    argv = (
        "mariadb-install-db",
        "--no-defaults",
        "--user=root",
        "--auth-root-authentication-method=socket",
        "--skip-test-db",
        "--skip-name-resolve",
        "--innodb-log-file-size=16M",
        f"--datadir={fresh}",
    )
    installer = Daemon("mariadb-install-db", HEAD, argv)
    code = _spawn(_entry(installer, layout), log=installer.log(layout), layout=layout)
    if code != 0:
        raise DevClusterError(
            f"{installer.name} ended with {code}\n{log_tail(installer.log(layout))}"
        )
    installer.pid_file(layout).unlink()
    fresh.chmod(0o700)
    fresh.rename(layout.database)


def start(daemon: Daemon, *, layout: Layout) -> None:
    """Start a daemon on its host and return at once; nothing of it hangs on this process."""
    daemon.pid_file(layout).unlink(missing_ok=True)
    argv = ("setsid", "--fork", *_entry(daemon, layout))
    code = _spawn(argv, log=daemon.log(layout), layout=layout)
    if code != 0:
        raise DevClusterError(f"`{' '.join(argv)}` ended with {code}")


def _entry(daemon: Daemon, layout: Layout) -> tuple[str, ...]:
    script = layout.entry_script(daemon.host)
    return ("/bin/sh", str(script), str(daemon.pid_file(layout)), *daemon.argv)


def _spawn(argv: tuple[str, ...], *, log: Path, layout: Layout) -> int:
    environment = {
        "PATH": SBIN_PATH,
        "LC_ALL": "C.UTF-8",
        "SLURM_CONF": str(layout.slurm_conf),
        "MYSQL_UNIX_PORT": str(layout.database_socket),
    }
    with log.open("a") as output:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd="/",
            check=False,
        ).returncode


def running_pid(
    daemon: Daemon, *, shape: ClusterShape, layout: Layout, tree: CgroupTree
) -> int | None:
    """Process id of a daemon that is alive and where it belongs."""
    pid = _recorded_pid(daemon, layout)
    if pid is None or pid not in tree.pids(daemon.host):
        return None
    return pid if in_namespace(link=shape.link(daemon.host), pid=pid) else None


def kill(daemon: Daemon, *, layout: Layout) -> None:
    """Kill exactly the process that the daemon recorded, if it lives, and wait for its end."""
    if not _end(daemon, signal.SIGKILL, layout=layout, timeout_s=_KILL_DEADLINE_S):
        raise DevClusterError(f"{daemon.name} on {daemon.host} does not die")


def stop(daemon: Daemon, *, layout: Layout) -> None:
    """As a site stops it: it writes its state before it ends, unless that takes too long."""
    if not _end(daemon, signal.SIGTERM, layout=layout, timeout_s=_STOP_DEADLINE_S):
        kill(daemon, layout=layout)


def _end(daemon: Daemon, number: signal.Signals, *, layout: Layout, timeout_s: float) -> bool:
    pid = _recorded_pid(daemon, layout)
    if pid is None:
        return True
    os.kill(pid, number)
    deadline = time.monotonic() + timeout_s
    while _recorded_pid(daemon, layout) is not None:
        if time.monotonic() > deadline:
            return False
        reap(frozenset({pid}))
        time.sleep(_POLL_S)
    return True


def _recorded_pid(daemon: Daemon, layout: Layout) -> int | None:
    try:
        pid_text, start_time = daemon.pid_file(layout).read_text().split()
        stat = Path(f"/proc/{pid_text}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # proc(5): after the name, which may hold blanks, come the state (3) and the start time (22).
    fields = stat.rpartition(")")[2].split()
    alive = fields[0] not in "ZX" and fields[19] == start_time
    return int(pid_text) if alive else None


def wait_for(
    daemon: Daemon, ready: Callable[[], bool], *, layout: Layout, timeout_s: float
) -> None:
    """Wait until a daemon serves.

    Raises:
        DevClusterError: it ended, or does not serve in time; with the end of its log.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        check_alive(daemon, layout=layout)
        if time.monotonic() > deadline:
            raise DevClusterError(
                f"{daemon.name} on {daemon.host} does not answer within {timeout_s:.0f} s\n"
                f"{log_tail(daemon.log(layout))}"
            )
        time.sleep(_POLL_S)


def check_alive(daemon: Daemon, *, layout: Layout) -> None:
    """Refuse to wait for a daemon that was started and has ended.

    Raises:
        DevClusterError: it has; with the end of its log.
    """
    if daemon.pid_file(layout).exists() and _recorded_pid(daemon, layout) is None:
        raise DevClusterError(
            f"{daemon.name} on {daemon.host} ended\n{log_tail(daemon.log(layout))}"
        )


def accepts(address: str | Path, port: int = 0) -> bool:
    """Whether something listens on a TCP address, or on a unix socket."""
    unix = isinstance(address, Path)
    with socket.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(address) if unix else (address, port))
        except OSError:
            return False
        return True


def log_tail(path: Path) -> str:
    """The end of a log under its path, for an error message."""
    if not path.exists():
        return f"(no log at {path})"
    lines = path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    return "\n".join([f"the end of {path}:", *(f"  {line}" for line in lines)])
