"""What a dev cluster is told, as texts: needs neither root nor Slurm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from slurm.devcluster import config
from slurm.devcluster.cgroups import parse_mountinfo
from slurm.devcluster.config import HEAD, ClusterShape, Layout
from slurm.devcluster.daemons import all_daemons
from storage.errors import SpecError

LAYOUT = Layout(Path("/var/lib/headrace-dev/default"))
V1_MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
37 31 0:34 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
42 31 0:32 / /srv/container/memory rw,relatime - cgroup cgroup rw,memory
"""
V2_MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate
"""


def settings(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


def test_every_node_has_its_name_address_and_size_in_slurm_conf() -> None:
    shape = ClusterShape(num_nodes=3, cpus_per_node=6, memory_mb=3000, gpus_per_node=2)
    text = config.slurm_conf(shape=shape, layout=LAYOUT)
    assert (
        "NodeName=n[1-3] NodeAddr=10.99.0.11,10.99.0.12,10.99.0.13 CPUs=6 Boards=1 "
        "SocketsPerBoard=1 CoresPerSocket=6 ThreadsPerCore=1 RealMemory=3000 Gres=gpu:2"
    ) in text
    assert "PartitionName=dev Nodes=n[1-3] Default=YES" in text
    assert settings(text)["DefMemPerCPU"] == "500"


def test_detection_time_follows_the_shape() -> None:
    for timeout_s, message_timeout_s in ((2, 5), (6, 6), (300, 10)):
        shape = ClusterShape(slurmd_timeout_s=timeout_s)
        found = settings(config.slurm_conf(shape=shape, layout=LAYOUT))
        assert found["SlurmdTimeout"] == str(timeout_s)
        assert found["MessageTimeout"] == str(message_timeout_s)


def test_a_cluster_without_gpus_schedules_none() -> None:
    shape = ClusterShape(gpus_per_node=0)
    assert config.gres_conf(shape=shape, layout=LAYOUT) == ""
    assert "gpu" not in config.slurm_conf(shape=shape, layout=LAYOUT).lower()


def test_a_cluster_without_accounting_runs_no_database() -> None:
    shape = ClusterShape(accounting="off")
    text = config.slurm_conf(shape=shape, layout=LAYOUT)
    assert settings(text)["AccountingStorageType"] == "accounting_storage/none"
    names = {daemon.name for daemon in all_daemons(shape, LAYOUT)}
    assert names == {"munged", "slurmctld", "slurmd"}


@pytest.mark.parametrize(("gpus", "files"), [(1, "dev/gpu0"), (8, "dev/gpu[0-7]")])
def test_gpus_are_devices_of_the_cluster(gpus: int, files: str) -> None:
    text = config.gres_conf(shape=ClusterShape(gpus_per_node=gpus), layout=LAYOUT)
    assert text == f"Name=gpu File={LAYOUT.root}/{files}\n"


def test_nodes_know_each_other_and_this_machine_by_name() -> None:
    shape = ClusterShape(num_nodes=2, subnet="10.1.2.0/25")
    addresses = {
        name: line.split()[0]
        for line in config.hosts_text(shape=shape, machine="login7").splitlines()
        for name in line.split()[1:]
    }
    assert addresses == {
        "localhost": "127.0.0.1",
        "login7": "10.1.2.1",
        "headrace-host": "10.1.2.1",
        "head": "10.1.2.2",
        "n1": "10.1.2.11",
        "n2": "10.1.2.12",
    }


def test_limits_are_enforced_by_the_cgroup_version_of_the_machine() -> None:
    v1, v2 = (settings(config.cgroup_conf(cgroup_version=version)) for version in (1, 2))
    assert v1["CgroupPlugin"] == "cgroup/v1"
    assert v2["CgroupPlugin"] == "autodetect"
    for found in (v1, v2):
        assert (found["ConstrainRAMSpace"], found["ConstrainSwapSpace"]) == ("yes", "yes")


def test_the_longest_names_fit_an_interface_name() -> None:
    shape = ClusterShape(name="abcdefg", num_nodes=64)
    assert max(len(shape.link(host)) for host in shape.hosts) <= 15


def test_everything_a_cluster_listens_on_or_writes_is_its_own() -> None:
    texts = []
    for name, subnet in (("one", "10.1.0.0/24"), ("two", "10.2.0.0/24")):
        shape, layout = ClusterShape(name=name, subnet=subnet), Layout(Path("/srv") / name)
        text = config.slurm_conf(shape=shape, layout=layout)
        text += config.slurmdbd_conf(shape=shape, layout=layout)
        texts.append(set(re.findall(r"/srv/\S+|10\.\d+\.0\.\d+|hr-\w+", text)))
    assert texts[0]
    assert not texts[0] & texts[1]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"name": "Default"}, "--name"),
        ({"name": "eightish"}, "--name"),
        ({"num_nodes": 0}, "--nodes"),
        ({"num_nodes": 65}, "--nodes"),
        ({"cpus_per_node": 0}, "--cpus"),
        ({"memory_mb": 1}, "--memory-mb"),
        ({"gpus_per_node": -1}, "--gpus"),
        ({"cpu_quota": 0.001}, "--cpu-quota"),
        ({"slurmd_timeout_s": 1}, "--slurmd-timeout"),
        ({"accounting": "none"}, "--accounting"),
        ({"subnet": "10.99.0.0"}, "--subnet"),
        ({"subnet": "10.99.0.1/24"}, "10.99.0.0/24"),
        ({"subnet": "10.99.0.0/28", "num_nodes": 5}, "--subnet"),
    ],
)
def test_a_wrong_shape_is_refused_with_its_value_and_the_remedy(
    wrong: dict[str, Any], named: str
) -> None:
    with pytest.raises(SpecError) as caught:
        ClusterShape(**wrong)
    assert named in str(caught.value)
    assert str(next(iter(wrong.values()))) in str(caught.value)


@pytest.mark.parametrize("root", ["relative/dir", "/with blank", "/" + "long" * 20])
def test_a_directory_that_slurm_cannot_use_is_refused(root: str) -> None:
    with pytest.raises(SpecError, match="--dir"):
        Layout(Path(root))


def test_v1_hierarchies_are_found_where_they_are_mounted() -> None:
    found = parse_mountinfo(V1_MOUNTS)
    assert {(str(each.mount), each.version, each.controllers) for each in found} == {
        ("/sys/fs/cgroup/cpu,cpuacct", 1, frozenset({"cpu", "cpuacct"})),
        ("/sys/fs/cgroup/memory", 1, frozenset({"memory"})),
        ("/sys/fs/cgroup/freezer", 1, frozenset({"freezer"})),
    }


def test_v2_is_used_where_there_is_no_v1() -> None:
    (found,) = parse_mountinfo(V2_MOUNTS)
    assert (str(found.mount), found.version) == ("/sys/fs/cgroup", 2)


def test_a_machine_without_cgroups_has_none() -> None:
    assert parse_mountinfo("22 27 0:21 / /proc rw,relatime - proc proc rw\n") == ()


@pytest.mark.parametrize(
    ("num_nodes", "cpu_quota", "expected"),
    [(4, 0.4, True), (4, 0.5, False), (4, None, False), (1, 1.9, True)],
)
def test_quotas_are_guaranteed_only_where_they_leave_the_machine_some_room(
    num_nodes: int, cpu_quota: float | None, expected: bool
) -> None:
    shape = ClusterShape(num_nodes=num_nodes, cpu_quota=cpu_quota)
    assert shape.leaves_room_on(2) is expected


@pytest.mark.parametrize(
    ("num_nodes", "cpu_quota", "cores", "expected"),
    [
        (4, 0.4, [0, 1], [0, 1, 0, 1]),
        (4, 0.4, [2, 5, 7], [2, 5, 7, 2]),
        (2, 1.0, [0, 1], [0, 1]),
        (3, 0.6, [0, 1], [None, None, None]),
        (1, 1.9, [0, 1], [None]),
        (2, None, [0, 1], [None, None]),
    ],
)
def test_nodes_are_spread_evenly_over_the_cores_that_can_hold_them(
    num_nodes: int, cpu_quota: float | None, cores: list[int], expected: list[int | None]
) -> None:
    shape = ClusterShape(num_nodes=num_nodes, cpu_quota=cpu_quota)
    assert [shape.core_of(node, cores) for node in shape.nodes] == expected
    assert shape.core_of(HEAD, cores) is None
