"""The dev cluster itself: what it promises to those who test on it, and that it leaves no trace.

It uses clusters of its own, since it breaks and removes them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.dev import app
from slurm.devcluster import (
    ClusterShape,
    DevCluster,
    DevClusterError,
    DevClusterUnavailable,
    machine,
)
from slurm.devcluster.cgroups import QUOTA_PERIOD_US, CgroupTree, machine_cores

ROOT = Path(__file__).parents[2]
SHAPE = ClusterShape(
    name="hc",
    subnet="10.98.9.0/24",
    num_nodes=2,
    memory_mb=1024,
    gpus_per_node=2,
    cpu_quota=0.4,
    slurmd_timeout_s=3,
)
OTHER = ClusterShape(name="hd", subnet="10.98.10.0/24", num_nodes=1, gpus_per_node=0)
DEADLINE_S = 90.0


def run(cluster: DevCluster, *argv: str) -> str:
    done = subprocess.run(
        argv, env={**os.environ, **cluster.env()}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout.strip()


def wait_until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}"
        time.sleep(0.1)


def submit(cluster: DevCluster, output: Path, *options: str, command: str) -> str:
    return run(cluster, "sbatch", "--parsable", f"--output={output}", *options, "--wrap", command)


def accounted(cluster: DevCluster, job_id: str, fields: str) -> str:
    return run(cluster, "sacct", "-nPX", "-j", job_id, "-o", fields)


def finish(cluster: DevCluster, job_id: str) -> str:
    """Wait for the end of a job, and say how the accounting has it."""
    wait_until(
        f"job {job_id} is over in the accounting",
        lambda: accounted(cluster, job_id, "state") not in {"", "PENDING", "RUNNING"},
    )
    return accounted(cluster, job_id, "state")


def wait_running(cluster: DevCluster, job_id: str) -> None:
    wait_until(
        f"job {job_id} runs",
        lambda: run(cluster, "squeue", "-h", "-j", job_id, "-o", "%T") == "RUNNING",
    )


def node_state(cluster: DevCluster, node: str) -> str:
    return next(each.state for each in cluster.status().nodes if each.name == node)


def bring_up(shape: ClusterShape) -> DevCluster:
    cluster = DevCluster(shape)
    try:
        cluster.up(say=print)
    except DevClusterUnavailable as reason:
        pytest.skip(str(reason))
    return cluster


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[DevCluster]:
    cluster = bring_up(SHAPE)
    try:
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def cluster(shared_cluster: DevCluster) -> DevCluster:
    """The cluster of this module, whole again whatever the last test left of it."""
    shared_cluster.up()
    return shared_cluster


@pytest.mark.slurm
def test_a_job_runs_on_every_node_and_is_in_the_accounting(
    cluster: DevCluster, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    show = 'echo "$(hostname) $CUDA_VISIBLE_DEVICES $(ls /sys/class/net | xargs)"'
    job_id = submit(cluster, output, "--nodes=2", "--gres=gpu:2", command=f"srun sh -c '{show}'")
    assert finish(cluster, job_id) == "COMPLETED"
    assert sorted(output.read_text().splitlines()) == ["n1 0,1 eth0 lo", "n2 0,1 eth0 lo"]
    # The list of nodes comes some seconds after the end.
    wait_until(
        "the accounting knows cluster and nodes",
        lambda: accounted(cluster, job_id, "cluster,nodelist") == "hc|n[1-2]",
    )


@pytest.mark.slurm
def test_nodes_reach_each_other_and_this_machine_by_name(
    cluster: DevCluster, tmp_path: Path
) -> None:
    names = ("n1", "n2", "headrace-host")
    look_up = "; ".join(f"getent hosts {name}" for name in names)
    job_id = submit(cluster, tmp_path / "out", command=look_up)
    assert finish(cluster, job_id) == "COMPLETED"
    found = [line.split()[0] for line in (tmp_path / "out").read_text().splitlines()]
    assert found == ["10.98.9.11", "10.98.9.12", cluster.host]


@pytest.mark.slurm
def test_up_twice_is_harmless(cluster: DevCluster) -> None:
    before = cluster.status()
    assert DevCluster(SHAPE).up() == "already up"
    assert cluster.status() == before


@pytest.mark.slurm
def test_up_with_another_shape_asks_to_go_down_first(cluster: DevCluster) -> None:
    wider = ClusterShape(name="hc", subnet="10.98.9.0/24", num_nodes=3)
    with pytest.raises(DevClusterError, match=r"num_nodes 2 -> 3.*headrace dev down --name hc"):
        DevCluster(wider).up()
    assert cluster.status().is_up


@pytest.mark.slurm
def test_up_elsewhere_does_not_take_over_a_running_cluster(
    cluster: DevCluster, tmp_path: Path
) -> None:
    with pytest.raises(DevClusterError, match="belongs to /var/lib/headrace-dev/hc"):
        DevCluster(SHAPE, base=tmp_path).up()
    with pytest.raises(DevClusterError, match="belongs to /var/lib/headrace-dev/hc"):
        DevCluster(SHAPE, base=tmp_path).down()
    assert cluster.status().is_up


@pytest.mark.slurm
def test_a_subnet_in_use_is_refused(cluster: DevCluster) -> None:
    with pytest.raises(DevClusterError, match=r"overlaps with 10\.98\.9\.0/24"):
        DevCluster(ClusterShape(name="hd", subnet=SHAPE.subnet)).up()
    assert not Path("/var/lib/headrace-dev/hd").exists()


@pytest.mark.slurm
def test_up_brings_killed_daemons_back_and_the_running_job_ends_well(
    cluster: DevCluster, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    waits = f"while ! test -e {go}; do sleep 0.1; done"
    job_id = submit(cluster, tmp_path / "out", "--nodes=2", command=f"srun sh -c '{waits}'")
    wait_running(cluster, job_id)
    # slurmctld writes its jobs down every few seconds; one younger than that dies with it.
    began, saved = time.time(), cluster.layout.root / "state/job_state"
    wait_until("slurmctld has written its state", lambda: saved.stat().st_mtime > began)
    for daemon, host in (("slurmctld", "head"), ("slurmd", "n1"), ("munged", "head")):
        pid = cluster.pid(daemon, host=host)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    wait_until("slurmctld is gone", lambda: cluster.pid("slurmctld") is None)
    assert not cluster.status().is_up
    assert cluster.up() == "repaired"
    assert cluster.status().is_up
    go.touch()
    assert finish(cluster, job_id) == "COMPLETED"


@pytest.mark.slurm
def test_a_cut_node_fails_its_job_and_a_healed_one_comes_back(
    cluster: DevCluster, tmp_path: Path
) -> None:
    command = f"srun sh -c 'touch {tmp_path}/$SLURMD_NODENAME; sleep 600'"
    job_id = submit(cluster, tmp_path / "out", "--nodes=2", "--no-requeue", command=command)
    wait_until("the step runs on n2", (tmp_path / "n2").exists)
    cluster.cut("n2")
    assert finish(cluster, job_id) == "NODE_FAIL"
    assert node_state(cluster, "n2") == "down*"
    cluster.heal("n2")
    wait_until("n2 is idle again", lambda: node_state(cluster, "n2") == "idle")
    job_id = submit(cluster, tmp_path / "out", "--nodelist=n2", command="hostname")
    assert finish(cluster, job_id) == "COMPLETED"


@pytest.mark.slurm
def test_memory_beyond_the_limit_ends_the_job(cluster: DevCluster, tmp_path: Path) -> None:
    grow = f"{sys.executable} -c 'bytearray(200 << 20)'"
    job_id = submit(cluster, tmp_path / "out", "--mem=64", command=grow)
    assert finish(cluster, job_id) == "OUT_OF_MEMORY"
    job_id = submit(cluster, tmp_path / "out", "--mem=512", command=grow)
    assert finish(cluster, job_id) == "COMPLETED"


@pytest.mark.slurm
def test_job_steps_get_no_more_than_the_quota(cluster: DevCluster, tmp_path: Path) -> None:
    spin = "timeout 600 sh -c 'while :; do :; done'"
    job_id = submit(
        cluster,
        tmp_path / "out",
        "--nodelist=n1",
        "--ntasks=2",
        command=f"srun --ntasks=2 {spin}",
    )
    wait_running(cluster, job_id)
    wait_until("the step burns CPU", lambda: len(spinning(cluster, "n1")) == 2)
    # On a busy machine two loops may get less than the quota anyway; throttled means they met it.
    before = throttled_periods(cluster, "n1")
    wait_until("the quota holds the step back", lambda: throttled_periods(cluster, "n1") > before)
    used_s, began_s = cluster.cpu_time_s("n1"), time.monotonic()
    time.sleep(3)
    cores = (cluster.cpu_time_s("n1") - used_s) / (time.monotonic() - began_s)
    run(cluster, "scancel", job_id)
    assert finish(cluster, job_id).startswith("CANCELLED")
    assert SHAPE.cpu_quota is not None
    # One period's share may be counted on either side of a reading.
    assert 0 < cores <= SHAPE.cpu_quota * 1.1


@pytest.mark.slurm
def test_each_node_keeps_to_its_core_and_may_catch_up_on_its_share(
    cluster: DevCluster, tmp_path: Path
) -> None:
    look = 'import os; print(os.environ["SLURMD_NODENAME"], *sorted(os.sched_getaffinity(0)))'
    job_id = submit(
        cluster, tmp_path / "out", "--nodes=2", command=f"srun {sys.executable} -c '{look}'"
    )
    assert finish(cluster, job_id) == "COMPLETED"
    expected = [f"{node} {SHAPE.core_of(node, machine_cores())}" for node in SHAPE.nodes]
    assert sorted((tmp_path / "out").read_text().splitlines()) == expected
    assert SHAPE.cpu_quota is not None
    for node in SHAPE.nodes:
        burst_us = int(cpu_file(cluster, node, "cpu.cfs_burst_us", "cpu.max.burst"))
        assert burst_us == SHAPE.cpu_quota * QUOTA_PERIOD_US


def throttled_periods(cluster: DevCluster, node: str) -> int:
    lines = cpu_file(cluster, node, "cpu.stat").splitlines()
    return int(dict(line.split() for line in lines)["nr_throttled"])


def cpu_file(cluster: DevCluster, node: str, *names: str) -> str:
    """What the CPU controller says of a node, in the file of the first name that it knows."""
    tree = CgroupTree.of(cluster.shape.name)
    folders = [tree.directory(hierarchy, node) for hierarchy in tree.hierarchies]
    found = [folder / name for folder in folders for name in names if (folder / name).exists()]
    assert found, f"no cgroup of {node} has any of {names}"
    return found[0].read_text()


def spinning(cluster: DevCluster, node: str) -> list[int]:
    return [
        pid
        for pid in CgroupTree.of(cluster.shape.name).pids(node)
        if command_line(pid).startswith("sh -c while :;")
    ]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.mark.slurm
def test_a_slowed_link_is_shaped_both_ways_and_restored(cluster: DevCluster) -> None:
    def shaped() -> list[bool]:
        link = SHAPE.link("n2")
        inside = run(cluster, "tc", "-n", link, "qdisc", "show", "dev", "eth0")
        outside = run(cluster, "tc", "qdisc", "show", "dev", link)
        return ["tbf" in text and "rate 10Mbit" in text for text in (inside, outside)]

    cluster.slow("n2", "10mbit")
    assert shaped() == [True, True]
    cluster.slow("n2", None)
    assert shaped() == [False, False]


@pytest.mark.slurm
def test_a_cluster_killed_half_way_recovers_beside_another_and_goes_without_a_trace(
    cluster: DevCluster, tmp_path: Path
) -> None:
    assert traces(OTHER) == []
    other = DevCluster(OTHER)
    try:
        interrupt_up(other)
        assert other.up() == "repaired"
        job_id = submit(other, tmp_path / "out", command="hostname; sleep 600")
        wait_running(other, job_id)
        assert cluster.status().is_up

        processes = CgroupTree.of(OTHER.name).pids()
        assert len(processes) >= 5
        assert len(traces(OTHER)) > 10
        with visitor(OTHER, "n1") as inside:
            other.down()
            assert inside.wait(timeout=30) == -signal.SIGKILL
        assert traces(OTHER) == []
        assert not any(command_line(pid) for pid in processes)
        assert cluster.status().is_up
    finally:
        # For the second time, if all went well: it does no harm.
        other.down()


@contextlib.contextmanager
def visitor(shape: ClusterShape, host: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a node's network that Slurm knows nothing of."""
    namespace = f"/run/netns/{shape.link(host)}"
    with subprocess.Popen(["nsenter", f"--net={namespace}", "sleep", "600"]) as inside:
        try:
            yield inside
        finally:
            inside.kill()


def interrupt_up(cluster: DevCluster) -> None:
    """Start to bring a cluster up, and be killed as soon as the first daemon is there."""
    code = f"from slurm.devcluster import *; DevCluster({cluster.shape!r}).up()"
    starting = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        wait_until(
            "the first daemon is recorded", lambda: any(cluster.layout.run_dir.glob("*.pid"))
        )
    finally:
        starting.kill()
        starting.wait()


def traces(shape: ClusterShape) -> list[str]:
    """All that the kernel and the file system still know of a cluster."""
    state_dir = f"/var/lib/headrace-dev/{shape.name}"
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    mounts = Path("/proc/self/mountinfo").read_text()
    owned = (f"{shape.bridge}-", f"{shape.bridge}:", state_dir)
    lines = [line for line in (links + mounts).splitlines() if any(key in line for key in owned)]
    namespaces = Path("/run/netns").glob(f"{shape.bridge}-*")
    cgroups = Path("/sys/fs/cgroup").glob(f"**/headrace-dev/{shape.name}/**")
    state = Path(state_dir).glob("**")
    return lines + [str(path) for found in (namespaces, cgroups, state) for path in found]


@pytest.mark.slurm
def test_commands_show_use_and_refuse(cluster: DevCluster) -> None:
    def invoke(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(arguments))
        return done.exit_code, done.output

    code, text = invoke("up", "--name", "hc", "--nodes", "2")
    assert code == 0
    assert "is up already" in text
    line = f"export SLURM_CONF={cluster.slurm_conf} HEADRACE_DEV_HOST=10.98.9.1\n"
    assert text.endswith(line)
    assert invoke("env", "--name", "hc") == (0, line)
    code, text = invoke("status", "--name", "hc")
    assert code == 0
    assert "slurmctld" in text
    code, text = invoke("cut", "n7", "--name", "hc")
    assert code == 2
    assert "has n1 to n2" in text
    assert invoke("stop", "slurmdbd", "--name", "hc")[0] == 0
    code, text = invoke("status", "--name", "hc")
    assert code == 1
    assert "not running" in text
    assert invoke("start", "slurmdbd", "--name", "hc")[0] == 0
    assert invoke("status", "--name", "hc")[0] == 0
    code, text = invoke("stop", "sshd", "--name", "hc")
    assert code == 1
    assert "slurmctld" in text
    code, text = invoke("status", "--name", "none")
    assert code == 1
    assert "headrace dev up" in text


@pytest.mark.slurm
@pytest.mark.skipif(os.geteuid() != 0, reason="gives up root, so has to have it")
def test_without_root_one_error_says_what_to_use_instead() -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(DevClusterUnavailable, match=r"needs root.*kind: local"):
            DevCluster(OTHER).up()
    finally:
        os.seteuid(0)


def test_missing_packages_are_named_with_the_command_that_installs_them(tmp_path: Path) -> None:
    with pytest.raises(DevClusterUnavailable, match=r"slurmctld.*apt-get install .*slurmctld"):
        machine.check_programs(path=str(tmp_path))


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "hd").mkdir()
    precious = tmp_path / "hd" / "thesis.txt"
    precious.write_text("years of work")
    with pytest.raises(DevClusterError, match="holds no dev cluster"):
        DevCluster.load("hd", base=tmp_path)
    if os.geteuid() == 0:
        with pytest.raises(DevClusterError, match="is left alone"):
            DevCluster(OTHER, base=tmp_path).down()
    assert precious.read_text() == "years of work"
