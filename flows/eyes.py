"""What Prefect shows of a run: each attempt is a task run of its own, red or green with its reason.

The loop acts, Prefect only looks: nothing here makes the loop wait for Prefect's server, and a
server that is away for an hour costs no attempt. So every call puts a note into a queue, and the
task of the attempt, in a thread of its own, does the talking.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType
from typing import Any, Self, cast
from uuid import UUID

import httpx
from prefect import task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import PrefectException
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Crashed, Failed

from flows.names import attempt_title, end_text, is_stopped, is_success, progress_text
from storage.attempts import Attempt
from storage.records import Stage, StageRecord
from tasks.report import summary

CANCEL_POLL_S = 5.0
TALK_EVERY_S = 2.0
LOG_PROGRESS_EVERY_S = 30.0
LINES_AT_ONCE = 200
ENDING_STATES = frozenset({StateType.CANCELLING, StateType.CANCELLED})


Progress = tuple[int, Mapping[str, float]]
Note = Attempt | list[str] | Progress | None
"""A closed attempt ends its task run, and so does None: the flow ended first. A list is lines of
log, a pair is a step and its numbers."""


class AttemptNotes:
    """What the loop has told of one attempt, and nobody has shown yet."""

    def __init__(self, attempt: Attempt, *, total_steps: int | None) -> None:
        self.attempt = attempt
        self.total_steps = total_steps
        self._queue: queue.SimpleQueue[Note] = queue.SimpleQueue()
        self._ended = threading.Event()

    def tell(self, note: Note) -> None:
        self._queue.put(note)
        if note is None or isinstance(note, Attempt):
            self._ended.set()

    def take(self) -> Iterator[Note]:
        """Waits for a note, then gives all there are."""
        yield self._queue.get()
        while not self._queue.empty():
            yield self._queue.get()

    def rest(self) -> None:
        """A pause between two batches, cut short by the end."""
        self._ended.wait(TALK_EVERY_S)


class _Voice:
    """Says an attempt's notes in its task run: lines in batches, progress now and then."""

    def __init__(self, notes: AttemptNotes) -> None:
        self._notes = notes
        self._logger = get_run_logger()
        self._lines: list[str] = []
        self._progress: Progress | None = None
        self._artifact: UUID | None = None
        self._logged_progress_at = 0.0

    def hear(self, note: list[str] | Progress) -> None:
        if isinstance(note, list):
            self._lines += note
        else:
            self._progress = note

    def speak(self) -> None:
        if self._lines:
            left_out = len(self._lines) - LINES_AT_ONCE
            shown = self._lines[-LINES_AT_ONCE:]
            if left_out > 0:
                shown.insert(
                    0, f"… {left_out} lines left out; the whole log is in the run's folder"
                )
            self._logger.info("\n".join(shown))
            self._lines = []
        if self._progress is not None:
            self._show_progress(*self._progress)
            self._progress = None

    def _show_progress(self, step: int, numbers: Mapping[str, float]) -> None:
        total = self._notes.total_steps
        text = progress_text(step, numbers, total=total)
        if time.monotonic() - self._logged_progress_at > LOG_PROGRESS_EVERY_S:
            self._logged_progress_at = time.monotonic()
            self._logger.info(text)
        if total is not None:
            title = attempt_title(self._notes.attempt)
            self._show_artifact(100 * step / total, f"{title}: {text}")

    def _show_artifact(self, percent: float, description: str) -> None:
        intent = self._notes.attempt.intent
        percent = min(100.0, percent)
        try:
            if self._artifact is None:
                # In a thread without a loop it returns what it made, and no coroutine.
                self._artifact = cast(
                    "UUID",
                    create_progress_artifact(
                        progress=percent,
                        key=f"{intent.run}-{intent.stage.value}",
                        description=description,
                    ),
                )
            else:
                update_progress_artifact(
                    artifact_id=self._artifact, progress=percent, description=description
                )
        except (httpx.HTTPError, PrefectException) as error:
            self._logger.warning(f"no progress shown: {error}")


@task(name="attempt", cache_policy=NO_CACHE, persist_result=False)
def show_attempt(notes: AttemptNotes) -> State[Any]:
    """Shows what becomes of one attempt, and ends as it ended."""
    voice = _Voice(notes)
    while True:
        for note in notes.take():
            if note is None or isinstance(note, Attempt):
                voice.speak()
                return final_state(note)
            voice.hear(note)
        voice.speak()
        notes.rest()


@task(name="stage", cache_policy=NO_CACHE, persist_result=False)
def show_skipped_stage(message: str) -> State[Any]:
    """A stage that an earlier engine finished."""
    return Completed(name="Cached", message=message)


class PrefectEyes:
    """Shows one run in the flow run that this thread is in. Use it as a context manager."""

    def __init__(self, *, total_steps: Mapping[Stage, int], report: str) -> None:
        self._total_steps = total_steps
        self._report = report
        self._logger = get_run_logger()
        self._flow_run = UUID(flow_run.id)
        self._notes: dict[tuple[Stage, int], AttemptNotes] = {}
        self._futures: list[PrefectFuture[Any]] = []
        self._cancelled = threading.Event()
        self._left = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="cancel-poller", daemon=True)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="report-writer")

    def __enter__(self) -> Self:
        self._close_leftovers()
        self._poller.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._left.set()
        for notes in self._notes.values():
            notes.tell(None)
        for future in self._futures:
            future.wait()
        self._writer.shutdown()

    def show_report(self, markdown: str, *, run: str) -> None:
        """The run's report as an artifact; written in the background, in the order of the calls."""
        self._writer.submit(copy_context().run, self._write_report, markdown, run)

    def stage_started(self, stage: Stage, units: Sequence[str]) -> None:
        self._logger.info(f"{stage.value}: {len(units)} to run: {', '.join(units[:8])}")

    def stage_skipped(self, record: StageRecord) -> None:
        message = f"finished {record.at:%Y-%m-%d %H:%M} UTC: {summary(record)}; {self._report}"
        named = show_skipped_stage.with_options(task_run_name=f"{record.stage.value} · finished")
        self._futures.append(named.submit(message))

    def stage_finished(self, record: StageRecord) -> None:
        self._logger.info(f"{record.stage.value}: {summary(record)}")

    def attempt_opened(self, attempt: Attempt) -> None:
        stage = attempt.intent.stage
        if (stage, attempt.number) in self._notes:
            return
        notes = AttemptNotes(attempt, total_steps=self._total_steps.get(stage))
        self._notes[(stage, attempt.number)] = notes
        named = show_attempt.with_options(task_run_name=attempt_title(attempt))
        self._futures.append(named.submit(notes))

    def attempt_state(self, attempt: Attempt, *, state: str, detail: str) -> None:
        self._tell(attempt, [f"{state}: {detail}" if detail else state])

    def attempt_progress(
        self, attempt: Attempt, *, step: int, numbers: Mapping[str, float]
    ) -> None:
        self._tell(attempt, (step, dict(numbers)))

    def attempt_log(self, attempt: Attempt, lines: Sequence[str]) -> None:
        self._tell(attempt, list(lines))

    def attempt_closed(self, attempt: Attempt) -> None:
        self.attempt_opened(attempt)
        self._notes.pop((attempt.intent.stage, attempt.number)).tell(attempt)

    def say(self, message: str) -> None:
        self._logger.info(message)

    def cancel_requested(self) -> bool:
        return self._cancelled.is_set()

    def leave_requested(self) -> bool:
        return False

    def _tell(self, attempt: Attempt, note: list[str] | Progress) -> None:
        notes = self._notes.get((attempt.intent.stage, attempt.number))
        if notes is not None:
            notes.tell(note)

    def _poll(self) -> None:
        """Watches the flow run's own state: hooks for cancelling do not run in every case."""
        while not self._left.wait(CANCEL_POLL_S):
            try:
                with get_client(sync_client=True) as client:
                    state = client.read_flow_run(self._flow_run).state
            except (httpx.HTTPError, PrefectException) as error:
                self._logger.debug(f"cannot ask for cancellation: {error}")
                continue
            if state is not None and state.type in ENDING_STATES:
                self._cancelled.set()
                return

    def _write_report(self, markdown: str, run: str) -> None:
        try:
            create_markdown_artifact(markdown, key=f"{run}-report", description=f"Run {run}")
        except (httpx.HTTPError, PrefectException) as error:
            self._logger.warning(f"no report shown: {error}")

    def _close_leftovers(self) -> None:
        """Task runs that a killed engine of this flow run left Running would never end."""
        with get_client(sync_client=True) as client:
            runs = client.read_task_runs(
                flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [self._flow_run]}}),
                task_run_filter=TaskRunFilter.model_validate(
                    {"state": {"type": {"any_": [StateType.RUNNING, StateType.PENDING]}}}
                ),
            )
            for run in runs:
                lost: State[Any] = Crashed(
                    message="its engine was lost; another one took the attempt over"
                )
                client.set_task_run_state(run.id, lost, force=True)


def final_state(attempt: Attempt | None) -> State[Any]:
    """How the task run of a closed attempt ends.

    Made by the task itself: Prefect drops a state that is older than the one before it.
    """
    if attempt is None:
        return Crashed(message="the flow ended before the attempt; its job goes on")
    if is_success(attempt):
        return Completed(message=end_text(attempt))
    if is_stopped(attempt):
        return Cancelled(message=end_text(attempt))
    return Failed(message=end_text(attempt))
