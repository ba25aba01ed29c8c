"""The machines of a dev cluster: a network namespace each, cabled to one bridge.

Every function makes what is missing and leaves alone what is there, so that bringing a cluster up a
second time, or after a crash, is the same call as the first time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from slurm.devcluster.cgroups import CgroupTree, machine_cores
from slurm.devcluster.command import run
from slurm.devcluster.config import ClusterShape, Layout, bridge_name
from slurm.devcluster.errors import DevClusterError

NETNS_DIR = Path("/run/netns")
_KILL_DEADLINE_S = 10.0


def ip_json(*args: str) -> list[dict[str, Any]]:
    parsed: list[dict[str, Any]] = json.loads(run(["ip", "-j", *args]) or "[]")
    return [entry for entry in parsed if entry]


def links() -> dict[str, dict[str, Any]]:
    return {entry["ifname"]: entry for entry in ip_json("link", "show")}


def check_owner(*, cluster: str, layout: Layout) -> None:
    """Refuse names that a cluster with another state directory uses in this kernel.

    Raises:
        DevClusterError: a cluster of this name lives elsewhere, or the bridge is not ours.
    """
    bridge = links().get(bridge_name(cluster))
    if bridge is None or bridge.get("ifalias") == str(layout.root):
        return
    # An `up` that was killed between making the bridge and signing it.
    if "ifalias" not in bridge and layout.shape_json.exists():
        return
    raise DevClusterError(
        f"network interface {bridge_name(cluster)!r} belongs to "
        f"{bridge.get('ifalias') or 'something else'}, not to {layout.root}; choose another "
        "--name, or the --dir that it was brought up with"
    )


def check_subnet_free(shape: ClusterShape) -> None:
    """Refuse a subnet that this machine reaches another way already.

    Raises:
        DevClusterError: a route overlaps with the subnet.
    """
    for route in ip_json("-4", "route", "show"):
        destination = route.get("dst", "default")
        if destination == "default" or route.get("dev") == shape.bridge:
            continue
        if IPv4Network(destination, strict=False).overlaps(shape.network):
            raise DevClusterError(
                f"dev cluster subnet {shape.subnet} overlaps with {destination}, which this "
                f"machine reaches through {route.get('dev')}; choose another --subnet"
            )


def ensure_network(*, shape: ClusterShape, layout: Layout) -> None:
    """Bridge, namespaces and cables, all links up; also plugs in what was cut."""
    present = links()
    prefix_length = shape.network.prefixlen
    commands: list[str] = []
    if shape.bridge not in present:
        commands.append(f"link add name {shape.bridge} type bridge")
    commands.append(f"link set {shape.bridge} alias {layout.root}")
    commands.append(f"addr replace {shape.bridge_address}/{prefix_length} dev {shape.bridge}")
    commands.append(f"link set {shape.bridge} up")
    run(["ip", "-batch", "-"], stdin="\n".join(commands))

    for host in shape.hosts:
        link = shape.link(host)
        if link not in present or not is_namespace(link):
            _delete_host(link)
            run(["ip", "netns", "add", link])
            run(["ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", link])
        run(["ip", "link", "set", link, "master", shape.bridge, "up"])
        plug_in(shape=shape, host=host)


def plug_in(*, shape: ClusterShape, host: str) -> None:
    """Link, address and route of a host, whatever it lost of them."""
    commands = (
        "link set lo up",
        "link set eth0 up",
        f"addr replace {shape.address(host)}/{shape.network.prefixlen} dev eth0",
        f"route replace default via {shape.bridge_address}",
    )
    run(["ip", "-n", shape.link(host), "-batch", "-"], stdin="\n".join(commands))


def unplug(*, shape: ClusterShape, host: str) -> None:
    run(["ip", "-n", shape.link(host), "link", "set", "eth0", "down"])


def is_plugged_in(*, shape: ClusterShape, host: str) -> bool:
    try:
        (eth0,) = ip_json("-n", shape.link(host), "link", "show", "eth0")
    except DevClusterError:
        return False
    return "UP" in eth0["flags"]


def set_rate(*, shape: ClusterShape, host: str, rate: str | None) -> None:
    """Limit what a host may send and receive, as in ``10mbit``; None takes the limit away."""
    inside = ("tc", "-n", shape.link(host))
    for tc, device in ((inside, "eth0"), (("tc",), shape.link(host))):
        if rate is not None:
            limit = ("rate", rate, "burst", "64kb", "latency", "200ms")
            run([*tc, "qdisc", "replace", "dev", device, "root", "tbf", *limit])
        elif "tbf" in run([*tc, "qdisc", "show", "dev", device]):
            run([*tc, "qdisc", "del", "dev", device, "root"])


def is_namespace(link: str) -> bool:
    """Whether the name leads to a namespace; a killed ``ip netns add`` leaves a bare file."""
    path = NETNS_DIR / link
    return path.exists() and path.stat().st_dev != NETNS_DIR.stat().st_dev


def in_namespace(*, link: str, pid: int) -> bool:
    try:
        ours = (NETNS_DIR / link).stat()
        theirs = Path(f"/proc/{pid}/ns/net").stat()
    except OSError:
        return False
    return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)


def delete_network(cluster: str) -> None:
    """Remove every namespace, cable and bridge of a cluster, and kill who still is in there."""
    prefix = f"{bridge_name(cluster)}-"
    names = {path.name for path in NETNS_DIR.glob(f"{prefix}*")}
    names |= {name for name in links() if name.startswith(prefix)}
    for name in sorted(names):
        _kill_members(name)
        _delete_host(name)
    if bridge_name(cluster) in links():
        run(["ip", "link", "delete", bridge_name(cluster)])
    # `ip netns add` made this mount; it is busy, and stays, as long as anybody has a namespace.
    if NETNS_DIR.is_dir() and not any(NETNS_DIR.iterdir()):
        subprocess.run(["umount", str(NETNS_DIR)], capture_output=True, check=False)
        with contextlib.suppress(OSError):
            NETNS_DIR.rmdir()


def unmount_below(root: Path) -> None:
    """Detach what was mounted below a directory, the deepest first."""
    mounts = [
        line.split()[4]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if Path(line.split()[4]).is_relative_to(root)
    ]
    for mount in reversed(mounts):
        run(["umount", "--lazy", mount])


def entry_script(*, shape: ClusterShape, layout: Layout, host: str, tree: CgroupTree) -> str:
    """A shell script that runs a command as if on one host: ``enter-n1.sh PIDFILE COMMAND...``.

    It joins the host's cgroups and namespaces, shows it its own host name, name service, network
    devices and cgroups, records its process id and start time, and becomes the command. It is not
    ``ip netns exec``, which hides the cgroup mounts that slurmd needs.
    """
    procs = " ".join(str(path) for path in tree.procs_files(host))
    sys_dir = f"{layout.run_dir}/sys"
    cgroup_view = "\n".join(
        f"mount --bind {inside} {sys_dir}{str(seen).removeprefix('/sys')}"
        for inside, seen in tree.views(host)
    )
    # With v2, slurmd looks for its own cgroup where the machine sees it.
    cgroup_namespace = "--cgroup " if tree.version == 1 else ""
    core = shape.core_of(host, machine_cores())
    pin = "" if core is None else f"taskset --cpu-list {core} "
    return f"""#!/bin/sh
set -eu
if [ "${{HEADRACE_DEV_INSIDE:-}}" != {host} ]; then
  for procs in {procs}; do echo $$ > "$procs"; done
  export HEADRACE_DEV_INSIDE={host}
  exec nsenter --net={NETNS_DIR}/{shape.link(host)} \\
    {pin}unshare {cgroup_namespace}--uts --mount --propagation slave /bin/sh "$0" "$@"
fi
unset HEADRACE_DEV_INSIDE
hostname {host}
mount --bind {layout.hosts_file} /etc/hosts
mount --bind {layout.nsswitch_conf} /etc/nsswitch.conf
mount -t sysfs sysfs {sys_dir}
mount --rbind /sys/fs/cgroup {sys_dir}/fs/cgroup
{cgroup_view}
mount --move {sys_dir} /sys
pid_file=$1
shift
echo "$$ $(cut -d' ' -f22 /proc/$$/stat)" > "$pid_file.new"
mv "$pid_file.new" "$pid_file"
exec "$@"
"""


def _delete_host(link: str) -> None:
    # The cable first: with its namespace it would vanish too, but some time later.
    if link in links():
        run(["ip", "link", "delete", link])
    if is_namespace(link):
        run(["ip", "netns", "delete", link])
    else:
        (NETNS_DIR / link).unlink(missing_ok=True)


def _kill_members(link: str) -> None:
    """Kill what runs in a namespace, such as a shell that a user opened there."""
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while members := [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and in_namespace(link=link, pid=int(path.name))
    ]:
        if time.monotonic() > deadline:
            raise DevClusterError(f"processes {members} in namespace {link} do not die")
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
