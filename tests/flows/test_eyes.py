"""Prefect shows each attempt as a task run of its own, which ends as the attempt ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, LogFilter
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import flow_run
from prefect.states import Cancelled, Cancelling, Completed, Running

from flows import eyes as eyes_module
from flows.eyes import PrefectEyes
from storage.records import Action, Kind, Stage
from tests.flows.attempts import attempt, dead_node, end, record
from tests.flows.waiting import wait_for

pytestmark = pytest.mark.usefixtures("prefect_server")


def show(body: Callable[[PrefectEyes], State[Any] | None]) -> tuple[UUID, State[Any]]:
    """Runs a flow that shows what `body` tells its eyes, and ends as it says."""
    seen: list[UUID] = []

    @flow(name="shown")
    def shown() -> State[Any]:
        seen.append(UUID(flow_run.id))
        with PrefectEyes(total_steps={Stage.TRAIN: 10}, report="report: r.md") as eyes:
            return body(eyes) or Completed(message="told")

    state = shown(return_state=True)
    return seen[0], state


def task_runs(run: UUID) -> dict[str, TaskRun]:
    """The flow run's task runs by name; their last events may still be on their way."""

    def ended() -> dict[str, TaskRun] | None:
        with get_client(sync_client=True) as client:
            found = client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [run]}))
        known = all(one.state is not None and one.state.is_final() for one in found)
        return {one.name: one for one in found} if found and known else None

    return wait_for("all task runs to have ended", ended)


def test_attempts_are_red_red_green_with_their_reasons() -> None:
    def tell(eyes: PrefectEyes) -> None:
        eyes.attempt_opened(attempt(1))
        eyes.attempt_closed(attempt(1, end=dead_node()))
        eyes.attempt_opened(attempt(2, excluded=("n3",)))
        eyes.attempt_closed(
            attempt(2, excluded=("n3",), end=end(Kind.NETWORK, Action.RESUME, reason="once more"))
        )
        eyes.attempt_opened(attempt(3))
        eyes.attempt_closed(attempt(3, end=end()))
        eyes.attempt_closed(attempt(4, end=end(Kind.OPERATOR, Action.STOP, reason="asked")))

    run, state = show(tell)
    assert state.is_completed()
    states = {name: one.state for name, one in task_runs(run).items()}
    assert {name: one.type.value for name, one in states.items()} == {
        "train · attempt 1": "FAILED",
        "train · attempt 2 · again · without n3": "FAILED",
        "train · attempt 3 · again": "COMPLETED",
        "train · attempt 4 · again": "CANCELLED",
    }
    assert (
        states["train · attempt 1"].message
        == "hardware on n3: NODE_FAIL → retry elsewhere (node n3 is excluded)"
    )


def test_a_finished_stage_is_shown_as_cached() -> None:
    run, _ = show(lambda eyes: eyes.stage_skipped(record(Stage.SHARD, tokens=5, documents=1)))
    (shown,) = task_runs(run).values()
    assert shown.name == "shard · finished"
    assert shown.state_name == "Cached"
    assert shown.state.message.endswith("5 tokens of 1 documents; report: r.md")


def test_an_attempt_that_outlives_its_flow_does_not_stay_running() -> None:
    run, _ = show(lambda eyes: eyes.attempt_opened(attempt(1)))
    assert task_runs(run)["train · attempt 1"].state_name == "Crashed"


def test_an_error_in_the_loop_ends_the_flow_and_nothing_hangs() -> None:
    def fail(eyes: PrefectEyes) -> None:
        eyes.attempt_opened(attempt(1))
        raise RuntimeError("a bug")

    run, state = show(fail)
    assert state.is_failed()
    assert task_runs(run)["train · attempt 1"].state_name == "Crashed"


def test_log_lines_come_in_batches_and_a_flood_is_cut() -> None:
    def tell(eyes: PrefectEyes) -> None:
        eyes.attempt_opened(attempt(1))
        for number in range(1000):
            eyes.attempt_log(attempt(1), [f"line {number}"])
        eyes.attempt_closed(attempt(1, end=end()))

    run, _ = show(tell)
    shown = task_runs(run)["train · attempt 1"]

    def logged() -> str | None:
        with get_client(sync_client=True) as client:
            logs = client.read_logs(LogFilter(task_run_id={"any_": [shown.id]}))
        text = "\n".join(one.message for one in logs)
        return text if "line 999" in text else None

    text = wait_for("the last line of the log", logged)
    assert "lines left out" in text
    assert text.count("line ") <= 2 * eyes_module.LINES_AT_ONCE


def test_progress_and_report_are_artifacts_of_the_run() -> None:
    def tell(eyes: PrefectEyes) -> None:
        eyes.attempt_opened(attempt(1, run="seen"))
        eyes.attempt_progress(attempt(1, run="seen"), step=4, numbers={"loss": 2.5})
        eyes.attempt_closed(attempt(1, run="seen", end=end()))
        eyes.show_report("# one", run="seen")
        eyes.show_report("# two", run="seen")

    run, _ = show(tell)
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id={"any_": [run]}))
    by_key = {one.key: one for one in sorted(found, key=lambda one: one.created)}
    assert by_key["seen-report"].data == "# two"
    assert by_key["seen-train"].data == 40.0
    assert "step 4 of 10 · loss 2.5" in by_key["seen-train"].description


def test_a_person_who_cancels_in_prefect_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eyes_module, "CANCEL_POLL_S", 0.1)

    def tell(eyes: PrefectEyes) -> State[Any]:
        assert eyes.cancel_requested() is False
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(flow_run.id), Cancelling(), force=True)
        wait_for("the cancellation to be heard", eyes.cancel_requested)
        return Cancelled(message="as asked")

    _, state = show(tell)
    assert state.is_cancelled()


def test_task_runs_of_a_killed_engine_are_closed_by_the_next_one() -> None:
    @task(name="left")
    def left() -> None:
        return

    def show_twice(eyes: PrefectEyes) -> None:
        left()
        run = UUID(flow_run.id)

        def reset() -> bool:
            with get_client(sync_client=True) as client:
                found = client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [run]}))
                if not found:
                    return False
                client.set_task_run_state(found[0].id, Running(), force=True)
            return True

        wait_for("the task run to be known", reset)
        with PrefectEyes(total_steps={}, report=""):
            pass

    run, _ = show(show_twice)
    (shown,) = task_runs(run).values()
    assert shown.state_name == "Crashed"
    assert "its engine was lost" in shown.state.message
