"""Sidecars: started again whoever is killed, ended after their work, and no end of their job."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slurm.cluster import JobState
from slurm.devcluster import DevCluster
from slurm.job_logs import sidecars_log
from slurm.sidecar import FIRST_PAUSE_S, LAST_PAUSE_S, LEAVING, pause_s
from slurm.sidecars import LocalGuards, Sidecars, SrunGuards, guard_step_command
from storage.job import JobDescription
from storage.records import ExitCode
from tests.slurm.jobs import ENTRIES, Workplace, logs, wait_for, wait_for_file
from tests.slurm.test_local import processes_of

ROOT = Path(__file__).resolve().parents[2]
NODES = ("local1", "local2")


def with_sidecar(job: JobDescription) -> JobDescription:
    return replace(job, sidecar="sidecar_entries")


def begun(job: JobDescription, node: str) -> list[tuple[int, int]]:
    """Of each sidecar that ran on the node: its process, and its guard's."""
    path = job.folder / f"begun.{node}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), int(guard)) for pid, guard in map(str.split, lines)]


def wait_for_begin(job: JobDescription, node: str, *, times: int = 1) -> None:
    wait_for(lambda: len(begun(job, node)) >= times, what=f"sidecar {times} on {node}\n{logs(job)}")


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def watched(job: JobDescription, *nodes: str) -> Iterator[tuple[JobDescription, Sidecars]]:
    """The sidecars of a job of which nothing else runs."""
    job = with_sidecar(job)
    job.write(job.folder / "job.json")
    environment = {
        **os.environ,
        "HEADRACE_NODES": ",".join(nodes),
        "HEADRACE_MASTER_ADDR": "127.0.0.1",
        "HEADRACE_MASTER_PORT": "1",
        "PYTHONPATH": f"{job.code}:{ENTRIES}",
    }
    guards = LocalGuards(job, logs=job.folder, environment=environment)
    sidecars = Sidecars(guards, nodes, log=sidecars_log(job.folder))
    sidecars.start()
    try:
        yield job, sidecars
    finally:
        sidecars.finish(0.0)


@pytest.mark.s3
def test_a_node_has_one_sidecar_that_knows_its_place_and_loads_nothing_heavy(
    here: Workplace,
) -> None:
    job = with_sidecar(here.job(nodes=2, ranks=2, part="go"))
    here.submit(job)
    for node in NODES:
        wait_for_begin(job, node)
        wait_for_file(job.folder / f"modules.{node}")
    (job.folder / "go").touch()
    seen = here.wait_for_end(job)
    assert (here.exit(job).code, seen.raw_state) == (ExitCode.DONE, "COMPLETED"), logs(job)
    for index, node in enumerate(NODES):
        assert len(begun(job, node)) == 1, logs(job)
        identity = json.loads((job.folder / f"identity.{node}").read_bytes())
        assert (identity["rank"], identity["world_size"]) == (index, 2)
        assert (identity["node"], identity["nodes"]) == (node, [*NODES])
        assert (job.folder / f"done.{node}").exists()
        said = (job.folder / f"sidecar.{node}.log").read_text()
        assert said == "half a line, and its end\n"
        loaded = {
            name.partition(".")[0]
            for name in (job.folder / f"modules.{node}").read_text().split("\n")
        }
        assert not loaded & {"torch", "prefect", "submitit", "numpy", "flows", "tasks", "trainer"}
    assert {beat.node for beat in here.attempt(job).heartbeats} == {*NODES}
    assert processes_of(job) == []


@pytest.mark.s3
def test_a_sidecar_that_is_killed_is_started_again(here: Workplace) -> None:
    with watched(here.job(), "local1") as (job, sidecars):
        wait_for_begin(job, "local1")
        ((pid, guard),) = begun(job, "local1")
        os.kill(pid, signal.SIGKILL)
        wait_for_begin(job, "local1", times=2)
        assert begun(job, "local1")[1][1] == guard
        assert "the sidecar ended with SIGKILL" in logs(job)
        assert sidecars.finish(60.0), logs(job)


@pytest.mark.s3
def test_a_sidecar_ends_with_its_guard_and_another_guard_is_started(here: Workplace) -> None:
    with watched(here.job(), "local1") as (job, sidecars):
        wait_for_begin(job, "local1")
        ((pid, guard),) = begun(job, "local1")
        os.kill(guard, signal.SIGKILL)
        wait_for(lambda: not is_running(pid), what="the end of the orphan")
        wait_for_begin(job, "local1", times=2)
        assert begun(job, "local1")[1][1] != guard
        assert "that of local1 is gone (137)" in sidecars_log(job.folder).read_text()
        assert sidecars.finish(60.0), logs(job)


@pytest.mark.s3
def test_what_is_meant_for_ranks_ends_no_sidecar_before_its_work_is_done(here: Workplace) -> None:
    job = with_sidecar(here.job(ranks=1, part="wait", work_s=1.0))
    job_id = here.submit(job)
    wait_for_begin(job, "local1")
    wait_for_file(job.folder / "waiting.0")
    here.cluster.cancel(job_id=job_id, token=job.intent.token)
    assert here.wait_for_end(job).raw_state.startswith("CANCELLED")
    assert here.exit(job).code == ExitCode.RESUME
    assert (job.folder / "done.local1").exists(), logs(job)
    assert len(begun(job, "local1")) == 1, logs(job)


@pytest.mark.s3
def test_a_sidecar_finishes_its_work_after_a_rank_was_killed(here: Workplace) -> None:
    job = with_sidecar(here.job(nodes=2, ranks=1, part="killed", rank=1, until="enough"))
    here.submit(job)
    wait_for_file(job.folder / "told.local2")
    assert here.exit(job).code == 137, "the record is written before"
    assert here.look(job).state is JobState.RUNNING
    (job.folder / "enough").touch()
    here.wait_for_end(job)
    for node in NODES:
        assert (job.folder / f"done.{node}").exists(), logs(job)


@pytest.mark.s3
def test_a_sidecar_killed_at_its_last_work_gets_to_do_it_again(here: Workplace) -> None:
    with watched(here.job(work_s=2.0), "local1") as (job, sidecars):
        wait_for_begin(job, "local1")
        sidecars.tell()
        wait_for_file(job.folder / "told.local1")
        for victim in (0, 1):
            (job.folder / "told.local1").unlink()
            os.kill(begun(job, "local1")[-1][victim], signal.SIGKILL)
            wait_for_file(job.folder / "told.local1")
        assert sidecars.finish(60.0), logs(job)
        assert (job.folder / "done.local1").exists()


@pytest.mark.s3
def test_a_sidecar_that_never_leaves_is_killed_at_the_bound(here: Workplace) -> None:
    with watched(here.job(stays=["local2"]), *NODES) as (job, sidecars):
        for node in NODES:
            wait_for_begin(job, node)
        sidecars.tell()
        wait_for_file(job.folder / "done.local1")
        wait_for_file(job.folder / "told.local2")
        assert not sidecars.finish(0.5)
        wait_for(lambda: processes_of(job) == [], what="the end of the sidecars")
        said = sidecars_log(job.folder).read_text()
        assert "not done after 0.5 s on local2; killing them" in said


@pytest.mark.s3
def test_a_sidecar_that_is_broken_is_told_of_and_is_no_failure_of_the_job(here: Workplace) -> None:
    job = with_sidecar(here.job(nodes=2, ranks=1, part="go", broken=["local2"]))
    here.submit(job)
    wait_for_begin(job, "local1")
    wait_for_begin(job, "local2", times=2)
    (job.folder / "go").touch()
    seen = here.wait_for_end(job)
    assert (here.exit(job).code, seen.raw_state) == (ExitCode.DONE, "COMPLETED"), logs(job)
    said = (job.folder / "sidecar.local2.log").read_text()
    assert "RuntimeError: the sidecar is broken" in said
    assert "time on end; giving it up" in said
    assert (job.folder / "done.local1").exists()


@pytest.mark.s3
def test_a_sidecar_that_cannot_be_imported_holds_up_no_end(here: Workplace) -> None:
    job = replace(here.job(ranks=1, part="leave"), sidecar="no.such.module")
    here.submit(job)
    here.wait_for_end(job)
    assert here.exit(job).code == ExitCode.RESUME
    assert "No module named 'no'" in (job.folder / "sidecar.local1.log").read_text()


@pytest.mark.s3
def test_a_job_without_a_sidecar_has_nothing_of_it(here: Workplace) -> None:
    job = here.job(ranks=1, part="leave")
    here.submit(job)
    here.wait_for_end(job)
    assert not list(job.folder.glob("sidecar*"))


@pytest.mark.slurm
def test_steps_run_side_by_side_and_whoever_is_killed_is_started_again_on_its_node(
    there: Workplace,
) -> None:
    job = with_sidecar(there.job(nodes=2, ranks=2, part="go"))
    there.submit(job, node_list=("n1", "n2"), memory_per_node="900M", gpus_per_node=2)
    for rank in range(4):
        wait_for_file(job.folder / f"waiting.{rank}")
    for node in ("n1", "n2"):
        wait_for_file(job.folder / f"modules.{node}")
    for victim in (0, 1):
        os.kill(begun(job, "n2")[-1][victim], signal.SIGKILL)
        wait_for_begin(job, "n2", times=victim + 2)
    assert there.look(job).state is JobState.RUNNING
    (job.folder / "go").touch()
    seen = there.wait_for_end(job)
    assert there.exit(job).code == ExitCode.DONE, logs(job)
    assert (seen.raw_state, seen.exit_code) == ("COMPLETED", "0:0")
    first, second, third = begun(job, "n2")
    assert first[1] == second[1] != third[1]
    assert len(begun(job, "n1")) == 1, logs(job)
    for index, node in enumerate(("n1", "n2")):
        assert (job.folder / f"done.{node}").exists(), logs(job)
        identity = json.loads((job.folder / f"identity.{node}").read_bytes())
        assert (identity["rank"], identity["world_size"]) == (index, 2)


@pytest.mark.slurm
def test_sidecars_on_slurm_finish_their_work_after_a_rank_was_killed(there: Workplace) -> None:
    job = with_sidecar(there.job(nodes=2, ranks=1, part="killed", rank=1, until="enough"))
    there.submit(job, node_list=("n3", "n4"), memory_per_node="900M")
    wait_for_file(job.folder / "told.n4")
    assert (there.exit(job).code, there.exit(job).node) == (137, "n4"), "written before"
    assert there.look(job).state is JobState.RUNNING
    (job.folder / "enough").touch()
    seen = there.wait_for_end(job)
    assert seen.raw_state == "FAILED"
    for node in ("n3", "n4"):
        assert (job.folder / f"done.{node}").exists(), logs(job)
        assert len(begun(job, node)) == 1, logs(job)


@pytest.mark.slurm
def test_a_cancelled_job_leaves_its_sidecars_what_slurm_leaves_the_job(there: Workplace) -> None:
    job = with_sidecar(there.job(nodes=2, ranks=1, part="wait", work_s=1.0, stays=["n2"]))
    job_id = there.submit(job, node_list=("n1", "n2"), memory_per_node="900M")
    for rank, node in enumerate(("n1", "n2")):
        wait_for_file(job.folder / f"waiting.{rank}")
        wait_for_begin(job, node)
    there.cluster.cancel(job_id=job_id, token=job.intent.token)
    seen = there.wait_for_end(job)
    assert seen.raw_state.startswith("CANCELLED"), logs(job)
    assert there.exit(job).code == ExitCode.RESUME
    assert (job.folder / "told.n2").exists(), logs(job)
    assert (job.folder / "done.n1").exists(), logs(job)
    wait_for(lambda: processes_of(job) == [], what="the end of the sidecars")


@pytest.mark.slurm
def test_the_sidecars_of_nodes_that_live_hold_nobody_up_when_one_is_gone(
    there: Workplace, dev_cluster: DevCluster
) -> None:
    job = with_sidecar(there.job(nodes=2, ranks=1, stays=["n3"]))
    job = replace(job, entry="peer_entries")
    there.submit(job, node_list=("n3", "n4"), memory_per_node="900M")
    for rank, node in enumerate(("n3", "n4")):
        wait_for_file(job.folder / f"pid.{rank}")
        wait_for_begin(job, node)
    dev_cluster.cut("n4")
    try:
        wait_for(lambda: not is_running(begun(job, "n3")[0][0]), what="the end of the sidecar")
        assert there.exit(job).code == ExitCode.PEER_LOST
        assert (job.folder / "told.n3").exists(), logs(job)
        assert "killing them" in sidecars_log(job.folder).read_text()
    finally:
        dev_cluster.heal("n4")


def test_srun_is_told_everything_by_name(here: Workplace) -> None:
    job = replace(
        here.job(nodes=2, ranks=4),
        cpus_per_rank=3,
        srun_options=("--mpi=none",),
        rank_prefix=("apptainer", "exec"),
        rank_python="python3",
    )
    command = guard_step_command(job, ["n1", "n2"], leaving=True)
    for argument in (
        "--overlap",
        "--nodes=2",
        "--nodelist=n1,n2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=12",
        "--cpu-bind=none",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--mpi=none",
        f"--output={job.folder}/sidecar.%N.log",
    ):
        assert argument in command
    path = str(job.folder / "job.json")
    ranks = ["apptainer", "exec", "python3", "-P", "-m", "slurm.sidecar", path, LEAVING]
    assert command[-len(ranks) :] == ranks


@pytest.fixture
def srun(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for srun, which is written by the test."""
    path = here.workdir / "bin" / "srun"
    path.parent.mkdir()
    path.touch(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)
    return path


@pytest.mark.parametrize(
    ("script", "ends"),
    [
        ("exit 0", {"n1": 0, "n2": 0}),
        ("echo 'srun: error: n2: task 1: Killed' >&2; exit 137", {"n1": 0, "n2": 137}),
        ("echo 'srun: error: n[1-2]: tasks 0-1: Killed' >&2; exit 137", {"n1": 137, "n2": 137}),
        ("echo 'srun: error: n1: task 0: Exited with exit code 70' >&2; exit 70", {"n1": 70}),
        ("echo 'srun: error: n2: task 1: Killed' >&2; kill -9 $$", {"n1": 137, "n2": 137}),
        ("echo 'srun: error: Unable to create step' >&2; exit 1", {"n1": 1, "n2": 1}),
        ("echo 'srun: error: task 0 launch failed: no IO' >&2", {"n1": 1, "n2": 1}),
    ],
)
def test_it_is_known_which_nodes_have_lost_their_guard(
    here: Workplace, srun: Path, script: str, ends: dict[str, int]
) -> None:
    srun.write_text(f"#!/bin/sh\n{script}\n")
    job = here.job(nodes=2)
    job.folder.mkdir(parents=True)
    guards = SrunGuards(job, logs=job.folder, environment=os.environ)
    guards.start(["n1", "n2"], leaving=False)
    seen: dict[str, int] = {}
    wait_for(lambda: seen.update(guards.ended()) or len(seen) == 2, what="both ends")
    assert seen == {"n1": 0, "n2": 0, **ends}
    wait_for(lambda: not guards.ended() and not guards._steps, what="the step's own end")


def test_pauses_grow_and_have_an_end() -> None:
    pauses = [pause_s(brief) for brief in range(1000)]
    assert pauses[:4] == [FIRST_PAUSE_S, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LAST_PAUSE_S
