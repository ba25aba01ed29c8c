"""What makes a stage finished: its fingerprint, and the record that lets it be skipped.

A fingerprint decides skipping only. Whether a checkpoint may be resumed from is asked of the
model's shapes and the data set's id, so that a fix in the middle of a run goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pydantic_core import to_jsonable_python

from storage.records import Stage, StageRecord
from tasks.context import RunContext
from tasks.engine import Engine

_DIGITS = 16


def fingerprint(*parts: object) -> str:
    """The hash of all that a result depends on; equal for equal values in any order of keys.

    Raises:
        ValueError: a part holds NaN or infinity, which JSON has no word for.
    """
    canonical = json.dumps(
        [to_jsonable_python(part, inf_nan_mode="constants") for part in parts],
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
    )
    return hashlib.sha256(canonical.encode()).hexdigest()[:_DIGITS]


def run_stage(
    context: RunContext,
    stage: Stage,
    *,
    inputs: Mapping[str, Any],
    body: Callable[[str], Mapping[str, Any]],
    expires_h: float | None = None,
    units: Sequence[str] = (),
    engine: Engine | None = None,
) -> StageRecord:
    """The stage's completion record: the one that is there, or a new one after `body` has run.

    `body` is given the fingerprint with its generation, under which it makes its attempts, and
    returns the outputs. Where two engines end the stage at once, both return the same record.
    """
    engine = engine or Engine()
    state = _state(context, stage, inputs=inputs, expires_h=expires_h, now=engine.clock.now())
    if state.valid is not None:
        context.eyes.stage_skipped(state.valid)
        return state.valid
    context.eyes.stage_started(stage, units)
    asked = f"{state.fingerprint}.{state.generation}"
    outputs = to_jsonable_python(body(asked))
    claim = context.ledger.claim_stage(
        StageRecord(
            stage=stage,
            fingerprint=state.fingerprint,
            generation=state.generation,
            outputs=outputs,
            attempts=_attempts_of(context, stage, asked),
            nonce=engine.nonce(),
            at=engine.clock.now(),
        )
    )
    context.eyes.stage_finished(claim.record)
    return claim.record


def find_completed(
    context: RunContext,
    stage: Stage,
    *,
    inputs: Mapping[str, Any],
    expires_h: float | None = None,
    engine: Engine | None = None,
) -> StageRecord | None:
    """The record because of which the stage would be skipped now, or None where it would run."""
    now = (engine or Engine()).clock.now()
    return _state(context, stage, inputs=inputs, expires_h=expires_h, now=now).valid


@dataclass(frozen=True, kw_only=True)
class _State:
    fingerprint: str
    generation: int
    valid: StageRecord | None


def _state(
    context: RunContext,
    stage: Stage,
    *,
    inputs: Mapping[str, Any],
    expires_h: float | None,
    now: datetime,
) -> _State:
    """Which generation counts: the newest one, or a new one when that is expired or forced away."""
    asked = fingerprint(stage, inputs, context.snapshot.digest)
    records = [one for one in context.ledger.stage_records(stage) if one.fingerprint == asked]
    if not records:
        return _State(fingerprint=asked, generation=0, valid=None)
    newest = max(records, key=lambda one: one.generation)
    is_expired = expires_h is not None and now - newest.at >= timedelta(hours=expires_h)
    if is_expired or stage in context.forced:
        return _State(fingerprint=asked, generation=newest.generation + 1, valid=None)
    return _State(fingerprint=asked, generation=newest.generation, valid=newest)


def _attempts_of(context: RunContext, stage: Stage, asked: str) -> tuple[int, ...]:
    return tuple(
        one.number for one in context.ledger.ends(stage) if one.intent.fingerprint == asked
    )
