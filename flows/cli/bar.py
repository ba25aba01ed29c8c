"""How far the reading of a checkpoint is: for who waits at a terminal, and for a log."""

from __future__ import annotations

import time

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from flows.cli.checkpoint_tables import spell_bytes


class Bar:
    """Bytes done of so many: a bar at a terminal, a line now and then elsewhere."""

    EVERY_S = 30.0

    def __init__(self, title: str) -> None:
        self._console = Console(stderr=True)
        self._title = title
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(escape(title), total=None)
        self._told_at_s = time.monotonic()

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def advance(self, size_bytes: int) -> None:
        self._progress.advance(self._task, size_bytes)
        now_s = time.monotonic()
        if self._console.is_terminal or now_s - self._told_at_s < self.EVERY_S:
            return
        self._told_at_s = now_s
        task = self._progress.tasks[0]
        total = "" if task.total is None else f" of {spell_bytes(int(task.total))}"
        typer.echo(f"{self._title}: {spell_bytes(int(task.completed))}{total}", err=True)
