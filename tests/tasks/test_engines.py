"""Real engines, real jobs, a real store: two at once, and one that is killed."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.spec import ClusterSpec
from storage.embedded import EmbeddedStore, resolved
from storage.spec import StoreSpec
from tests.tasks.engine_process import STAGE, EngineProcess, Task, told

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSpec]:
    directory = tmp_path_factory.mktemp("engines-store")
    server = EmbeddedStore(directory=directory, host="127.0.0.1", bucket="headrace")
    try:
        yield resolved(StoreSpec(), server.ensure())
    finally:
        server.stop()


@pytest.fixture
def task(store: StoreSpec, tmp_path: Path) -> Iterator[Task]:
    made = Task(
        run=f"engines-{secrets.token_hex(4)}",
        workdir=tmp_path,
        store=store,
        cluster=ClusterSpec(kind="local", nodes=2),
    )
    yield made
    made.let_jobs_end()


def test_two_engines_on_one_run_let_one_job_an_attempt_pass_the_start(task: Task) -> None:
    engines = [EngineProcess(task), EngineProcess(task)]
    task.wait_for_work()
    task.let_jobs_end()
    first, second = (engine.wait() for engine in engines)
    assert first[-1]["result"] == second[-1]["result"]
    attempts = task.open_ledger().attempts(STAGE)
    assert all(attempt.end is not None for attempt in attempts)
    assert task.jobs_past_the_start() == {first[-1]["result"]["attempt"]: 1}


def test_the_job_of_a_killed_engine_is_adopted_by_the_next(task: Task) -> None:
    killed = EngineProcess(task)
    task.wait_for_work()
    killed.kill()
    engine = EngineProcess(task)
    task.let_jobs_end()
    lines = engine.wait()
    assert lines[-1]["result"]["attempt"] == 1
    assert list(told(lines, "opened")) == [1]
    assert list(told(lines, "closed")) == [1]
    assert "the work has begun" in told(lines, "log")
    assert task.jobs_past_the_start() == {1: 1}
    assert len(task.open_ledger().attempts(STAGE)) == 1
