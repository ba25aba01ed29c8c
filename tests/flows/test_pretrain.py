"""A flow carries stages out for real, and a second one finds them done."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter
from prefect.client.schemas.objects import State
from pydantic import ValidationError

from flows.pretrain import dated_spec
from flows.spec import PipelineSpec
from flows.stages import shard
from flows.watchers import AllEyes, looking_on
from storage import embedded
from storage.records import Stage, StageRecord
from tests.flows.test_eyes import task_runs

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.s3]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("flow")
    (folder / "docs").mkdir()
    for number in range(4):
        (folder / "docs" / f"{number}.txt").write_text(f"document {number} " * 200)
    spec = PipelineSpec.model_validate(
        {
            "run": "shards",
            "workdir": folder / "work",
            "store": {"embedded": {"directory": folder / "store"}},
            "data": {"inputs": [f"{folder}/docs/*.txt"], "validation_fraction": 0.2},
            "retry": {"heartbeat_s": 1.0},
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_HOME", str(folder / "home"))
        yield spec
    server = embedded.store_of(spec.store, workdir=spec.workdir)
    assert server is not None
    server.stop()


class Onlooker(AllEyes):
    """Counts what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped: list[Stage] = []
        self.finished: list[Stage] = []

    def stage_skipped(self, record: StageRecord) -> None:
        self.skipped.append(record.stage)

    def stage_finished(self, record: StageRecord) -> None:
        self.finished.append(record.stage)


def carry_out(spec: PipelineSpec, **more: Any) -> tuple[Onlooker, State[Any], UUID]:
    onlooker = Onlooker()
    with looking_on(onlooker):
        state = shard(spec, return_state=True, **more)
    assert state.state_details.flow_run_id is not None
    return onlooker, state, state.state_details.flow_run_id


def test_a_stage_is_carried_out_then_found_done_then_forced(spec: PipelineSpec) -> None:
    first, state, run = carry_out(spec)
    assert state.is_completed(), state.message
    assert state.message.endswith("of 4 documents")
    assert first.finished == [Stage.SHARD]
    assert [one.name for one in task_runs(run).values()] == ["shard · attempt 1"]
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id={"any_": [run]}))
    assert {one.key for one in found} == {"shards-report"}
    assert "| shard | finished |" in (spec.workdir / "shards" / "report.md").read_text()

    second, state, run = carry_out(spec)
    assert state.is_completed()
    assert (second.skipped, second.finished) == ([Stage.SHARD], [])
    assert [one.state_name for one in task_runs(run).values()] == ["Cached"]

    third, state, run = carry_out(spec, force=True)
    assert third.finished == [Stage.SHARD]
    assert [one.name for one in task_runs(run).values()] == ["shard · attempt 2 · again"]


def test_a_stage_that_fails_ends_its_flow_with_the_reason_and_no_traceback(
    spec: PipelineSpec,
) -> None:
    (spec.workdir.parent / "docs" / "bad.txt").write_bytes(b"\xff\xfe\xff")
    _, state, run = carry_out(spec)
    assert state.is_failed()
    assert "bad.txt" in state.message
    assert "Traceback" not in state.message
    (shown,) = task_runs(run).values()
    assert shown.state_name == "Failed"
    assert "data" in shown.state.message


def test_a_relative_folder_is_taken_from_where_serve_was_started(
    spec: PipelineSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_BASE", str(tmp_path))
    data = spec.data.model_copy(update={"inputs": ("gone/*.txt",)})
    moved = spec.renamed("moved").model_copy(update={"workdir": Path("w"), "data": data})
    _, state, _ = carry_out(moved)
    assert (tmp_path / "w" / "code").is_dir()
    assert state.is_failed()
    assert f"{tmp_path}/gone/*.txt" in state.message


def test_each_night_is_a_run_of_its_own(spec: PipelineSpec) -> None:
    night = datetime(2026, 3, 4, 1, 0, tzinfo=UTC)
    assert dated_spec(spec, night).run == "shards-20260304"
    with pytest.raises(ValidationError, match="run"):
        dated_spec(spec.renamed("a" * 48), night)
