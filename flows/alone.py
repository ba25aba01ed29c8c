"""A run carried out without Prefect: the same stages and gates, for whoever looks on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flows.opening import open_run
from flows.reporting import ReportingEyes
from flows.spec import PipelineSpec
from flows.steps import Records, run_stages
from storage.records import Stage
from tasks.eyes import Eyes


def run_alone(spec: PipelineSpec, *, eyes: Eyes, forced: Iterable[Stage] = ()) -> Records:
    """Carry the run of `spec`, whose paths are absolute, to its end.

    Raises:
        HeadraceError: a stage has no result, a person ended the run, or the engine was to leave.
    """
    with open_run(spec, eyes=eyes, forced=forced) as context:
        reporting = ReportingEyes(eyes, context)
        try:
            return run_stages(replace(context, eyes=reporting), spec, tuple(Stage))
        finally:
            reporting.report()
