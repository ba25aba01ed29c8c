"""THE loop's decision, the same for every stage: what follows from what is seen now.

`advance` is pure. It never remembers: what it decided yesterday it decides again from the records,
so an engine may die at any line, and two engines may run side by side. What has to happen once is
made so by the conditional creates that its steps lead to, not by it.

An attempt goes through these questions, in this order:

1. Did somebody ask for the end? The start is voided or the job cancelled, and the attempt closed.
2. Was it refused by sbatch, or voided? It is closed, and the next one follows.
3. Has it no start? Its creator submits it, once. Where no job can be found for some time, or the
   job has ended, or waits for what no waiting mends, the start is claimed as void: whoever wins
   that claim, the doubt is over.
4. Is it over: exit record, job ended, or gone from the queue with a still heartbeat? A job that
   Slurm still calls running is cancelled; then the evidence is judged and the attempt closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from storage.attempts import Attempt
from storage.records import Action, Kind, Why
from tasks.attending import FINAL, LONGEST_POLL_S, Busy, attend, history_of
from tasks.context import Unit
from tasks.nodes_left import awaited, lack_of_nodes, most_to_ask, to_avoid
from tasks.situation import Allocate, Finish, GiveUp, Order, Situation, Step, Survey, Wait


def advance(order: Order, seen: Situation) -> tuple[Step, ...]:
    """What to do now. Exactly one of Wait, Finish and GiveUp ends the steps, or none of them does.

    Without one the caller looks again at once, since its steps have changed the situation.
    """
    prospects = [_prospect(order, seen, unit) for unit in order.units]
    failed = [one for one in prospects if isinstance(one, _Failed)]
    if failed and not (order.tolerate and all(_is_tolerable(one) for one in failed)):
        return _wind_up(order, seen, _root(failed))
    if seen.cancelled and not any(isinstance(one, Busy) for one in prospects):
        unit = order.units[0]
        return (GiveUp(unit=unit, reason=_cancelled_by(order), cancelled=True),)
    busy = [one for one in prospects if isinstance(one, Busy)]
    if not busy:
        return (Finish(results={one.unit.name: _attempt_of(one) for one in prospects}),)
    steps = list(_numbered(seen, busy))
    if all(one.patient for one in busy):
        for_nodes = "; ".join(one.for_nodes for one in busy if one.for_nodes)
        steps.append(Wait(seconds=min(one.wait_s for one in busy), for_nodes=for_nodes))
    return tuple(steps)


@dataclass(frozen=True, kw_only=True)
class _Done:
    unit: Unit
    attempt: Attempt


@dataclass(frozen=True, kw_only=True)
class _Failed:
    unit: Unit
    attempt: Attempt | None
    reason: str
    cancelled: bool = False


_Prospect = _Done | _Failed | Busy


def _attempt_of(prospect: _Prospect) -> Attempt:
    assert not isinstance(prospect, Busy)
    assert prospect.attempt is not None
    return prospect.attempt


def _numbered(seen: Situation, busy: Sequence[Busy]) -> Iterator[Step]:
    """The steps of all units; attempts to be allocated get the numbers after the last one seen."""
    number = seen.attempts[-1].number if seen.attempts else 0
    for one in busy:
        for step in one.steps:
            if isinstance(step, Allocate):
                number += 1
                yield replace(step, number=number)
            else:
                yield step


def _cancelled_by(order: Order) -> str:
    return f"{order.who} cancelled it: {order.why_end}"


def _root(failed: Sequence[_Failed]) -> _Failed:
    """The failure that others may only have followed: a unit that was ended caused nothing."""
    return next((one for one in failed if not one.cancelled), failed[0])


def _is_tolerable(failed: _Failed) -> bool:
    """What a person ended says nothing about the unit, so it is no result of it either."""
    return failed.attempt is not None and not failed.cancelled


def _wind_up(order: Order, seen: Situation, failed: _Failed) -> tuple[Step, ...]:
    """Ends what still runs beside a unit that failed, then gives up because of that unit."""
    stopping = replace(seen, cancelled=True)
    why_end = f"unit {failed.unit.name} failed: {failed.reason}"
    steps: list[Step] = []
    waits: list[float] = []
    patient = True
    for unit in order.units:
        attempt = _open_attempt(seen, unit)
        if attempt is None or attempt.intent.cluster != order.cluster:
            continue
        one = attend(
            order,
            stopping,
            unit,
            attempt,
            why_end=failed.reason if failed.cancelled else why_end,
        )
        steps += one.steps
        waits.append(one.wait_s)
        patient = patient and one.patient
    if not waits:
        give_up = GiveUp(
            unit=failed.unit,
            reason=_cancelled_by(order) if failed.reason == order.why_end else failed.reason,
            attempt=failed.attempt,
            cancelled=failed.cancelled,
        )
        return (give_up,)
    return (*steps, Wait(seconds=min(waits))) if patient else tuple(steps)


def _open_attempt(seen: Situation, unit: Unit) -> Attempt | None:
    of_unit = (one for one in seen.attempts if one.intent.unit == unit.name and one.is_open)
    return next(of_unit, None)


def _prospect(order: Order, seen: Situation, unit: Unit) -> _Prospect:
    attempt = _open_attempt(seen, unit)
    if attempt is not None and attempt.intent.cluster != order.cluster:
        return _Failed(unit=unit, attempt=None, reason=_foreign(order, attempt))
    if attempt is not None:
        return attend(order, seen, unit, attempt, why_end=order.why_end)
    of_unit = [one for one in seen.attempts if one.intent.unit == unit.name]
    asked = [one for one in of_unit if one.intent.fingerprint == order.fingerprint]
    done = next((one for one in reversed(asked) if _is_result(order, seen.now, one)), None)
    if done is not None:
        return _Done(unit=unit, attempt=done)
    last = asked[-1] if asked else None
    if last is not None and last.number not in order.past:
        failed = _failed(order, seen, unit, last)
        if failed is not None:
            return failed
    if seen.cancelled:
        return _Failed(unit=unit, attempt=last, reason=order.why_end, cancelled=True)
    return _allocate(order, seen, unit, last=last, before=of_unit[-1] if of_unit else None)


def _is_result(order: Order, now: datetime, attempt: Attempt) -> bool:
    if attempt.end is None or attempt.end.decision.action is not Action.DONE:
        return False
    return order.max_age_s is None or now - attempt.end.at < timedelta(seconds=order.max_age_s)


def _failed(order: Order, seen: Situation, unit: Unit, last: Attempt) -> _Failed | None:
    """The unit's failure, where its last attempt decided it or the unit's own tries are used up."""
    assert last.end is not None
    decision = last.end.decision
    if decision.action in FINAL:
        return _Failed(
            unit=unit,
            attempt=last,
            reason=decision.reason,
            cancelled=decision.action is Action.STOP,
        )
    history = history_of(seen, unit, order.fingerprint)
    # An attempt that no job carried says nothing about what was to be tried.
    tried = [one for one in history if one.number not in order.past and not _had_no_job(one)]
    if unit.tries is not None and len(tried) >= unit.tries:
        return _Failed(
            unit=unit, attempt=last, reason=f"{len(tried)} of {unit.tries} tries are used up"
        )
    return None


def _had_no_job(attempt: Attempt) -> bool:
    return attempt.end is not None and attempt.end.diagnosis.kind in {Kind.LOST, Kind.LIMIT}


def _foreign(order: Order, attempt: Attempt) -> str:
    intent = attempt.intent
    return (
        f"attempt {intent.attempt} belongs to cluster {intent.cluster!r} and has no end, and this "
        f"is cluster {order.cluster!r}: whether its job runs can only be told there; run the "
        f"command on {intent.cluster!r} until the attempt has ended, or use another run name here"
    )


def _allocate(
    order: Order, seen: Situation, unit: Unit, *, last: Attempt | None, before: Attempt | None
) -> _Prospect:
    """The unit's next attempt, once its delay is over and if enough nodes are left for it."""
    binding = last is not None and last.end is not None and last.number not in order.past
    if binding and last is not None and last.end is not None:
        due = last.end.at + timedelta(seconds=last.end.decision.delay_s)
        remaining_s = (due - seen.now).total_seconds()
        if remaining_s > 0:
            return Busy(unit=unit, wait_s=min(remaining_s, LONGEST_POLL_S))
    if seen.nodes is None:
        return Busy(unit=unit, steps=(Survey(),), patient=False)
    lack = lack_of_nodes(order, seen, unit)
    if lack is not None:
        return _Failed(unit=unit, attempt=last, reason=lack)
    pause = awaited(order, seen, unit, last=before)
    if pause is not None:
        wait_s = min((pause.until - seen.now).total_seconds(), pause.poll_s)
        return Busy(unit=unit, wait_s=wait_s, for_nodes=pause.words)
    why = Why.FIRST if before is None else Why.RESUMED if unit.resumes else Why.RETRIED
    step = Allocate(
        unit=unit,
        number=0,
        why=why,
        after=before,
        excluded=to_avoid(order, seen, unit),
        most_nodes=most_to_ask(order, seen, unit),
    )
    return Busy(unit=unit, steps=(step,), patient=False)
