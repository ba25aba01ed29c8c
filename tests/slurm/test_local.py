"""Jobs as processes of this host: the same records as on Slurm, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slurm import local
from slurm.cluster import JobState, Resources
from slurm.local import LocalCluster
from slurm.spec import ClusterSpec
from storage.errors import SubmitRejected
from storage.job import JobDescription
from storage.records import ExitCode
from tests.slurm.jobs import Workplace, logs, wait_for, wait_for_file

ROOT = Path(__file__).resolve().parents[2]


def processes_of(job: JobDescription) -> list[psutil.Process]:
    """Every process whose command line names the job's folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(job.folder) in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.s3
def test_the_same_entry_gives_the_same_record_as_on_slurm(here: Workplace) -> None:
    job = here.job(nodes=2, ranks=2, part="meet")
    job_id = here.submit(job)
    seen = here.wait_for_end(job)
    word = here.exit(job)
    assert (word.code, word.rank) == (ExitCode.DONE, 0), logs(job)
    assert word.outputs["places"] == ["local1 0 4", "local1 1 4", "local2 0 4", "local2 1 4"]
    assert word.outputs["nodes"] == ["local1", "local2"]
    assert word.outputs["folder"] == str(job.folder)
    assert (seen.job_id, seen.raw_state, seen.exit_code) == (job_id, "COMPLETED", "0:0")
    assert seen.nodes == ("local1", "local2")
    start = here.attempt(job).start
    assert start is not None
    assert start.job is not None
    assert (start.job.job_id, start.job.token) == (job_id, job.intent.token)
    assert {beat.node for beat in here.attempt(job).heartbeats} == {"local1", "local2"}


@pytest.mark.s3
def test_the_rank_that_fails_says_why_and_ends_the_others(here: Workplace) -> None:
    job = here.job(part="fail", rank=1)
    here.submit(job)
    seen = here.wait_for_end(job)
    word = here.exit(job)
    assert (word.code, word.rank, word.node) == (ExitCode.BAD_DATA, 1, "local1"), logs(job)
    assert word.error == "document 7 cannot be read"
    assert (seen.raw_state, seen.exit_code) == ("FAILED", f"{ExitCode.BAD_DATA.value}:0")
    assert (job.folder / "told.0").read_text() == str(signal.SIGTERM.value)
    assert processes_of(job) == []


@pytest.mark.s3
def test_a_killed_rank_comes_out_though_others_say_resume_me(here: Workplace) -> None:
    job = here.job(part="killed", rank=1)
    here.submit(job)
    here.wait_for_end(job)
    word = here.exit(job)
    assert (word.code, word.rank) == (137, 1), logs(job)
    assert "rank 1 ended with SIGKILL\na last line before the end" in word.error


@pytest.mark.s3
def test_a_rank_that_lost_a_peer_lets_the_one_at_fault_speak_first(here: Workplace) -> None:
    job = here.job(part="peer lost")
    here.submit(job)
    here.wait_for_end(job)
    word = here.exit(job)
    assert (word.code, word.rank) == (139, 1), logs(job)
    assert "SIGSEGV" in word.error


@pytest.mark.s3
def test_leaving_without_a_word_is_no_success(here: Workplace) -> None:
    job = here.job(part="silent")
    here.submit(job)
    seen = here.wait_for_end(job)
    assert here.exit(job).code == ExitCode.CRASHED
    assert "none said that the work is done" in here.exit(job).error
    assert seen.raw_state == "FAILED"


@pytest.mark.s3
def test_an_entry_that_leaves_early_names_its_own_code_and_outputs(here: Workplace) -> None:
    job = here.job(ranks=1, part="leave")
    here.submit(job)
    here.wait_for_end(job)
    word = here.exit(job)
    assert (word.code, word.error, word.outputs) == (ExitCode.RESUME, "told to leave", {"step": 3})


@pytest.mark.s3
def test_a_setup_line_that_fails_ends_the_job(here: Workplace) -> None:
    spec = ClusterSpec(kind="local", setup=("false # on purpose",))
    here = replace(here, cluster=LocalCluster(spec, workdir=here.workdir))
    job = here.job(part="meet")
    here.submit(job)
    seen = here.wait_for_end(job)
    assert seen.exit_code == f"{ExitCode.BAD_CONFIG.value}:0"
    assert "cluster.setup line 1 failed: false # on purpose" in logs(job)
    assert here.attempt(job).start is None


@pytest.mark.s3
def test_a_job_survives_the_end_of_its_submitter(here: Workplace) -> None:
    job = here.job(ranks=1, part="wait")
    job.open_ledger().claim_intent(job.intent)
    job.write(job.folder / "sent.json")
    program = f"""
        import os, signal
        from pathlib import Path
        from slurm.cluster import Resources
        from slurm.local import LocalCluster
        from slurm.spec import ClusterSpec
        from storage.job import JobDescription

        spec = ClusterSpec(kind="local", env={{"PYTHONPATH": {str(ROOT / "tests/slurm")!r}}})
        job = JobDescription.read(Path({str(job.folder / "sent.json")!r}))
        LocalCluster(spec, workdir=Path({str(here.workdir)!r})).submit(
            job, Resources(nodes=1, ranks_per_node=1)
        )
        os.kill(os.getpid(), signal.SIGKILL)
    """
    submitter = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], check=False, cwd=ROOT
    )
    assert submitter.returncode == -signal.SIGKILL
    wait_for_file(job.folder / "waiting.0")
    seen = here.look(job)
    assert seen.state is JobState.RUNNING
    assert seen.job_id is not None
    here.cluster.cancel(job_id=seen.job_id, token=job.intent.token)
    assert here.wait_for_end(job).raw_state.startswith("CANCELLED")
    assert here.exit(job).code == ExitCode.RESUME


@pytest.mark.s3
def test_a_job_that_could_not_be_recorded_does_not_run(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(local, "_write", full)
    job = here.job(part="meet")
    with pytest.raises(SubmitRejected, match="No space left on device"):
        here.submit(job)
    wait_for(lambda: not processes_of(job), what="the end of the keeper")
    assert here.look(job).state is JobState.ABSENT
    assert here.attempt(job).start is None


@pytest.mark.s3
def test_cancel_ends_the_job_that_bears_the_token_and_no_other(here: Workplace) -> None:
    job = here.job(ranks=1, part="wait")
    job_id = here.submit(job)
    wait_for_file(job.folder / "waiting.0")
    here.cluster.cancel(job_id=job_id, token="another-token")
    here.cluster.cancel(job_id="1", token=job.intent.token)
    assert here.look(job).state is JobState.RUNNING
    here.cluster.cancel(job_id=job_id, token=job.intent.token)
    seen = here.look(job)
    assert (seen.state, seen.raw_state) == (JobState.ENDED, f"CANCELLED by {os.getuid()}")
    here.cluster.cancel(job_id=job_id, token=job.intent.token)


@pytest.mark.s3
def test_a_job_that_ignores_the_request_is_killed_with_all_its_ranks(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "KILL_WAIT_S", 0.2)
    job = here.job(part="stubborn")
    job_id = here.submit(job)
    for rank in range(2):
        wait_for_file(job.folder / f"waiting.{rank}")
    here.cluster.cancel(job_id=job_id, token=job.intent.token)
    here.wait_for_end(job)
    wait_for(lambda: not processes_of(job), what="the end of the ranks")


@pytest.mark.s3
def test_the_ranks_do_not_outlive_a_killed_batch_step(here: Workplace) -> None:
    job = here.job(part="stubborn")
    here.submit(job)
    for rank in range(2):
        wait_for_file(job.folder / f"waiting.{rank}")
    (batch,) = (one for one in processes_of(job) if "slurm.batch" in one.cmdline())
    batch.kill()
    seen = here.wait_for_end(job)
    assert (seen.raw_state, seen.exit_code) == ("FAILED", "0:9")
    wait_for(lambda: not processes_of(job), what="the end of the ranks")


def test_nodes_are_names_and_excluded_ones_are_replaced(tmp_path: Path) -> None:
    spec = ClusterSpec(kind="local", nodes=2, exclude=("local1",))
    cluster = LocalCluster(spec, workdir=tmp_path)
    assert [node.name for node in cluster.nodes()] == ["local2", "local3"]
    assert not cluster.gates
    asked = Resources(nodes=2, ranks_per_node=1, excluded=("local3",))
    assert local._choose_nodes(spec, asked) == ("local2", "local4")
    named = replace(asked, node_list=("local7", "local8"))
    assert local._choose_nodes(spec, named) == ("local7", "local8")


def test_of_a_range_of_nodes_this_host_has_the_most(tmp_path: Path) -> None:
    spec = ClusterSpec(kind="local", nodes="2-3")
    asked = Resources(nodes=2, most_nodes=3, ranks_per_node=1)
    assert local._choose_nodes(spec, asked) == ("local1", "local2", "local3")
    assert len(LocalCluster(spec, workdir=tmp_path).nodes()) == 3


def test_a_process_id_that_was_given_away_again_is_not_the_job(tmp_path: Path) -> None:
    record = local._Record(
        token="t",
        job_id=str(os.getpid()),
        pid=os.getpid(),
        started_at=psutil.Process().create_time() - 100,
        group=os.getpid(),
        nodes=("local1",),
        status=tmp_path / "exit_status",
    )
    local._write(tmp_path / "local", record)
    cluster = LocalCluster(ClusterSpec(kind="local"), workdir=tmp_path)
    assert cluster.observe(["t"])["t"].state is JobState.ENDED
    cluster.cancel(job_id=str(os.getpid()), token="t")
