"""Runs stages in the eyes of Prefect: what a flow's body is, and how the flow ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from flows.eyes import PrefectEyes
from flows.opening import base_folder, open_run
from flows.spec import PipelineSpec
from flows.steps import run_stages
from flows.watchers import AllEyes, onlookers
from storage.errors import HeadraceError
from storage.records import Attempt, Stage, StageRecord
from tasks.context import RunContext
from tasks.failures import RunCancelled
from tasks.report import FILE, publish, summary


def show_stages(
    spec: PipelineSpec, stages: Sequence[Stage], *, forced: Iterable[Stage] = ()
) -> State[Any]:
    """Run `stages` inside a flow; returns how that flow ends."""
    spec = spec.anchored(base_folder())
    report = spec.workdir / spec.run / FILE
    with PrefectEyes(total_steps=spec.total_steps, report=f"report: {report}") as prefect_eyes:
        eyes = AllEyes(prefect_eyes, *onlookers())
        try:
            with open_run(spec, eyes=eyes, forced=forced) as context:
                reporting = _ReportingEyes(eyes, context, prefect_eyes)
                try:
                    done = run_stages(replace(context, eyes=reporting), spec, stages)
                finally:
                    reporting.report()
        except RunCancelled as error:
            return Cancelled(message=str(error))
        except HeadraceError as error:
            eyes.say(str(error))
            return Failed(message=str(error))
    return Completed(message=summary(done.get(Stage.TRAIN) or done[stages[-1]]))


class _ReportingEyes(AllEyes):
    """Makes the report again whenever something in it has changed that is worth a look."""

    def __init__(self, eyes: AllEyes, context: RunContext, prefect_eyes: PrefectEyes) -> None:
        super().__init__(eyes)
        self._context = context
        self._prefect_eyes = prefect_eyes

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
        self._prefect_eyes.show_report(markdown, run=context.run)
