"""A plan says what would happen, and makes nothing happen; the commands print it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import headrace
from flows.home import Home
from flows.loading import load_spec
from flows.opening import open_run
from flows.planning import plan_run
from flows.server import stop_server
from flows.spec import PipelineSpec
from flows.steps import run_stages
from flows.watchers import AllEyes
from storage import embedded
from storage.errors import SpecError
from storage.records import Stage
from tasks.last_word import Standing, last_word


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "docs").mkdir()
    for number in range(3):
        (folder / "docs" / f"{number}.txt").write_text(f"document {number} " * 300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_HOME", str(folder / "home"))
        patch.chdir(folder)
        yield folder
        stop_server(Home(folder=folder / "home"))


TRAIN = {
    "steps": 10,
    "sequence": 16,
    "global_batch": 8,
    "micro_batch": 2,
    "schedule": {"warmup_steps": 1},
}


def write(folder: Path, name: str = "spec", **blocks: Any) -> Path:
    path = folder / f"{name}.yaml"
    fields = {
        "run": name,
        "workdir": "work",
        "data": {"inputs": ["docs/*.txt"], "validation_fraction": 0.3},
        "train": TRAIN,
        "retry": {"heartbeat_s": 1.0},
    }
    path.write_text(yaml.safe_dump(fields | blocks))
    return path


def command(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        headrace.command(*map(str, arguments)),
        cwd=folder,
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_plan_shows_every_job_and_leaves_nothing_behind(folder: Path) -> None:
    spec = load_spec(write(folder, "nothing", workdir="untouched", cluster={"nodes": 2}))
    plan = plan_run(spec)
    assert not (folder / "untouched").exists()
    assert [one.stage for one in plan.stages] == list(Stage)
    assert not any(one.skipped for one in plan.stages)
    assert plan.notes == ("The embedded store is not running, so nothing counts as finished here.",)
    names = {one.stage: [unit.name for unit in one.units] for one in plan.stages}
    assert names[Stage.VALIDATE] == ["probe-local1", "probe-local2"]
    assert names[Stage.SMOKE] == ["rung-1", "rung-2"]
    for stage in plan.stages:
        job = folder / "untouched" / "nothing" / stage.stage / "0001" / "job.json"
        assert f"-m slurm.batch {job}" in stage.script
    (sums,) = plan.sums
    assert (sums.world_size, sums.tokens_per_step, sums.total_tokens) == (2, 128, 1280)
    assert sums.micro_batches_per_step == 2


def test_a_plan_for_slurm_needs_no_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    cluster = {"kind": "slurm", "nodes": 4, "partition": "gpu", "account": "me"}
    store = {"embedded": {"host": "10.99.0.1"}}
    plan = plan_run(load_spec(write(folder, "far", cluster=cluster, store=store)))
    assert any("does not say which nodes it has" in note for note in plan.notes)
    train = next(one for one in plan.stages if one.stage is Stage.TRAIN)
    assert "#SBATCH --nodes=4" in train.script
    assert "#SBATCH --partition=gpu" in train.script
    assert "#SBATCH --account=me" in train.script


def test_a_plan_for_a_range_of_nodes_shows_both_ends_and_what_does_not_fit_between(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(folder, "range", cluster={"nodes": "1-3", "ranks_per_node": 2})
    plan = plan_run(load_spec(path))
    assert [(one.world_size, one.micro_batches_per_step) for one in plan.sums] == [(2, 2), (6, 1)]
    assert any(note.startswith("On 3 nodes 33% of each step is padding") for note in plan.notes)
    names = [unit.name for one in plan.stages if one.stage is Stage.SMOKE for unit in one.units]
    assert names == ["rung-1", "rung-2", "rung-3"]
    told = command(folder, "plan", path).stdout
    assert re.search("ranks +│ 2 = 1 nodes × 2 +│ 6 = 3 nodes × 2 +│", told)
    assert re.search("│ 2 of 2 sequences +│ 1 of 2 sequences, of which 33.3% is padding │", told)
    assert "job train: trainer.main, 1-3 × 2 ranks" in told

    monkeypatch.setenv("PATH", "/nonexistent")
    cluster = {"kind": "slurm", "nodes": "1-3"}
    far = write(folder, "range", cluster=cluster, store={"embedded": {"host": "10.99.0.1"}})
    train = next(one for one in plan_run(load_spec(far)).stages if one.stage is Stage.TRAIN)
    assert "#SBATCH --nodes=1-3" in train.script


def test_inputs_that_match_nothing_are_told_before_anything_is_queued(folder: Path) -> None:
    path = write(folder, "empty", data={"inputs": ["gone/*.txt"]})
    line = 1 + path.read_text().splitlines().index("  inputs:")
    for name in ("plan", "run"):
        told = command(folder, name, path)
        assert told.returncode == 2, name
        (message,) = told.stderr.splitlines()
        assert message.startswith(f"{path}:{line}: data.inputs: data.inputs[0] ")
        assert "gone/*.txt' matches no file" in message
    assert Home(folder=folder / "home").read_record() is None, "a Prefect server was started"


def test_a_model_that_its_tokenizer_does_not_fit_is_told_where_it_stands(folder: Path) -> None:
    path = write(folder, "small")
    path.write_text(path.read_text().replace("train:\n", "train:\n  model:\n    vocab: 64\n"))
    line = 1 + path.read_text().splitlines().index("    vocab: 64")
    told = command(folder, "run", path)
    assert told.returncode == 2
    assert told.stderr.startswith(f"{path}:{line}: train.model.vocab: ")


@pytest.mark.s3
def test_a_flow_begins_nothing_when_inputs_match_nothing(folder: Path) -> None:
    spec = load_spec(write(folder, "empty-flow", data={"inputs": ["gone/*.txt"]}))
    server = embedded.store_of(spec.store, workdir=spec.workdir)
    assert server is not None
    try:
        with open_run(spec, eyes=AllEyes()) as context:
            with pytest.raises(SpecError, match=r"data\.inputs\[0\]"):
                run_stages(context, spec, tuple(Stage))
            assert context.ledger.attempts(Stage.VALIDATE) == ()
    finally:
        server.stop()


@pytest.mark.s3
def test_a_stage_that_fails_before_its_first_attempt_leaves_its_reason(folder: Path) -> None:
    spec = load_spec(write(folder, "no-node", validation={"nodes": ["nowhere"]}))
    server = embedded.store_of(spec.store, workdir=spec.workdir)
    assert server is not None
    try:
        with open_run(spec, eyes=AllEyes()) as context:
            with pytest.raises(SpecError, match="nowhere"):
                run_stages(context, spec, tuple(Stage))
            assert context.ledger.attempts(Stage.VALIDATE) == ()
            refusal = context.ledger.refusal(Stage.VALIDATE)
        word = last_word((), record=None, refusal=refusal)
        assert word.standing is Standing.GAVE_UP
        assert "nowhere" in word.reason
    finally:
        server.stop()


@pytest.mark.s3
def test_a_change_that_needs_another_run_is_refused_before_a_flow_is_begun(folder: Path) -> None:
    path = write(folder, "changed")
    spec = load_spec(path)
    server = embedded.store_of(spec.store, workdir=spec.workdir)
    assert server is not None
    try:
        with open_run(spec, eyes=AllEyes()):
            pass
        told = command(folder, "run", write(folder, "changed", train={"seed": 7}))
        assert told.returncode == 2
        assert "must not change in mid-run" in told.stderr
        assert "train.seed" in told.stderr
        assert Home(folder=folder / "home").read_record() is None, "a Prefect server was started"
    finally:
        server.stop()


@pytest.mark.s3
def test_what_is_finished_would_be_skipped_and_is_shown_by_name(folder: Path) -> None:
    path = write(folder, "done")
    spec: PipelineSpec = load_spec(path)
    server = embedded.store_of(spec.store, workdir=spec.workdir)
    assert server is not None
    try:
        with open_run(spec, eyes=AllEyes()) as context:
            run_stages(context, spec, [Stage.SHARD])
        plan = plan_run(spec)
        assert plan.notes == ()
        assert [one.stage for one in plan.stages if one.skipped] == [Stage.SHARD]
        (shard,) = (one for one in plan.stages if one.skipped)
        assert shard.because.endswith("of 3 documents")

        told = command(folder, "plan", path)
        assert told.returncode == 0, told.stderr
        assert "shard would be skipped: finished" in told.stdout
        assert "train would run: nothing finished" in told.stdout
        assert "-m slurm.batch" in told.stdout

        other = write(folder, "done", train=TRAIN | {"log_every_steps": 3})
        told = command(folder, "plan", other)
        assert "changed since the run began: train.log_every_steps: 10 -> 3" in told.stdout
        other = write(folder, "done", train=TRAIN | {"seed": 3})
        told = command(folder, "plan", other)
        assert told.returncode == 2, told.stdout
        assert "train.seed: 0 -> 3" in told.stderr
        write(folder, "done")

        told = command(folder, "status", "done")
        assert told.returncode == 0, told.stderr
        assert re.search("│ shard +│ finished +│", told.stdout)
        assert "● shard · attempt 1 (job " in told.stdout
        told = command(folder, "store", "status", path)
        assert told.stdout.startswith("The embedded store runs as process")
        assert command(folder, "store", "stop", path).returncode == 0
        assert server.status().running is False
    finally:
        server.stop()


def test_a_run_that_nobody_started_is_no_traceback(folder: Path) -> None:
    told = command(folder, "status", "unheard-of")
    assert told.returncode == 2
    assert told.stderr.startswith("run 'unheard-of' was never started from here")


def test_a_run_that_another_version_kept_asks_for_its_file(folder: Path) -> None:
    Home(folder=folder / "home").remember_run("old", '{"run": "old", "gone": 1}')
    told = command(folder, "status", "old")
    assert told.returncode == 2
    assert "--spec" in told.stderr


def test_the_parameters_of_a_deployment_are_printed_as_json(folder: Path) -> None:
    path = write(folder, "json")
    parameters = json.loads(command(folder, "spec", path).stdout)
    assert PipelineSpec.model_validate(parameters["spec"]) == load_spec(path)
    assert set(parameters) == {"spec"}


def test_a_store_of_ones_own_is_not_ours_to_stop(folder: Path) -> None:
    path = write(folder, "own", store={"endpoint_url": "http://127.0.0.1:1"})
    told = command(folder, "store", "stop", path)
    assert told.returncode == 2
    assert "http://127.0.0.1:1" in told.stderr
