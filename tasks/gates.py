"""Stages that may refuse: the refusal is a result, kept and shown, and measured anew when asked.

A refusal that left no record would be repeated from its old measures for ever; one that counted as
done would need a person to force it away after the repair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage.errors import StageFailed
from storage.records import Stage, StageRecord
from tasks.context import RunContext
from tasks.stage import find_completed, run_stage


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What a gate found. `outputs` are kept either way; `reason` is what a person should read."""

    passed: bool
    reason: str
    outputs: Mapping[str, Any]


def run_gate(
    context: RunContext,
    stage: Stage,
    *,
    inputs: Mapping[str, Any],
    body: Callable[[str], Gate],
    expires_h: float | None = None,
    units: Sequence[str] = (),
) -> StageRecord:
    """The record of a gate that let the run pass; see `tasks.stage.run_stage`.

    Raises:
        StageFailed: it refused.
    """
    found = find_completed(context, stage, inputs=inputs, expires_h=expires_h)
    was_refused = found is not None and not found.outputs["passed"]

    def kept(fingerprint: str) -> Mapping[str, Any]:
        gate = body(fingerprint)
        return {**gate.outputs, "passed": gate.passed, "reason": gate.reason}

    record = run_stage(
        context,
        stage,
        inputs=inputs,
        body=kept,
        expires_h=0.0 if was_refused else expires_h,
        units=units,
    )
    if not record.outputs["passed"]:
        raise StageFailed(f"{stage}: {record.outputs['reason']}")
    return record
