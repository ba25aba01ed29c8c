"""The shape of a dev cluster and every text that follows from it.

Pure: no file is read or written here, so what Slurm will be told can be tested without one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Literal, get_args

from storage.errors import SpecError

Accounting = Literal["on", "limits", "off"]

DEFAULT_BASE = Path("/var/lib/headrace-dev")
HEAD = "head"
SLURMCTLD_PORT = 6817
SLURMDBD_PORT = 6819

_NAME = re.compile(r"[a-z][a-z0-9]{0,6}")
_MAX_NODES = 64
_FIRST_NODE_OFFSET = 11
# Of a unix socket's path, see unix(7); the longest of ours is <root>/run/munge.socket.
_MAX_ROOT_CHARS = 80
MAX_SUBMITTED_OF_FEW = 2
"""Jobs that a user may have in partition `few`, queued and running together."""
_GRACE_S = 3
_SHORT_MIN = 2


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """How many nodes of which size, under which name and on which addresses.

    Raises:
        SpecError: a value is out of its bounds.
    """

    name: str = "default"
    num_nodes: int = 4
    subnet: str = "10.99.0.0/24"
    cpus_per_node: int = 4
    memory_mb: int = 4096
    gpus_per_node: int = 8
    cpu_quota: float | None = None
    """Cores that all processes of one node may use together; None leaves them unlimited."""
    slurmd_timeout_s: int = 6
    accounting: Accounting = "on"
    """`limits` makes Slurm hold users to their QOS, and adds a partition that allows few jobs;
    `off` runs neither slurmdbd nor its database."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SpecError(
                f"dev cluster name {self.name!r}: must match {_NAME.pattern} (the kernel allows an "
                "interface name 15 characters, of which 7 are left); choose a shorter --name"
            )
        _check_range("nodes", self.num_nodes, 1, _MAX_NODES)
        _check_range("cpus", self.cpus_per_node, 1, 1024)
        _check_range("memory-mb", self.memory_mb, 64, 16 * 1024 * 1024)
        _check_range("gpus", self.gpus_per_node, 0, 64)
        _check_range("slurmd-timeout", self.slurmd_timeout_s, 2, 65533)
        if self.cpu_quota is not None:
            _check_range("cpu-quota", self.cpu_quota, 0.05, 1024)
        if self.accounting not in get_args(Accounting):
            raise SpecError(
                f"dev cluster accounting {self.accounting!r}: must be one of "
                f"{', '.join(get_args(Accounting))}; change --accounting"
            )
        try:
            network = IPv4Network(self.subnet)
        except ValueError as error:
            raise SpecError(
                f"dev cluster subnet {self.subnet!r}: {error}; write it as 10.99.0.0/24"
            ) from error
        if network.num_addresses <= _FIRST_NODE_OFFSET + self.num_nodes:
            raise SpecError(
                f"dev cluster subnet {self.subnet!r}: holds {network.num_addresses} addresses, "
                f"{self.num_nodes} nodes need more than {_FIRST_NODE_OFFSET + self.num_nodes}; "
                "give a wider --subnet"
            )

    @property
    def network(self) -> IPv4Network:
        return IPv4Network(self.subnet)

    def leaves_room_on(self, cores: int) -> bool:
        """Whether all quotas together leave the machine some of its cores, so that they can be
        guaranteed: without a quota, or with more of it than there is, nodes take what they get."""
        return self.cpu_quota is not None and self.num_nodes * self.cpu_quota < cores

    def core_of(self, host: str, cores: Sequence[int]) -> int | None:
        """The one of the machine's cores that a host stays on; None where it may use any.

        Nodes of the same quota that are spread evenly meet the same rivals. Left to the scheduler,
        three of four may run on one core of two for a while, and that rung looks slow.
        """
        if host == HEAD or self.cpu_quota is None:
            return None
        most_on_a_core = math.ceil(self.num_nodes / len(cores))
        if most_on_a_core * self.cpu_quota > 1:
            return None
        return cores[self.nodes.index(host) % len(cores)]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"n{index}" for index in range(1, self.num_nodes + 1))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every namespace: the head, where the controller lives, and the nodes."""
        return (HEAD, *self.nodes)

    @property
    def bridge_address(self) -> IPv4Address:
        """The address under which the nodes reach this machine."""
        return self.network[1]

    def address(self, host: str) -> IPv4Address:
        if host == HEAD:
            return self.network[2]
        return self.network[_FIRST_NODE_OFFSET + self.nodes.index(host)]

    @property
    def bridge(self) -> str:
        return bridge_name(self.name)

    def link(self, host: str) -> str:
        """Name of a host's network namespace, and of the bridge's end of its cable."""
        return f"{self.bridge}-{host}"


def bridge_name(cluster_name: str) -> str:
    return f"hr-{cluster_name}"


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise SpecError(
            f"dev cluster {field} {value}: must be from {low} to {high}; change --{field}"
        )


@dataclass(frozen=True)
class Layout:
    """Where one cluster keeps its files: all of them below ``root``."""

    root: Path

    def __post_init__(self) -> None:
        if not self.root.is_absolute() or re.search(r"[^\w./-]", str(self.root)):
            raise SpecError(
                f"dev cluster directory {str(self.root)!r}: must be an absolute path of letters, "
                "digits, '.', '_', '-' and '/' (Slurm's configuration quotes nothing); "
                "choose another --dir"
            )
        if len(str(self.root)) > _MAX_ROOT_CHARS:
            raise SpecError(
                f"dev cluster directory {str(self.root)!r}: {len(str(self.root))} characters, at "
                f"most {_MAX_ROOT_CHARS} fit a unix socket's path; choose a shorter --dir"
            )

    @property
    def shape_json(self) -> Path:
        return self.root / "shape.json"

    @property
    def slurm_conf(self) -> Path:
        return self.root / "etc/slurm.conf"

    @property
    def slurmdbd_conf(self) -> Path:
        return self.root / "etc/slurmdbd.conf"

    @property
    def cgroup_conf(self) -> Path:
        return self.root / "etc/cgroup.conf"

    @property
    def gres_conf(self) -> Path:
        return self.root / "etc/gres.conf"

    @property
    def hosts_file(self) -> Path:
        return self.root / "etc/hosts"

    @property
    def nsswitch_conf(self) -> Path:
        return self.root / "etc/nsswitch.conf"

    @property
    def munge_key(self) -> Path:
        return self.root / "etc/munge.key"

    @property
    def munge_socket(self) -> Path:
        return self.root / "run/munge.socket"

    @property
    def database(self) -> Path:
        return self.root / "db"

    @property
    def database_socket(self) -> Path:
        return self.root / "db/mysql.sock"

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    @property
    def log_dir(self) -> Path:
        return self.root / "log"

    def gpu(self, index: int) -> Path:
        return self.root / f"dev/gpu{index}"

    def entry_script(self, host: str) -> Path:
        return self.root / f"run/enter-{host}.sh"

    @property
    def directories(self) -> tuple[tuple[Path, int], ...]:
        """Every directory with its mode."""
        modes = (
            ("", 0o755),
            ("etc", 0o755),
            ("run", 0o755),
            ("run/sys", 0o755),
            ("log", 0o755),
            ("dev", 0o755),
            ("state", 0o700),
            ("spool", 0o755),
        )
        return tuple((self.root / name, mode) for name, mode in modes)


def slurm_conf(*, shape: ClusterShape, layout: Layout) -> str:
    first, last = shape.nodes[0], shape.nodes[-1]
    node_range = f"n[1-{shape.num_nodes}]" if first != last else first
    addresses = ",".join(str(shape.address(node)) for node in shape.nodes)
    head = shape.address(HEAD)
    gres = f" Gres=gpu:{shape.gpus_per_node}" if shape.gpus_per_node else ""
    lines = [
        f"ClusterName={shape.name}",
        f"SlurmctldHost={HEAD}({head})",
        f"SlurmctldPort={SLURMCTLD_PORT}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        "CredType=cred/munge",
        f"StateSaveLocation={layout.root}/state",
        f"SlurmdSpoolDir={layout.root}/spool/%n",
        f"SlurmctldPidFile={layout.root}/run/slurmctld.pid",
        f"SlurmdPidFile={layout.root}/run/slurmd-%n.pid",
        # The daemons' own logs, with time stamps, beside what they say on their standard error.
        f"SlurmctldLogFile={layout.log_dir}/slurmctld-timed.log",
        f"SlurmdLogFile={layout.log_dir}/slurmd-%n-timed.log",
        "MpiDefault=none",
        # Detection of dead nodes, and how fast a job leaves.
        f"SlurmdTimeout={shape.slurmd_timeout_s}",
        f"MessageTimeout={min(10, max(5, shape.slurmd_timeout_s))}",
        "KillWait=5",
        # A step that was cut off tells its end again and again; after the usual minute Slurm would
        # drain its node for that, healed or not.
        "UnkillableStepTimeout=600",
        "MinJobAge=60",
        "ReturnToService=2",
        # Every node is spoken to directly: no message waits behind a dead neighbour.
        f"TreeWidth={_MAX_NODES}",
        # A job starts at once when there is room, instead of with the next periodic pass.
        "SchedulerType=sched/backfill",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=10000,"
        "bf_interval=1,bf_max_job_test=100",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        f"DefMemPerCPU={max(1, shape.memory_mb // shape.cpus_per_node)}",
        "ProctrackType=proctrack/cgroup",
        "TaskPlugin=task/cgroup",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=5",
        # A job in `urgent` ends those in its way; they are told, and have a moment to leave.
        "PreemptType=preempt/partition_prio",
        "PreemptMode=CANCEL",
        *_accounting(shape=shape, layout=layout),
        # Nodes claim what the shape says, whatever this machine has.
        "SlurmdParameters=config_overrides",
    ]
    if gres:
        lines.append("GresTypes=gpu")
    lines += [
        f"NodeName={node_range} NodeAddr={addresses} CPUs={shape.cpus_per_node} Boards=1 "
        f"SocketsPerBoard=1 CoresPerSocket={shape.cpus_per_node} ThreadsPerCore=1 "
        f"RealMemory={shape.memory_mb}{gres} State=UNKNOWN",
        f"PartitionName=dev Nodes={node_range} Default=YES MaxTime=INFINITE State=UP "
        f"GraceTime={_GRACE_S}",
        f"PartitionName=urgent Nodes={node_range} MaxTime=INFINITE State=UP "
        "PriorityTier=10 PreemptMode=OFF",
        f"PartitionName=short Nodes={node_range} MaxTime={_SHORT_MIN} State=UP "
        f"GraceTime={_GRACE_S}",
    ]
    if shape.accounting == "limits":
        lines.append(f"PartitionName=few Nodes={node_range} MaxTime=INFINITE State=UP QOS=few")
    return "\n".join(lines) + "\n"


def _accounting(*, shape: ClusterShape, layout: Layout) -> list[str]:
    if shape.accounting == "off":
        return ["AccountingStorageType=accounting_storage/none"]
    lines = [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={shape.address(HEAD)}",
        f"AccountingStoragePort={SLURMDBD_PORT}",
        # Where the munge socket is named to those who speak to slurmdbd.
        f"AccountingStoragePass={layout.munge_socket}",
        # As some sites have it: whatever sbatch is given of its caller's environment is kept.
        "AccountingStoreFlags=job_env",
    ]
    if shape.gpus_per_node:
        lines.append("AccountingStorageTRES=gres/gpu")
    if shape.accounting == "limits":
        lines.append("AccountingStorageEnforce=associations,limits,qos")
    return lines


def slurmdbd_conf(*, shape: ClusterShape, layout: Layout) -> str:
    lines = [
        f"DbdHost={HEAD}",
        f"DbdAddr={shape.address(HEAD)}",
        f"DbdPort={SLURMDBD_PORT}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        f"PidFile={layout.root}/run/slurmdbd.pid",
        f"LogFile={layout.log_dir}/slurmdbd-timed.log",
        "StorageType=accounting_storage/mysql",
        # A unix socket, whose peer the database recognises as root: no password is kept.
        "StorageHost=localhost",
        "StorageUser=root",
        "StorageLoc=slurm_acct_db",
    ]
    return "\n".join(lines) + "\n"


def cgroup_conf(*, cgroup_version: int) -> str:
    lines = ["ConstrainRAMSpace=yes", "ConstrainSwapSpace=yes", "AllowedSwapSpace=0"]
    if cgroup_version == 1:
        lines.append("CgroupPlugin=cgroup/v1")
    else:
        lines += ["CgroupPlugin=autodetect", "IgnoreSystemd=yes"]
    return "\n".join(lines) + "\n"


def gres_conf(*, shape: ClusterShape, layout: Layout) -> str:
    if not shape.gpus_per_node:
        return ""
    last = shape.gpus_per_node - 1
    suffix = f"[0-{last}]" if last else "0"
    return f"Name=gpu File={layout.root}/dev/gpu{suffix}\n"


def hosts_text(*, shape: ClusterShape, machine: str) -> str:
    """``/etc/hosts`` of every node; ``machine`` is this machine's own host name."""
    lines = ["127.0.0.1 localhost", f"{shape.bridge_address} {machine} headrace-host"]
    lines += [f"{shape.address(host)} {host}" for host in shape.hosts]
    return "\n".join(lines) + "\n"


def nsswitch_text() -> str:
    """Files only: a reverse look-up that asks a name server stalls for 10 s in a namespace."""
    return "passwd: files\ngroup: files\nshadow: files\nhosts: files\nnetworks: files\n"
