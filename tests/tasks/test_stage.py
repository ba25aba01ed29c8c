"""What lets a stage be skipped, and what does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from slurm.cluster import Cluster
from slurm.snapshot import Snapshot
from slurm.spec import ClusterSpec, RetrySpec
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.records import Stage, StageRecord
from storage.spec import StoreSpec
from tasks.context import RunContext
from tasks.engine import Engine
from tasks.eyes import Eyes
from tasks.stage import find_completed, fingerprint, run_stage
from tests.tasks.world import EPOCH, Shelf


@dataclass
class Notebook(Eyes):
    told: list[str] = field(default_factory=list)

    def stage_started(self, stage: Stage, units: Sequence[str]) -> None:
        self.told.append(f"{stage} started with {list(units)}")

    def stage_skipped(self, record: StageRecord) -> None:
        self.told.append(f"{record.stage} skipped")

    def stage_finished(self, record: StageRecord) -> None:
        self.told.append(f"{record.stage} finished")


@dataclass
class HandClock:
    """Stands still until a test moves it."""

    at: datetime = EPOCH

    def now(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return (self.at - EPOCH).total_seconds()

    def sleep(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


@dataclass
class Body:
    """A stage's body that counts how often it ran, and under which fingerprint."""

    asked: list[str] = field(default_factory=list)

    def __call__(self, asked: str) -> Mapping[str, Any]:
        self.asked.append(asked)
        return {"run": len(self.asked), "folder": Path("/data")}


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def context(notebook: Notebook) -> RunContext:
    ledger = Ledger(cast("ObjectStore", Shelf({})), RunKeys(prefix="p", run="r"))
    return RunContext(
        run="r",
        workdir=Path("/work"),
        cluster=cast("Cluster", None),
        cluster_spec=ClusterSpec(),
        retry=RetrySpec(),
        store=StoreSpec(),
        ledger=ledger,
        snapshot=Snapshot(path=Path("/code"), digest="one", git_commit=None, git_dirty=None),
        eyes=notebook,
    )


INPUTS = {"spec": RetrySpec(), "data": "id"}


def test_a_finished_stage_is_skipped_the_second_time(
    context: RunContext, notebook: Notebook
) -> None:
    body = Body()
    assert find_completed(context, Stage.SHARD, inputs=INPUTS) is None
    first = run_stage(context, Stage.SHARD, inputs=INPUTS, body=body, units=("shards",))
    second = run_stage(context, Stage.SHARD, inputs=INPUTS, body=body)
    assert second == first == find_completed(context, Stage.SHARD, inputs=INPUTS)
    assert body.asked == [f"{first.fingerprint}.0"]
    assert first.outputs == {"run": 1, "folder": "/data"}
    assert notebook.told == ["shard started with ['shards']", "shard finished", "shard skipped"]


def test_other_inputs_or_other_code_run_it_again(context: RunContext) -> None:
    body = Body()
    run_stage(context, Stage.SHARD, inputs=INPUTS, body=body)
    run_stage(context, Stage.SHARD, inputs={**INPUTS, "data": "other"}, body=body)
    fixed = replace(context, snapshot=replace(context.snapshot, digest="two"))
    run_stage(fixed, Stage.SHARD, inputs=INPUTS, body=body)
    run_stage(context, Stage.SMOKE, inputs=INPUTS, body=body)
    assert len(set(body.asked)) == 4


def test_a_forced_stage_runs_under_a_new_generation(context: RunContext) -> None:
    body = Body()
    first = run_stage(context, Stage.SHARD, inputs=INPUTS, body=body)
    forced = replace(context, forced=frozenset({Stage.SHARD}))
    assert find_completed(forced, Stage.SHARD, inputs=INPUTS) is None
    second = run_stage(forced, Stage.SHARD, inputs=INPUTS, body=body)
    assert (second.generation, second.outputs["run"]) == (1, 2)
    assert body.asked == [f"{first.fingerprint}.0", f"{first.fingerprint}.1"]
    assert run_stage(context, Stage.SHARD, inputs=INPUTS, body=body) == second


def test_an_expired_stage_runs_again(context: RunContext, clock: HandClock) -> None:
    body = Body()
    engine = Engine(clock=clock)

    def run() -> StageRecord:
        return run_stage(
            context, Stage.VALIDATE, inputs=INPUTS, body=body, expires_h=24, engine=engine
        )

    assert run().generation == 0
    clock.at += timedelta(hours=23)
    assert run().generation == 0
    clock.at += timedelta(hours=1)
    assert run().generation == 1
    assert run().generation == 1
    assert len(body.asked) == 2


def test_a_body_that_fails_leaves_no_record(context: RunContext) -> None:
    def body(asked: str) -> Mapping[str, Any]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        run_stage(context, Stage.SHARD, inputs=INPUTS, body=body)
    assert find_completed(context, Stage.SHARD, inputs=INPUTS) is None


def test_two_engines_that_finish_at_once_return_the_same_record(context: RunContext) -> None:
    def slow(asked: str) -> Mapping[str, Any]:
        run_stage(context, Stage.SHARD, inputs=INPUTS, body=lambda _: {"by": "the fast one"})
        return {"by": "the slow one"}

    record = run_stage(context, Stage.SHARD, inputs=INPUTS, body=slow)
    assert record.outputs == {"by": "the fast one"}


def test_a_fingerprint_is_of_values_and_not_of_their_order() -> None:
    assert fingerprint({"a": 1, "b": (2, 3)}) == fingerprint({"b": [2, 3], "a": 1})
    assert fingerprint(RetrySpec(unknown=1)) != fingerprint(RetrySpec(unknown=2))
    assert fingerprint("a", "b") != fingerprint("ab")
    assert fingerprint(Path("/x")) == fingerprint("/x")
    with pytest.raises(ValueError, match="JSON"):
        fingerprint(float("nan"))
