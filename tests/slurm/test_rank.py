"""What a rank's error becomes: a code, and words that fit into a record."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from slurm.job_logs import srun_log
from slurm.peers import Loss
from slurm.rank import (
    ERROR_CHARACTERS,
    _another_failed_first,
    _record_silence,
    error_text,
    exit_code_of,
    run_rank,
    watched,
)
from storage.errors import CheckpointError, DataError, ObjectMissing, SpecError, StoreError
from storage.job import JobContext, JobExit
from storage.records import ExitCode
from tests.ranks import ALONE
from tests.slurm.jobs import Workplace

ROOT = Path(__file__).resolve().parents[2]
RANK_1 = replace(ALONE, rank=1, world_size=2, local_rank=1)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (JobExit(ExitCode.DIVERGED, "loss is nan"), ExitCode.DIVERGED),
        (SpecError("x"), ExitCode.BAD_CONFIG),
        (DataError("x"), ExitCode.BAD_DATA),
        (StoreError("x"), ExitCode.STORAGE),
        (ObjectMissing("x"), ExitCode.STORAGE),
        (CheckpointError("x"), ExitCode.NO_CHECKPOINT),
        (MemoryError(), ExitCode.OUT_OF_MEMORY),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), ExitCode.OUT_OF_MEMORY),
        (RuntimeError("anything else"), ExitCode.CRASHED),
        (SystemExit(0), ExitCode.CRASHED),
        (KeyboardInterrupt(), ExitCode.CRASHED),
    ],
)
def test_each_kind_of_error_has_its_code(error: BaseException, code: ExitCode) -> None:
    assert exit_code_of(error) is code


def test_the_words_of_an_error_are_bounded_and_keep_both_ends() -> None:
    try:
        raise ValueError("begin " + "x" * 100_000 + " end")
    except ValueError as error:
        text = error_text(error)
    assert len(text) < ERROR_CHARACTERS + 100
    assert text.startswith("Traceback (most recent call last)")
    assert text.endswith(" end")


@pytest.mark.s3
def test_an_entry_that_cannot_be_imported_comes_out(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process does not end here, as a rank would.
    monkeypatch.setattr("slurm.rank.watched", nullcontext)
    job = replace(here.job(), entry="no.such.module")
    job.folder.mkdir(parents=True)
    assert run_rank(job, RANK_1) == ExitCode.CRASHED
    job.open_ledger().claim_intent(job.intent)
    word = here.exit(job)
    assert (word.code, word.rank, word.node) == (ExitCode.CRASHED, 1, "n1")
    assert "ModuleNotFoundError: No module named 'no'" in word.error


def test_a_rank_that_srun_ends_because_of_another_leaves_the_word_to_it(here: Workplace) -> None:
    job = here.job()
    job.folder.mkdir(parents=True)
    assert not _another_failed_first(job, RANK_1)
    srun_log(job.folder).write_text("srun: error: n1: task 1: Exited with exit code 1\n")
    assert not _another_failed_first(job, RANK_1)
    srun_log(job.folder).write_text("srun: error: n1: task 0: Killed\n")
    assert _another_failed_first(job, RANK_1)


@pytest.mark.s3
def test_a_node_that_fell_silent_is_written_down(
    here: Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    job = here.job()
    job.open_ledger().claim_intent(job.intent)
    _record_silence(JobContext(job, RANK_1), Loss(text="n2 is gone", blamed_nodes=("n2",)))
    word = here.exit(job)
    assert (word.code, word.rank, word.node) == (ExitCode.PEER_LOST, 1, "n1")
    assert (word.error, word.blamed_nodes) == ("n2 is gone", ("n2",))
    assert "test_a_node_that_fell_silent" in capfd.readouterr().err, "the stacks"


@pytest.mark.s3
def test_the_first_rank_of_a_node_tells_where_it_listens(here: Workplace) -> None:
    job = here.job(nodes=2, ranks=1)
    first = replace(ALONE, world_size=2, nodes=("n1", "n2"))
    context = JobContext(job, first)
    assert context.address_of("n1") == ""
    with watched(context), context:
        assert context.listens_at.startswith("127.0.0.1:")
        assert JobContext(job, RANK_1).address_of("n1") == context.listens_at


@pytest.mark.s3
def test_a_rank_without_peers_is_not_watched(here: Workplace) -> None:
    context = JobContext(here.job(ranks=1), ALONE)
    with watched(context):
        assert context.peers is None


@pytest.mark.parametrize("module", ["slurm.batch", "slurm.rank", "slurm.sidecar_work"])
def test_what_runs_first_in_a_job_loads_nothing_heavy(module: str) -> None:
    program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    shown = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, cwd=ROOT, text=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(shown.stdout)}
    assert not loaded & {"torch", "prefect", "submitit", "numpy", "flows", "tasks", "trainer"}
