"""Runs stages in the eyes of Prefect: what a flow's body is, and how the flow ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Crashed, Failed

from flows.eyes import PrefectEyes
from flows.opening import base_folder, open_run
from flows.plain_logs import keep_logs_plain
from flows.reporting import ReportingEyes
from flows.spec import PipelineSpec
from flows.steps import run_stages
from flows.watchers import AllEyes, onlookers
from storage.errors import HeadraceError
from storage.records import Stage
from tasks.failures import RunCancelled
from tasks.pauses import Paused
from tasks.report import FILE, summary


def show_stages(
    spec: PipelineSpec, stages: Sequence[Stage], *, forced: Iterable[Stage] = ()
) -> State[Any]:
    """Run `stages` inside a flow; returns how that flow ends."""
    keep_logs_plain()
    spec = spec.anchored(base_folder())
    report = spec.workdir / spec.run / FILE
    with PrefectEyes(total_steps=spec.total_steps, report=f"report: {report}") as prefect_eyes:
        eyes = AllEyes(prefect_eyes, *onlookers())
        try:
            with open_run(spec, eyes=eyes, forced=forced) as context:
                show = partial(prefect_eyes.show_report, run=spec.run)
                reporting = ReportingEyes(eyes, context, show)
                try:
                    done = run_stages(replace(context, eyes=reporting), spec, stages)
                finally:
                    reporting.report()
        except RunCancelled as error:
            eyes.say(str(error))
            return Cancelled(message=str(error))
        except Paused as pause:
            return Crashed(name="Left", message=f"its engine left, its job goes on: {pause}")
        except HeadraceError as error:
            eyes.say(str(error))
            return Failed(message=str(error))
    return Completed(message=summary(done.get(Stage.TRAIN) or done[stages[-1]]))
