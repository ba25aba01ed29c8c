"""A tree of cgroups for each cluster: what its nodes may use, and which processes are its own.

Every process of a cluster is born in this tree and its job steps stay below it, so taking a cluster
down needs no process names: what is in the tree belongs to the cluster, whoever started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm.devcluster.errors import DevClusterError, DevClusterUnavailable

TREE = "headrace-dev"
# Short, so that ranks wait for each other less than with the kernel's usual 100 ms; and several
# ticks of a kernel of 250 Hz, below which it notices too late that a share is used up.
QUOTA_PERIOD_US = 20_000
# A hundred times the weight of everything else: a node gets its quota even on a busy host.
_GUARANTEED_SHARES = 102_400
_GUARANTEED_V2_WEIGHT = 10_000

_CONTROLLERS = ("cpu", "cpuacct", "memory", "freezer", "devices", "pids")
_V2_CONTROLLERS = ("cpu", "memory", "pids", "cpuset")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
# With v2, processes may live in leaves only, and Slurm makes its own cgroups beside this one.
_V2_LEAF = "daemons"
_V2_STEPS = "system.slice"
_KILL_DEADLINE_S = 15.0


@dataclass(frozen=True)
class Hierarchy:
    """One mounted cgroup file system: with v1 one for each controller, with v2 a single one."""

    mount: Path
    version: int
    controllers: frozenset[str]


def machine_cores() -> tuple[int, ...]:
    """The cores that this machine, or the container that it is, may use.

    They are those of its first process: the caller's own may be fewer, and `up` is to come to the
    same each time.
    """
    return tuple(sorted(os.sched_getaffinity(1)))


def parse_mountinfo(text: str) -> tuple[Hierarchy, ...]:
    """The hierarchies to use, from ``/proc/self/mountinfo``: v1's as soon as there are any."""
    v1: dict[frozenset[str], Hierarchy] = {}
    v2: Hierarchy | None = None
    for line in text.splitlines():
        head, _, tail = line.partition(" - ")
        mount = Path(head.split()[4])
        fs_type, _, super_options = tail.split(maxsplit=2)
        if not mount.is_relative_to(_CGROUP_ROOT):
            continue
        if fs_type == "cgroup":
            controllers = frozenset(super_options.split(",")) & frozenset(_CONTROLLERS)
            if controllers:
                v1[controllers] = Hierarchy(mount, 1, controllers)
        elif fs_type == "cgroup2":
            v2 = Hierarchy(mount, 2, frozenset())
    if any("freezer" in key for key in v1) and any("memory" in key for key in v1):
        return tuple(v1.values())
    return (v2,) if v2 is not None else ()


@dataclass(frozen=True)
class CgroupTree:
    """The cgroups of one cluster, in every hierarchy."""

    cluster: str
    hierarchies: tuple[Hierarchy, ...]

    @classmethod
    def of(cls, cluster: str) -> CgroupTree:
        hierarchies = parse_mountinfo(Path("/proc/self/mountinfo").read_text())
        if not hierarchies:
            raise DevClusterUnavailable(
                "no dev cluster here: no cgroup file system with memory and freezer (v1) or v2 is "
                "mounted, and Slurm's limits need one; use `kind: local` in the spec"
            )
        return cls(cluster, hierarchies)

    @property
    def version(self) -> int:
        return self.hierarchies[0].version

    def directory(self, hierarchy: Hierarchy, host: str = "") -> Path:
        return hierarchy.mount / TREE / self.cluster / host

    def create(self, host: str, *, cpu_quota: float | None, guaranteed: bool = False) -> None:
        """Make a host's cgroups. What is guaranteed comes before all other work of this machine."""
        for hierarchy in self.hierarchies:
            directory = self.directory(hierarchy, host)
            directory.mkdir(parents=True, exist_ok=True)
            if hierarchy.version == 2:
                (directory / _V2_LEAF).mkdir(exist_ok=True)
                (directory / _V2_STEPS).mkdir(exist_ok=True)
                # systemd has made it; where there is none, it is only a place to mount on.
                (hierarchy.mount / _V2_STEPS).mkdir(exist_ok=True)
                _delegate(hierarchy.mount, directory / _V2_STEPS)
            _set_quota(hierarchy, directory, cpu_quota)
            if guaranteed:
                for level in (directory, directory.parent, directory.parent.parent):
                    _guarantee(hierarchy, level)

    def procs_files(self, host: str) -> tuple[Path, ...]:
        """The files into which a process writes its id to belong to a host."""
        leaf = _V2_LEAF if self.version == 2 else ""
        return tuple(
            self.directory(hierarchy, host) / leaf / "cgroup.procs"
            for hierarchy in self.hierarchies
        )

    def views(self, host: str) -> tuple[tuple[Path, Path], ...]:
        """Pairs of a cgroup of ours and the place where processes of the host shall see it.

        With v1 the host sees its own cgroups as the whole tree. With v2 Slurm puts all steps into
        the slice of the machine's services, so that is the place to take.
        """
        if self.version == 1:
            return tuple((self.directory(each, host), each.mount) for each in self.hierarchies)
        return tuple(
            (self.directory(each, host) / _V2_STEPS, each.mount / _V2_STEPS)
            for each in self.hierarchies
        )

    def cpu_time_s(self, host: str) -> float:
        """CPU time that all processes of a host, the dead ones included, have used together."""
        for hierarchy in self.hierarchies:
            directory = self.directory(hierarchy, host)
            if "cpuacct" in hierarchy.controllers:
                return int((directory / "cpuacct.usage").read_text()) / 1e9
            if hierarchy.version == 2:
                fields = dict(
                    line.split() for line in (directory / "cpu.stat").read_text().splitlines()
                )
                return int(fields["usage_usec"]) / 1e6
        raise DevClusterError(f"no cgroup on this machine counts the CPU time of {host}")

    def pids(self, host: str = "") -> frozenset[int]:
        found: set[int] = set()
        for hierarchy in self.hierarchies:
            for directory in _walk(self.directory(hierarchy, host)):
                with contextlib.suppress(OSError):
                    found.update(map(int, (directory / "cgroup.procs").read_text().split()))
        return frozenset(found - {0})

    def kill(self, host: str = "") -> None:
        """Kill what is in the tree, or in one host's part of it, and wait until it is gone."""
        deadline = time.monotonic() + _KILL_DEADLINE_S
        while pids := self.pids(host):
            if os.getpid() in pids:
                raise DevClusterError(
                    f"this process runs on dev cluster {self.cluster!r} itself and cannot take it "
                    "down; do so from outside a job"
                )
            if time.monotonic() > deadline:
                raise DevClusterError(
                    f"processes {sorted(pids)} of dev cluster {self.cluster!r} did not die within "
                    f"{_KILL_DEADLINE_S:.0f} s of SIGKILL; see /proc/<pid>/stack"
                )
            self._thaw(host)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            reap(pids)
            time.sleep(0.02)

    def remove(self) -> None:
        """Remove the empty tree; its parent too, once no other cluster has a part in it."""
        for hierarchy in self.hierarchies:
            top = self.directory(hierarchy)
            for directory in reversed(list(_walk(top))):
                _rmdir(directory)
            with contextlib.suppress(OSError):
                top.parent.rmdir()

    def _thaw(self, host: str) -> None:
        """A frozen (suspended) process does not die: v1 has to thaw it first."""
        for hierarchy in self.hierarchies:
            if "freezer" in hierarchy.controllers:
                for directory in _walk(self.directory(hierarchy, host)):
                    with contextlib.suppress(OSError):
                        (directory / "freezer.state").write_text("THAWED")


def reap(pids: frozenset[int]) -> None:
    """Collect those that happen to be our own children; everybody else's parent does it."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _walk(top: Path) -> Iterator[Path]:
    """A cgroup and all below it, parents first."""
    for directory, _, _ in os.walk(top):
        yield Path(directory)


def _rmdir(directory: Path) -> None:
    """The kernel lets go of a cgroup a moment after its last process."""
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while True:
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise DevClusterError(f"cgroup {directory} cannot be removed: {error}") from error
            time.sleep(0.02)
        else:
            return


def _set_quota(hierarchy: Hierarchy, directory: Path, cpu_quota: float | None) -> None:
    share_us = None if cpu_quota is None else round(cpu_quota * QUOTA_PERIOD_US)
    if hierarchy.version == 2:
        text = f"{'max' if share_us is None else share_us} {QUOTA_PERIOD_US}"
        (directory / "cpu.max").write_text(text)
        _set_burst(directory / "cpu.max.burst", share_us)
    elif "cpu" in hierarchy.controllers:
        (directory / "cpu.cfs_period_us").write_text(str(QUOTA_PERIOD_US))
        (directory / "cpu.cfs_quota_us").write_text(str(-1 if share_us is None else share_us))
        _set_burst(directory / "cpu.cfs_burst_us", share_us)


def _set_burst(file: Path, share_us: int | None) -> None:
    """Let a node make up for a period in which it waited for others, so that waits do not add up.

    Kernels before 5.14 do not know it.
    """
    if share_us is not None and file.exists():
        file.write_text(str(share_us))


def _guarantee(hierarchy: Hierarchy, directory: Path) -> None:
    if hierarchy.version == 2:
        (directory / "cpu.weight").write_text(str(_GUARANTEED_V2_WEIGHT))
    elif "cpu" in hierarchy.controllers:
        (directory / "cpu.shares").write_text(str(_GUARANTEED_SHARES))


def _delegate(mount: Path, directory: Path) -> None:
    """Make the controllers that Slurm uses usable below a cgroup: each level hands them on."""
    available = (mount / "cgroup.controllers").read_text().split()
    wanted = " ".join(f"+{name}" for name in _V2_CONTROLLERS if name in available)
    below = directory.relative_to(mount)
    for level in (*reversed(below.parents), below):
        (mount / level / "cgroup.subtree_control").write_text(wanted)
