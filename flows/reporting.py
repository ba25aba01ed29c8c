"""Keeps a run's report up to date while an engine works, whoever else looks on."""

from __future__ import annotations

from collections.abc import Callable

from flows.watchers import AllEyes
from storage.attempts import Attempt
from storage.errors import HeadraceError
from storage.records import Stage, StageRecord
from tasks.context import RunContext
from tasks.eyes import Eyes
from tasks.report import publish


class ReportingEyes(AllEyes):
    """Makes the report again whenever something in it has changed that is worth a look."""

    def __init__(
        self, eyes: Eyes, context: RunContext, show: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__(eyes)
        self._context = context
        self._show = show

    def stage_finished(self, record: StageRecord) -> None:
        super().stage_finished(record)
        self.report()

    def attempt_closed(self, attempt: Attempt) -> None:
        super().attempt_closed(attempt)
        if attempt.intent.stage is Stage.TRAIN:
            self.report()

    def report(self) -> None:
        """A report that cannot be made costs nobody the run."""
        context = self._context
        try:
            markdown = publish(context.ledger, context.workdir / context.run)
        except HeadraceError as error:
            self.say(f"no report: {error}")
            return
        self._show(markdown)
