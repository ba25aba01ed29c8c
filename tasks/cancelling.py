"""Ends attempts because a person said so, whether or not an engine lives.

The record of who and why comes first, for all of them. So a living engine that sees an attempt end
knows that nothing is to follow, and whoever comes first closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime

from slurm.cluster import JobState
from storage.attempts import Attempt
from storage.ledger import Ledger
from storage.records import Cancel, Stage, new_nonce
from tasks.context import RunContext, Unit
from tasks.engine import Engine, SystemClock, user_at_host
from tasks.failures import AttemptFailed, RunCancelled
from tasks.pauses import Paused
from tasks.runner import carry_out
from tasks.situation import Patience

PATIENCE_S = 60.0
TELL_AFTER_S = 2.0
_ALIVE = frozenset({JobState.PENDING, JobState.RUNNING})


def open_attempts(ledger: Ledger, stages: Iterable[Stage]) -> tuple[Attempt, ...]:
    """The attempts of the stages that have no end."""
    return tuple(
        attempt for stage in stages for attempt in ledger.attempts(stage) if attempt.is_open
    )


def ask_for_the_end(ledger: Ledger, *, why: str) -> None:
    """Tell engines that may be between two attempts; one that starts later is not meant."""
    wish = Cancel(who=user_at_host(), why=why, nonce=new_nonce(), at=datetime.now(UTC))
    ledger.ask_for_the_end(wish)


def cancel_attempts(
    context: RunContext, attempts: Iterable[Attempt], *, why: str
) -> tuple[Attempt, ...]:
    """Cancel the jobs of these open attempts of this cluster, and close the attempts.

    The context's eyes are those of the one who cancels: asked, they say that the run is cancelled.
    Returns the attempts that have no end yet, or whose job is in the queue still, which are none
    unless `PATIENCE_S` have passed.
    """
    asked = tuple(attempts)
    clock = _TellingClock(context.eyes.say)
    who = user_at_host()
    engine = Engine(
        user=who,
        clock=clock,
        patience=Patience(cancel_s=PATIENCE_S),
        leaves_at_s=clock.monotonic() + PATIENCE_S,
    )
    for attempt in asked:
        cancel = Cancel(who=who, why=why, nonce=engine.nonce(), at=clock.now())
        context.ledger.claim_cancel(attempt.intent, cancel)
    for stage in Stage:
        units = {one.intent.unit: _unit(one) for one in asked if one.intent.stage is stage}
        with suppress(RunCancelled, AttemptFailed, Paused):
            carry_out(context, stage, tuple(units.values()), fingerprint="", engine=engine)
    now = tuple(context.ledger.refreshed(one) for one in asked)
    seen = context.cluster.observe([one.intent.token for one in now])
    return tuple(one for one in now if one.is_open or seen[one.intent.token].state in _ALIVE)


def _unit(attempt: Attempt) -> Unit:
    """The attempt's unit, as far as its end needs it: nothing is submitted again."""
    return Unit(name=attempt.intent.unit, entry="", node_list=attempt.intent.node_list)


class _TellingClock(SystemClock):
    """Says once that it takes a while, so that a silent minute is no riddle."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._slept_s = 0.0

    def sleep(self, seconds: float) -> None:
        before_s, self._slept_s = self._slept_s, self._slept_s + seconds
        if before_s <= TELL_AFTER_S < self._slept_s:
            self._say(f"waiting for jobs to end, {PATIENCE_S:.0f} s at most")
        super().sleep(seconds)
