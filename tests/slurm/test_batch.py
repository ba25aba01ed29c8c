"""The start, which one job of an attempt passes, and the last word of the batch step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from slurm.batch import Placement, Signals, pass_start, run_batch
from slurm.launchers import Ended, Limits, first_failure, run_local, run_srun, srun_command
from storage.job import JobDescription
from storage.records import (
    Action,
    Decision,
    Diagnosis,
    End,
    Exit,
    ExitCode,
    JobIdentity,
    Kind,
    Start,
    new_nonce,
)
from tests.slurm.jobs import ENTRIES, Workplace

ME = Placement(job_id="12", restart_count=0, nodes=("n1", "n2"))


def a_start(job: JobDescription, *, job_id: str | None = "12", restart_count: int = 0) -> Start:
    identity = JobIdentity(
        job_id=job_id or "", token=job.intent.token, restart_count=restart_count, host="n1"
    )
    return Start(
        job=identity if job_id else None, nodes=("n1",), nonce=new_nonce(), at=datetime.now(UTC)
    )


def started(job: JobDescription, placement: Placement = ME) -> ExitCode | None:
    return pass_start(job.open_ledger(), job, placement)


@pytest.mark.s3
def test_the_first_job_of_an_attempt_passes_and_is_recorded(here: Workplace) -> None:
    job = here.job()
    job.open_ledger().claim_intent(job.intent)
    assert started(job) is None
    start = here.attempt(job).start
    assert start is not None
    assert start.job is not None
    assert (start.job.job_id, start.job.token) == ("12", job.intent.token)
    assert start.nodes == ("n1", "n2")


@pytest.mark.s3
@pytest.mark.parametrize("winner", [None, "11"], ids=["void", "another job"])
def test_a_job_that_is_not_the_winner_leaves_fenced(here: Workplace, winner: str | None) -> None:
    job = here.job()
    job.open_ledger().claim_start(job.intent, a_start(job, job_id=winner))
    assert started(job) is ExitCode.FENCED


@pytest.mark.s3
def test_the_same_job_requeued_asks_to_be_resumed(here: Workplace) -> None:
    job = here.job()
    job.open_ledger().claim_start(job.intent, a_start(job))
    assert started(job, replace(ME, restart_count=1)) is ExitCode.RESUME


@pytest.mark.s3
def test_a_job_passes_its_start_once(here: Workplace) -> None:
    job = here.job()
    assert started(job) is None
    assert started(job) is ExitCode.FENCED


@pytest.mark.s3
def test_a_reused_job_id_with_another_token_is_another_job(here: Workplace) -> None:
    job = here.job()
    other = replace(a_start(job), job=JobIdentity(job_id="12", token="another", host="n1"))
    job.open_ledger().claim_start(job.intent, other)
    assert started(job, replace(ME, restart_count=1)) is ExitCode.FENCED


@pytest.mark.s3
def test_a_job_of_a_closed_attempt_leaves_fenced(here: Workplace) -> None:
    job = here.job()
    end = End(
        diagnosis=Diagnosis(kind=Kind.LOST),
        decision=Decision(action=Action.RESUME, reason="lost"),
        by="test",
        nonce=new_nonce(),
        at=datetime.now(UTC),
    )
    job.open_ledger().claim_end(job.intent, end)
    assert started(job) is ExitCode.FENCED


@pytest.mark.s3
def test_a_later_attempt_fences_its_own_unit_and_no_other(here: Workplace) -> None:
    job, other = here.job(attempt=1), here.job(attempt=2)
    job.open_ledger().claim_intent(other.intent)
    assert started(job) is None
    again = here.job(attempt=3)
    job.open_ledger().claim_intent(replace(again.intent, unit=other.intent.unit))
    assert started(other) is ExitCode.FENCED


def test_placement_is_read_from_slurm_and_from_the_local_keeper() -> None:
    by_slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2,9]", "SLURM_RESTART_COUNT": "2"}
    assert Placement.from_environment(by_slurm) == Placement(
        job_id="7", restart_count=2, nodes=("n1", "n2", "n9")
    )
    by_keeper = {"SLURM_JOB_ID": "7", "HEADRACE_NODES": "local1,local2"}
    assert Placement.from_environment(by_keeper).nodes == ("local1", "local2")


def run_ranks(job: JobDescription, limits: Limits) -> tuple[Ended, list[Ended]]:
    job.write(job.folder / "job.json")
    failures: list[Ended] = []
    environment = {
        **os.environ,
        "HEADRACE_MASTER_ADDR": "127.0.0.1",
        "HEADRACE_MASTER_PORT": "1",
        "HEADRACE_NODES": "local1",
        "PYTHONPATH": f"{job.code}:{ENTRIES}",
    }
    ended = run_local(
        job,
        environment=environment,
        nodes=["local1"],
        limits=limits,
        on_start=lambda _: None,
        on_failure=failures.append,
    )
    return ended, failures


class Clock:
    """Stands at zero until a file is there, then at `later_s`; sleeps are real."""

    def __init__(self, sign: Path, *, later_s: float) -> None:
        self._sign = sign
        self._later_s = later_s

    def monotonic(self) -> float:
        return self._later_s if self._sign.exists() else 0.0

    sleep = staticmethod(time.sleep)


@pytest.mark.s3
def test_ranks_are_told_before_the_time_limit(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = here.job(ranks=1, part="wait")
    clock = Clock(job.folder / "waiting.0", later_s=60.0)
    monkeypatch.setattr("slurm.launchers.time", clock)
    ended, failures = run_ranks(job, Limits(limit_s=100, lead_s=50))
    assert (ended.code, ended.rank, ended.timed_out) == (ExitCode.RESUME, 0, False)
    assert [one.code for one in failures] == [ExitCode.RESUME]
    assert (job.folder / "told.0").read_text() == str(signal.SIGUSR2.value)


@pytest.mark.s3
def test_ranks_that_go_on_past_the_time_limit_are_ended(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = here.job(ranks=1, part="stubborn")
    monkeypatch.setattr("slurm.launchers.GRACE_S", -1.0)
    clock = Clock(job.folder / "waiting.0", later_s=101.0)
    monkeypatch.setattr("slurm.launchers.time", clock)
    ended, _ = run_ranks(job, Limits(limit_s=100, lead_s=50))
    assert ended.timed_out
    assert "time limit of 100 s" in ended.words


@pytest.mark.parametrize(
    ("said", "rank", "node", "code"),
    [
        ("srun: error: n2: task 3: Exited with exit code 82", 3, "n2", 82),
        ("srun: error: n2: tasks 4-5,7: Killed", 4, "n2", 137),
        (
            "srun: error: gpu-7.cluster: task 0: Segmentation fault (core dumped)",
            0,
            "gpu-7.cluster",
            139,
        ),
        ("srun: error: n1: task 1: Terminated\nsrun: error: n2: task 2: Killed", 2, "n2", 137),
        ("srun: error: n1: task 0: Out Of Memory", 0, "n1", ExitCode.OUT_OF_MEMORY),
        ("srun: error: n1: task 0: something new", 0, "n1", 1),
    ],
)
def test_srun_names_the_first_rank_that_failed(said: str, rank: int, node: str, code: int) -> None:
    words = f"srun: job 5 queued\n{said}\nsrun: error: n9: task 9: Exited with exit code 9\n"
    found = first_failure(words)
    assert found is not None
    assert (found.rank, found.node, found.code) == (rank, node, code)


def test_srun_that_names_no_rank_names_none() -> None:
    words = "srun: error: Node failure on n2\nsrun: error: n1: task 0: Terminated\n"
    assert first_failure(words) is None


def test_ranks_that_srun_could_not_launch_are_no_success(here: Workplace) -> None:
    """Seen: where a node cannot open the output file, srun says so and leaves with 0."""
    job = here.job()
    job.folder.mkdir(parents=True)
    srun = job.folder / "srun"
    srun.write_text(
        "#!/bin/sh\necho 'srun: error: task 0 launch failed: Slurmd could not connect IO' >&2\n"
    )
    srun.chmod(0o755)
    ended = run_srun(
        job,
        logs=job.folder,
        environment={"PATH": f"{job.folder}:{os.environ['PATH']}"},
        nodes=["n1"],
        on_start=lambda _: None,
        on_failure=lambda _: None,
    )
    assert ended.code == 1
    assert "could not connect IO" in ended.words


def test_srun_is_told_everything_by_name(here: Workplace) -> None:
    """By what the job was given, which may be more than the least that its intent asks for."""
    job = replace(here.job(nodes=2, ranks=4), cpus_per_rank=3)
    command = srun_command(job, num_nodes=3)
    for argument in (
        "--nodes=3",
        "--ntasks=12",
        "--ntasks-per-node=4",
        "--cpus-per-task=3",
        "--kill-on-bad-exit=1",
        "--label",
        f"--output={job.folder}/node.%N.log",
    ):
        assert argument in command
    assert command[-1] == str(Path(job.folder, "job.json"))


@pytest.fixture
def own_signals() -> Iterator[None]:
    """The batch step takes over signals, which are given back here."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.s3
@pytest.mark.timeout(60)
@pytest.mark.usefixtures("own_signals")
def test_the_batch_step_does_not_wait_for_srun_when_a_node_is_dead(
    here: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = replace(here.job(nodes=2), launcher="srun")
    job.folder.mkdir(parents=True)
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    said = "srun: error: n1: task 0: Exited with exit code 88"
    srun.write_text(f"#!/bin/sh\necho '{said}' >&2\nexec sleep 1000\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(srun.parent), prepend=os.pathsep)
    monkeypatch.setattr("slurm.batch.DEAD_NODE_PATIENCE_S", 0.0)
    job.open_ledger().claim_intent(job.intent)
    record = Exit(
        code=ExitCode.PEER_LOST,
        rank=0,
        node="n1",
        blamed_nodes=("n2",),
        nonce=new_nonce(),
        at=datetime.now(UTC),
    )
    job.open_ledger().claim_exit(job.intent, record)
    assert run_batch(job, ME, Signals()) == ExitCode.PEER_LOST
    assert here.exit(job).blamed_nodes == ("n2",)


def element(number: int, *, job_id: str = "12", restart_count: int = 0) -> Placement:
    nodes = (f"n{number}",)
    return Placement(job_id=job_id, restart_count=restart_count, nodes=nodes, element=number)


@pytest.mark.s3
def test_the_elements_of_one_array_pass_whichever_comes_first_and_each_once(
    here: Workplace,
) -> None:
    job = here.job()
    job = replace(job, intent=replace(job.intent, elements=3))
    job.open_ledger().claim_intent(job.intent)
    assert [started(job, element(number)) for number in (2, 0)] == [None, None]
    assert started(job, element(0)) is ExitCode.FENCED
    assert started(job, element(1, job_id="13")) is ExitCode.FENCED
    attempt = here.attempt(job)
    assert attempt.start is not None
    assert (attempt.start.element, attempt.start.nodes) == (2, ("n2",))
    assert [one.number for one in attempt.elements] == [0, 2]


@pytest.mark.s3
def test_a_requeued_element_is_told_from_one_that_comes_for_the_first_time(
    here: Workplace,
) -> None:
    job = here.job()
    job = replace(job, intent=replace(job.intent, elements=3))
    job.open_ledger().claim_intent(job.intent)
    assert started(job, element(0)) is None
    assert started(job, element(0, restart_count=1)) is ExitCode.RESUME
    # Slurm took it back before its script began: it has not been here yet.
    assert started(job, element(1, restart_count=1)) is None
    assert started(job, element(1, restart_count=2)) is ExitCode.RESUME
    assert started(job, element(2)) is None


@pytest.mark.s3
def test_no_element_of_a_void_attempt_passes(here: Workplace) -> None:
    job = here.job()
    job = replace(job, intent=replace(job.intent, elements=2))
    job.open_ledger().claim_intent(job.intent)
    job.open_ledger().claim_start(job.intent, a_start(job, job_id=None))
    assert [started(job, element(number)) for number in (0, 1)] == [ExitCode.FENCED] * 2
    assert not here.attempt(job).elements


def test_an_element_knows_its_array_and_its_number() -> None:
    by_slurm = {
        "SLURM_JOB_ID": "9",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_JOB_NODELIST": "n4",
    }
    found = Placement.from_environment(by_slurm)
    assert found == Placement(job_id="7", restart_count=0, nodes=("n4",), element=2)
