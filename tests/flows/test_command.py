"""A run whose training script is somebody's own: its stages, its attempts and its plan."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

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
from storage.records import Action, Kind, Stage

SCRIPT = """
    import os, pathlib, sys
    saved = pathlib.Path(os.environ["HEADRACE_CHECKPOINTS"], "step")
    step = int(saved.read_text()) if saved.exists() else 0
    for step in range(step + 1, step + 6):
        print(f"step {step} loss {1 / step}", flush=True)
    saved.write_text(str(step))
    sys.exit(0 if step == 10 else 75)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("command")
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_HOME", str(folder / "home"))
        patch.chdir(folder)
        yield folder
        stop_server(Home(folder=folder / "home"))


def load(folder: Path, **blocks: Any) -> PipelineSpec:
    fields = {
        "run": "own",
        "workdir": "work",
        "cluster": {"nodes": 1, "ranks_per_node": 1},
        "command": {
            "argv": [sys.executable, "script.py"],
            "per": "rank",
            "progress": "step (?P<step>[0-9]+) loss (?P<loss>[0-9.]+)",
            "steps": 10,
        },
        # How fit this host is while it runs other tests is not asked here.
        "validation": {
            "min_memory_copy_gb_per_s": 1e-6,
            "min_matmul_gflop_per_s": 1e-6,
            "min_disk_write_mb_per_s": 1e-6,
            "timeout_s": 600,
        },
        "retry": {"heartbeat_s": 0.5, "backoff_s": 0.1},
    }
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(fields | blocks))
    return load_spec(path)


def test_a_script_of_ones_own_is_run_until_it_is_done(folder: Path) -> None:
    spec = load(folder)
    (planned,) = [one for one in plan_run(spec).stages if one.stage is Stage.TRAIN]
    assert [unit.entry for unit in planned.units] == ["trainer.command"]
    try:
        with open_run(spec, eyes=AllEyes()) as context:
            done = run_stages(context, spec, tuple(Stage))
            attempts = context.ledger.attempts(Stage.TRAIN)
    finally:
        store = embedded.store_of(spec.store, workdir=spec.workdir)
        assert store is not None
        store.stop()
    assert list(done) == [Stage.VALIDATE, Stage.TRAIN]
    assert done[Stage.TRAIN].outputs == {"final_step": 10}
    ends = [(one.end.diagnosis.kind, one.end.decision.action) for one in attempts if one.end]
    assert ends == [(Kind.TIME, Action.RESUME), (Kind.DONE, Action.DONE)]
    assert max(beat.step or 0 for beat in attempts[0].heartbeats) == 5


def test_what_a_script_of_ones_own_has_no_use_for_is_refused(folder: Path) -> None:
    with pytest.raises(SpecError, match="train means nothing to a script of your own"):
        load(folder, train={"steps": 10})
    with pytest.raises(SpecError, match=r"name the documents to train on \(data\.inputs\)"):
        load(folder, command=None)


def test_a_spec_with_a_command_means_the_same_when_it_was_stored(folder: Path) -> None:
    spec = load(folder)
    assert PipelineSpec.model_validate(spec.model_dump(mode="json")) == spec
    with pytest.raises(SpecError, match="has the stages validate, train alone"):
        run_stages(None, spec, [Stage.PRUNE])  # type: ignore[arg-type]
