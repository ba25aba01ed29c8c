"""What a terminal shows of a run: stage by stage, with a bar for whatever counts steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from flows.names import attempt_title, end_text, is_stopped, is_success, progress_text, short_list
from flows.watchers import AllEyes
from storage.attempts import Attempt
from storage.records import Stage, StageRecord
from tasks.last_word import is_passed
from tasks.report import summary

BARS_SHOWN = 8
PRINT_EVERY_S = 30.0

_Key = tuple[Stage, int]


class ConsoleEyes:
    """Shows one run. Use it as a context manager; without a terminal it prints plain lines."""

    def __init__(self, console: Console, *, total_steps: Mapping[Stage, int]) -> None:
        self._console = console
        self._total_steps = total_steps
        self._progress = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[told]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bars: dict[_Key, TaskID] = {}
        self._states: dict[_Key, str] = {}
        self._printed_at_s: dict[_Key, float] = {}
        self._started_s = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the terminal as it was found."""
        self._progress.stop()

    def stage_started(self, stage: Stage, units: Sequence[str]) -> None:
        self._started_s = time.monotonic()
        told = f": {short_list(tuple(units))}" if len(units) > 1 else ""
        self._print(f"[bold cyan]▶ {stage.value}[/]{escape(told)}")

    def stage_skipped(self, record: StageRecord) -> None:
        when = f"finished {record.at:%Y-%m-%d %H:%M} UTC"
        self._print(f"[bold green]✓ {record.stage.value}[/] {when}: {escape(summary(record))}")

    def stage_finished(self, record: StageRecord) -> None:
        took = f"{time.monotonic() - self._started_s:.1f} s"
        mark = "[bold green]✓" if is_passed(record) else "[bold red]✗"
        self._print(f"{mark} {record.stage.value}[/] in {took}: {escape(summary(record))}")

    def attempt_opened(self, attempt: Attempt) -> None:
        key = _key(attempt)
        if key in self._bars:
            return
        total = self._total_steps.get(attempt.intent.stage)
        self._bars[key] = self._progress.add_task(
            escape(attempt_title(attempt)),
            total=total,
            told="submitting",
            visible=len(self._bars) < BARS_SHOWN,
        )

    def attempt_state(self, attempt: Attempt, *, state: str, detail: str) -> None:
        self._tell(attempt, state if state == "running" else f"{state} {detail}".strip())
        if not self._console.is_terminal and self._states.get(_key(attempt)) != state:
            self._states[_key(attempt)] = state
            self._print(f"  {escape(attempt_title(attempt))}: {escape(f'{state} {detail}')}")

    def attempt_progress(
        self, attempt: Attempt, *, step: int, numbers: Mapping[str, float]
    ) -> None:
        total = self._total_steps.get(attempt.intent.stage)
        text = progress_text(step, numbers, total=total)
        self._tell(attempt, text, completed=step)
        if not self._console.is_terminal:
            self._print_progress(attempt, text)

    def attempt_log(self, attempt: Attempt, lines: Sequence[str]) -> None:
        """A terminal has no room for them; the eyes of Prefect and the run's folder have."""
        del attempt, lines

    def attempt_closed(self, attempt: Attempt) -> None:
        bar = self._bars.pop(_key(attempt), None)
        if bar is not None:
            self._progress.remove_task(bar)
        if is_success(attempt):
            mark = "[green]●[/]"
        elif is_stopped(attempt):
            mark = "[yellow]●[/]"
        else:
            mark = "[red]●[/]"
        self._print(f"  {mark} {escape(attempt_title(attempt))}: {escape(end_text(attempt))}")

    def say(self, message: str) -> None:
        self._print(escape(message))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The terminal is somebody else's during the block, as for a question."""
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()

    def cancel_requested(self) -> bool:
        return False

    def leave_requested(self) -> bool:
        return False

    def _tell(self, attempt: Attempt, told: str, *, completed: int | None = None) -> None:
        bar = self._bars.get(_key(attempt))
        if bar is not None:
            self._progress.update(bar, told=escape(told), completed=completed)

    def _print_progress(self, attempt: Attempt, text: str) -> None:
        """A line now and then: a file has no bar that moves."""
        now_s = time.monotonic()
        if now_s - self._printed_at_s.get(_key(attempt), -math.inf) >= PRINT_EVERY_S:
            self._printed_at_s[_key(attempt)] = now_s
            self._print(f"  {escape(attempt_title(attempt))}: {escape(text)}")

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


class Lines(AllEyes):
    """What is new in a run, as lines to be printed later, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.has_news = False

    def stage_finished(self, record: StageRecord) -> None:
        verdict = "finished" if is_passed(record) else "refused"
        self._news(f"{record.stage}: {verdict}: {summary(record)}")

    def attempt_opened(self, attempt: Attempt) -> None:
        if attempt.submitted is None and attempt.start is None:
            self._news(f"{attempt_title(attempt)}: begun")

    def attempt_closed(self, attempt: Attempt) -> None:
        self._news(f"{attempt_title(attempt)}: {end_text(attempt)}")

    def say(self, message: str) -> None:
        self.said.append(message)

    def _news(self, line: str) -> None:
        self.said.append(line)
        self.has_news = True


def _key(attempt: Attempt) -> _Key:
    return attempt.intent.stage, attempt.number
