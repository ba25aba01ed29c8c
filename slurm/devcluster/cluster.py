"""Bring a dev cluster up, look at it, unplug its nodes, and take it away without a trace.

Coming up is a list of steps that each make only what is missing, so one call serves for a first
start, for the repair of a cluster that lost a daemon, and after a start that was killed half-way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from slurm.devcluster import config, daemons, files, folders, hosts, machine
from slurm.devcluster.cgroups import CgroupTree, machine_cores
from slurm.devcluster.command import run
from slurm.devcluster.config import DEFAULT_BASE, HEAD, ClusterShape, Layout
from slurm.devcluster.daemons import Daemon
from slurm.devcluster.errors import DevClusterError
from slurm.devcluster.status import ClusterStatus, DaemonStatus, NodeStatus, is_present
from storage.errors import SpecError

Say = Callable[[str], None]
Outcome = Literal["created", "repaired", "already up"]

_LOCK_TIMEOUT_S = 180.0
_DAEMON_TIMEOUT_S = 60.0


def _silent(_: str) -> None:
    """Progress that nobody wants to see."""


class DevCluster:
    """One dev cluster; the object holds no state of its own, so any number may look at one cluster.

    ``base`` is the directory that holds the state of all clusters, a folder each.
    """

    def __init__(self, shape: ClusterShape, *, base: Path = DEFAULT_BASE) -> None:
        self.shape = shape
        self.layout = Layout(base / shape.name)

    @classmethod
    def load(cls, name: str, *, base: Path = DEFAULT_BASE) -> DevCluster:
        """The cluster that was brought up under a name.

        Raises:
            DevClusterError: there is none.
        """
        shape = files.stored_shape(Layout(base / name))
        if shape is None:
            raise DevClusterError(
                f"there is no dev cluster {name!r} in {base}; bring it up with `headrace dev up`"
            )
        return cls(shape, base=base)

    @staticmethod
    def stored_shape(name: str, *, base: Path = DEFAULT_BASE) -> ClusterShape | None:
        """The shape that a cluster was brought up with, None where there is none."""
        return files.stored_shape(Layout(base / name))

    @property
    def slurm_conf(self) -> Path:
        return self.layout.slurm_conf

    @property
    def host(self) -> str:
        """Address of this machine as the nodes see it; servers for them must listen there."""
        return str(self.shape.bridge_address)

    def env(self) -> dict[str, str]:
        """What Slurm's commands and Headrace need in the environment to use this cluster."""
        return {"SLURM_CONF": str(self.slurm_conf), "HEADRACE_DEV_HOST": self.host}

    def up(self, say: Say = _silent) -> Outcome:
        """Make the cluster run, whatever of it is there already.

        Raises:
            DevClusterUnavailable: this machine cannot carry one.
            DevClusterError: it runs with another shape, or a part of it does not start.
        """
        machine.check_privileges()
        machine.check_programs()
        with _lock(self.shape.name):
            hosts.check_owner(cluster=self.shape.name, layout=self.layout)
            existed = self._check_same_shape()
            tree = CgroupTree.of(self.shape.name)
            if existed and self._is_whole(tree):
                return "already up"
            hosts.check_subnet_free(self.shape)
            say("writing the configuration")
            if files.write(shape=self.shape, layout=self.layout, tree=tree):
                self._stop_daemons()
            say(f"cabling {len(self.shape.nodes)} nodes to {self.shape.bridge}")
            hosts.ensure_network(shape=self.shape, layout=self.layout)
            guaranteed = self.shape.leaves_room_on(len(machine_cores()))
            for host in self.shape.hosts:
                quota = None if host == HEAD else self.shape.cpu_quota
                tree.create(host, cpu_quota=quota, guaranteed=guaranteed)
            self._start_daemons(tree, say)
            self._wait_for_nodes(say)
            return "repaired" if existed else "created"

    def down(self, say: Say = _silent) -> None:
        """Remove every trace of the cluster; harmless where there is none."""
        remove(self.shape.name, base=self.layout.root.parent, say=say)

    def status(self) -> ClusterStatus:
        """What runs and what Slurm says of the nodes."""
        machine.check_privileges()
        return self._status()

    def pid(self, daemon_name: str, *, host: str = HEAD) -> int | None:
        """Process id of a running daemon: ``slurmctld``, ``slurmdbd``, ``slurmd`` of a node ..."""
        daemon = self._daemon(daemon_name, host)
        tree = CgroupTree.of(self.shape.name)
        return daemons.running_pid(daemon, shape=self.shape, layout=self.layout, tree=tree)

    def stop(self, daemon_name: str, *, host: str = HEAD, kill: bool = False) -> None:
        """Stop one daemon; with `kill` as by a crash, without its writing any state."""
        daemon = self._daemon(daemon_name, host)
        machine.check_privileges()
        (daemons.kill if kill else daemons.stop)(daemon, layout=self.layout)

    def start(self, daemon_name: str, *, host: str = HEAD) -> None:
        """Start one daemon again, and wait until it serves; harmless where it runs."""
        daemon = self._daemon(daemon_name, host)
        machine.check_privileges()
        self._ensure(daemon, CgroupTree.of(self.shape.name), _silent)

    def cut(self, node: str) -> None:
        """Unplug a node's network, as if the machine had died."""
        self._check_node(node)
        hosts.unplug(shape=self.shape, host=node)

    def heal(self, node: str) -> None:
        """Plug a node in again; Slurm takes it back by itself."""
        self._check_node(node)
        hosts.plug_in(shape=self.shape, host=node)

    def slow(self, node: str, rate: str | None) -> None:
        """Limit a node's network to a rate such as ``10mbit``; None takes the limit away."""
        self._check_node(node)
        hosts.set_rate(shape=self.shape, host=node, rate=rate)

    def make_tiny(self, node: str, folder: Path, *, size_mb: int) -> None:
        """Put an empty, small file system over a folder, for the jobs of one node alone."""
        folders.make_tiny(slurmd_pid=self._slurmd_pid(node), folder=folder, size_mb=size_mb)

    def make_readonly(self, node: str, folder: Path) -> None:
        """Let the jobs of one node read a folder, but not write it."""
        folders.make_readonly(slurmd_pid=self._slurmd_pid(node), folder=folder)

    def restore(self, node: str, folder: Path) -> None:
        """Undo `make_tiny` or `make_readonly`; a slurmd that is started anew forgets them, too."""
        folders.restore(slurmd_pid=self._slurmd_pid(node), folder=folder)

    def cpu_time_s(self, node: str) -> float:
        """CPU time that everything on a node has used since the cluster came up."""
        self._check_node(node)
        return CgroupTree.of(self.shape.name).cpu_time_s(node)

    def _check_node(self, node: str) -> None:
        if node not in self.shape.nodes:
            raise SpecError(
                f"node {node!r}: dev cluster {self.shape.name!r} has "
                f"{self.shape.nodes[0]} to {self.shape.nodes[-1]}"
            )
        machine.check_privileges()

    def _daemon(self, name: str, host: str) -> Daemon:
        known = daemons.all_daemons(self.shape, self.layout)
        for daemon in known:
            if (daemon.name, daemon.host) == (name, host):
                return daemon
        names = ", ".join(one.name for one in known if one.host == host) or "nothing"
        raise DevClusterError(
            f"dev cluster {self.shape.name!r} runs no {name} on {host}, only {names}"
        )

    def _slurmd_pid(self, node: str) -> int:
        self._check_node(node)
        pid = self.pid("slurmd", host=node)
        if pid is None:
            raise DevClusterError(f"slurmd of {node} does not run; `headrace dev up` repairs it")
        return pid

    def _check_same_shape(self) -> bool:
        """Whether the cluster exists, with this very shape."""
        stored = files.stored_shape(self.layout)
        if stored is None or stored == self.shape:
            return stored is not None
        old, new = dataclasses.asdict(stored), dataclasses.asdict(self.shape)
        changes = ", ".join(
            f"{key} {old[key]} -> {new[key]}" for key in old if old[key] != new[key]
        )
        raise DevClusterError(
            f"dev cluster {self.shape.name!r} exists with another shape ({changes}); run "
            f"`headrace dev down --name {self.shape.name}` first, or choose another --name"
        )

    def _is_whole(self, tree: CgroupTree) -> bool:
        status = self._status()
        return (
            status.is_up
            and all(node.is_plugged_in for node in status.nodes)
            and files.are_current(shape=self.shape, layout=self.layout, tree=tree)
        )

    def _stop_daemons(self) -> None:
        """Before they read a new configuration; jobs go on under their own step daemons."""
        for daemon in daemons.all_daemons(self.shape, self.layout):
            daemons.kill(daemon, layout=self.layout)

    def _start_daemons(self, tree: CgroupTree, say: Say) -> None:
        layout = self.layout
        running = daemons.all_daemons(self.shape, layout)
        control = [daemon for daemon in running if daemon.host == HEAD]
        # The nodes first of what needs munge: they are ready by the time the controller is.
        for daemon in (control[0], *running[len(control) :], *control[1:]):
            if daemon.name == "mariadbd" and not layout.database.exists():
                say("making the accounting database")
                daemons.initialise_database(layout)
            self._ensure(daemon, tree, say)
            if daemon.name == "slurmdbd":
                self._register()

    def _ensure(self, daemon: Daemon, tree: CgroupTree, say: Say) -> None:
        """Start a daemon unless it runs, and wait until it serves."""
        if daemons.running_pid(daemon, shape=self.shape, layout=self.layout, tree=tree) is None:
            say(f"starting {daemon.name} on {daemon.host}")
            daemons.kill(daemon, layout=self.layout)
            daemons.start(daemon, layout=self.layout)
        door = self._door(daemon)
        if door is not None:
            daemons.wait_for(
                daemon,
                lambda: daemons.accepts(*door),
                layout=self.layout,
                timeout_s=_DAEMON_TIMEOUT_S,
            )

    def _door(self, daemon: Daemon) -> tuple[Path] | tuple[str, int] | None:
        """Where a daemon that serves is reached; None for a slurmd, which registers itself."""
        head = str(self.shape.address(HEAD))
        doors: dict[str, tuple[Path] | tuple[str, int]] = {
            "munged": (self.layout.munge_socket,),
            "mariadbd": (self.layout.database_socket,),
            "slurmdbd": (head, config.SLURMDBD_PORT),
            "slurmctld": (head, config.SLURMCTLD_PORT),
        }
        return doors.get(daemon.name)

    def _register(self) -> None:
        """Make the cluster known to the accounting, without which slurmctld does not start."""
        if self.shape.accounting == "limits":
            self._add_qos()
        if self._is_registered():
            return
        try:
            self._slurm("sacctmgr", "-i", "add", "cluster", self.shape.name)
        except DevClusterError:
            # The command of an `up` that was killed may have arrived in the meantime.
            if not self._is_registered():
                raise

    def _add_qos(self) -> None:
        named = self._slurm("sacctmgr", "-nP", "show", "qos", "format=name").split()
        if "few" not in named:
            limit = f"MaxSubmitJobsPerUser={config.MAX_SUBMITTED_OF_FEW}"
            self._slurm("sacctmgr", "-i", "add", "qos", "few", limit)

    def _is_registered(self) -> bool:
        clusters = self._slurm("sacctmgr", "-nP", "show", "cluster", "format=cluster")
        return self.shape.name in clusters.split()

    def _wait_for_nodes(self, say: Say) -> None:
        deadline = time.monotonic() + _DAEMON_TIMEOUT_S
        named: list[str] = []
        while True:
            states = self._node_states()
            absent = [name for name in self.shape.nodes if not is_present(states.get(name, ""))]
            if not absent:
                return
            if absent != named:
                say(f"waiting for {', '.join(absent)}")
                named = absent
            for name in absent:
                # It answers, and is down for what happened before: nothing else takes it back.
                if states.get(name) == "down":
                    self._slurm("scontrol", "update", f"nodename={name}", "state=resume")
            slurmd = daemons.slurmd(self.layout, absent[0])
            daemons.check_alive(slurmd, layout=self.layout)
            if time.monotonic() > deadline:
                raise DevClusterError(
                    f"nodes {', '.join(absent)} did not register within {_DAEMON_TIMEOUT_S:.0f} s\n"
                    f"{daemons.log_tail(slurmd.log(self.layout))}"
                )
            time.sleep(0.1)

    def _status(self) -> ClusterStatus:
        tree = CgroupTree.of(self.shape.name)
        found = tuple(
            DaemonStatus(
                name=daemon.name,
                host=daemon.host,
                pid=daemons.running_pid(daemon, shape=self.shape, layout=self.layout, tree=tree),
                log=daemon.log(self.layout),
            )
            for daemon in daemons.all_daemons(self.shape, self.layout)
        )
        runs = {daemon.name for daemon in found if daemon.pid is not None}
        states = self._node_states() if {"munged", "slurmctld"} <= runs else {}
        nodes = tuple(
            NodeStatus(
                name=node,
                state=states.get(node, "unknown"),
                is_plugged_in=hosts.is_plugged_in(shape=self.shape, host=node),
                address=str(self.shape.address(node)),
            )
            for node in self.shape.nodes
        )
        return ClusterStatus(shape=self.shape, daemons=found, nodes=nodes)

    def _node_states(self) -> dict[str, str]:
        try:
            text = self._slurm("sinfo", "-h", "-N", "-o", "%N %T")
        except DevClusterError:
            return {}
        return dict(line.split(maxsplit=1) for line in text.splitlines())

    def _slurm(self, *argv: str) -> str:
        return run(argv, env=self.env())


def remove(name: str, *, base: Path = DEFAULT_BASE, say: Say = _silent) -> None:
    """Take a cluster down by its name alone, so that one with a damaged state can go, too.

    Raises:
        DevClusterError: the name belongs to a cluster elsewhere, or the directory to somebody else.
    """
    shape = ClusterShape(name=name)
    layout = Layout(base / name)
    machine.check_privileges()
    with _lock(shape.name):
        hosts.check_owner(cluster=name, layout=layout)
        files.check_ours(layout)
        tree = CgroupTree.of(name)
        say("stopping daemons and jobs")
        tree.kill()
        say("removing the network")
        hosts.delete_network(name)
        say("removing cgroups and files")
        tree.remove()
        hosts.unmount_below(layout.root)
        files.remove(layout)
        if base == DEFAULT_BASE:
            with contextlib.suppress(OSError):
                base.rmdir()


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    """One `up` or `down` at a time: an abstract socket, which no crash and no file outlives."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        while True:
            try:
                held.bind(f"\0headrace-dev-{name}")
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise DevClusterError(
                        f"another process has been bringing dev cluster {name!r} up or down for "
                        f"{_LOCK_TIMEOUT_S:.0f} s; wait for it or stop it"
                    ) from error
                time.sleep(0.1)
        yield
