"""What a stage's records come down to: under way, done, or given up, and why. Pure.

The last attempt's own decision is not always it: what was to be tried elsewhere may have found
nowhere to go. That is what a `Refusal` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from storage.attempts import Attempt
from storage.records import Action, Refusal, StageRecord
from tasks.attending import FINAL


class Standing(StrEnum):
    """Where a stage stands."""

    NOT_BEGUN = "not begun"
    UNDER_WAY = "under way"
    BETWEEN = "between attempts"
    FINISHED = "finished"
    REFUSED = "refused"
    GAVE_UP = "gave up"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class LastWord:
    """`reason` is what a person should read; `attempt` the one that it came from."""

    standing: Standing
    reason: str
    attempt: Attempt | None = None


def is_passed(record: StageRecord) -> bool:
    """Whether the stage let the run go on; a gate that refused leaves a record, too."""
    return bool(record.outputs.get("passed", True))


def last_word(
    attempts: Sequence[Attempt], *, record: StageRecord | None, refusal: Refusal | None
) -> LastWord:
    """The stage's last word. `record` is its newest completion record; a newer attempt is newer."""
    newest = attempts[-1] if attempts else None
    is_newer = newest is not None and (record is None or newest.intent.created_at > record.at)
    if record is not None and not is_newer:
        if not is_passed(record):
            return LastWord(standing=Standing.REFUSED, reason=str(record.outputs["reason"]))
        return LastWord(standing=Standing.FINISHED, reason="it has its result")
    if newest is None:
        if refusal is not None and refusal.after is None:
            return LastWord(standing=_standing(refusal), reason=refusal.reason)
        return LastWord(standing=Standing.NOT_BEGUN, reason="no attempt was made")
    return _of_attempts(attempts, newest, refusal)


def _standing(refusal: Refusal) -> Standing:
    return Standing.STOPPED if refusal.cancelled else Standing.GAVE_UP


def _of_attempts(attempts: Sequence[Attempt], newest: Attempt, refusal: Refusal | None) -> LastWord:
    at_work = next((one for one in reversed(attempts) if one.is_open), None)
    if at_work is not None:
        reason = f"attempt {at_work.number} has no end yet"
        return LastWord(standing=Standing.UNDER_WAY, reason=reason, attempt=at_work)
    if refusal is not None and refusal.after == newest.number:
        return LastWord(standing=_standing(refusal), reason=refusal.reason, attempt=newest)
    assert newest.end is not None
    decision = newest.end.decision
    if decision.action in FINAL:
        stopped = decision.action is Action.STOP
        standing = Standing.STOPPED if stopped else Standing.GAVE_UP
        return LastWord(standing=standing, reason=decision.reason, attempt=newest)
    if decision.action is Action.DONE:
        reason = f"attempt {newest.number} is done; what follows it is not recorded yet"
        return LastWord(standing=Standing.UNDER_WAY, reason=reason, attempt=newest)
    reason = f"{decision.action}: {decision.reason}"
    return LastWord(standing=Standing.BETWEEN, reason=reason, attempt=newest)
