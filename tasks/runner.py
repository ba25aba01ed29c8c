"""Carries the loop's steps out: the only place where a decision of `tasks.attempts` becomes a deed.

Each round looks (at the cluster first, then at the ledger, so that a job seen as ended has its last
word there by then), asks `advance`, and takes the steps in their order. What a claim answered is
never acted on: the next round reads what stands. So a lost answer, a lost race and a restart are
one case, not three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from slurm.cluster import JobObservation
from storage.attempts import Attempt
from storage.errors import HeadraceError, SlurmError, StoreError
from storage.records import Action, End, Exit, Stage
from tasks.attempts import advance
from tasks.context import RunContext, Unit
from tasks.deeds import Deeds
from tasks.engine import Engine
from tasks.failures import AttemptFailed, RunCancelled
from tasks.ledger_view import LedgerView
from tasks.memory import Sight, Sights
from tasks.outage import Outage
from tasks.pauses import Paused, waiting_for
from tasks.situation import Finish, GiveUp, Order, Situation, Wait, Watch
from tasks.telling import Teller

STORE_PATIENCE_S = 900.0
CANCEL_POLL_S = 2.0
NEWS_POLL_S = 4.0
"""Between two looks, an old job's records are asked so often whether it has left."""
_MOST_ASKED_FOR_NEWS = 16
_SLACK_S = 5.0


@dataclass(frozen=True, kw_only=True)
class UnitResult:
    """The last attempt of a unit. Only with `tolerate` can it be one that is not `done`."""

    attempt: Attempt

    @property
    def end(self) -> End:
        assert self.attempt.end is not None
        return self.attempt.end

    @property
    def exit(self) -> Exit | None:
        """The job's own last word; None where it left none."""
        return self.attempt.exit

    @property
    def done(self) -> bool:
        return self.end.decision.action is Action.DONE

    @property
    def outputs(self) -> Mapping[str, Any]:
        return {} if self.exit is None else self.exit.outputs


def carry_out(
    context: RunContext,
    stage: Stage,
    units: Sequence[Unit],
    *,
    fingerprint: str,
    tolerate: bool = False,
    max_age_h: float | None = None,
    engine: Engine | None = None,
) -> Mapping[str, UnitResult]:
    """Runs each unit, side by side, until it has a result; returns the results by the unit's name.

    What is in the ledger already is not done again: results of this fingerprint count (unless older
    than `max_age_h`), and open attempts are adopted. With `tolerate` a unit that fails is a result
    like any other.

    Raises:
        AttemptFailed: a unit has no result and gets no other try.
        RunCancelled: a person ended it.
        Paused: the engine was to leave; its jobs go on.
        StoreError: the store has not answered for `STORE_PATIENCE_S`.
    """
    if not units:
        return {}
    return _Runner(
        context,
        stage,
        tuple(units),
        fingerprint=fingerprint,
        tolerate=tolerate,
        max_age_s=None if max_age_h is None else max_age_h * 3600,
        engine=engine or context.engine or Engine(),
    ).run()


class _Runner:
    def __init__(
        self,
        context: RunContext,
        stage: Stage,
        units: tuple[Unit, ...],
        *,
        fingerprint: str,
        tolerate: bool,
        max_age_s: float | None,
        engine: Engine,
    ) -> None:
        self._context = context
        self._ledger = context.ledger
        self._cluster = context.cluster
        self._engine = engine
        self._clock = engine.clock
        self._order = Order(
            run=context.run,
            stage=stage,
            units=units,
            fingerprint=fingerprint,
            cluster="",
            who=engine.user,
            retry=context.retry,
            replaces_nodes=context.cluster.replaces_nodes,
            one_partition=isinstance(context.cluster_spec.partition, str),
            tolerate=tolerate,
            max_age_s=max_age_s,
            patience=engine.patience,
        )
        self._view = LedgerView(context.ledger, stage, [unit.name for unit in units])
        self._teller = Teller(
            context.eyes, lambda one: context.attempt_folder(one.intent.stage, one.number)
        )
        self._slurm = Outage("the cluster", say=context.eyes.say)
        self._store = Outage("the object store", say=context.eyes.say, bound_s=STORE_PATIENCE_S)
        self._is_prepared = False
        self._deeds = Deeds(context, engine)
        self._watches: dict[int, Watch] = {}
        self._recalled: dict[int, Attempt] = {}
        self._observations: Mapping[str, JobObservation] = {}
        self._looked_at: datetime | None = None
        self._looked_at_s: float | None = None
        self._planned_s = 0.0
        self._waits_for_nodes = ""
        self._cancelled = False
        self._cancels_before: frozenset[str] = frozenset()
        self._cancel_polled_at_s = float("-inf")
        self._asked_for_news_at_s = float("-inf")

    def run(self) -> Mapping[str, UnitResult]:
        while True:
            try:
                if not self._is_prepared:
                    self._prepare()
                results = self._round()
            except SlurmError as error:
                self._sit_out(self._slurm, error)
            except StoreError as error:
                self._sit_out(self._store, error)
            else:
                if results is not None:
                    return {name: UnitResult(attempt=one) for name, one in results.items()}

    def _prepare(self) -> None:
        """What is read once: what had ended before this engine was asked, and who we are."""
        name = self._cluster.name
        self._view.refresh()
        past = self._engine.memory.past_of(
            self._order.stage, self._order.units, self._view.attempts
        )
        self._order = replace(self._order, cluster=name, past=past)
        self._cancels_before = self._engine.memory.cancels_before(self._ledger.cancel_keys)
        self._deeds.prepare()
        self._recall()
        self._is_prepared = True

    def _recall(self) -> None:
        """Go on watching where the engine before this one stopped."""
        found = self._engine.memory.recall(self._order.stage)
        if found is None:
            return
        watched_s = found.watched_s(self._clock.now())
        now_s = self._clock.monotonic()
        for sight in found.attempts:
            number = sight.attempt.number
            self._watches[number] = sight.watch
            self._recalled[number] = sight.attempt
            if sight.cancelled_s is not None:
                self._deeds.cancelled_at_s[number] = now_s - sight.cancelled_s - watched_s
        self._looked_at_s, self._planned_s = now_s - watched_s, watched_s

    def _round(self) -> Mapping[str, Attempt] | None:
        self._poll_cancel()
        self._hear_news()
        situation = self._look()
        self._store.is_over(at_s=self._clock.monotonic())
        for step in advance(self._order, situation):
            match step:
                case Finish():
                    return step.results
                case GiveUp():
                    self._deeds.refuse(step, self._order, situation)
                    raise self._failure(step)
                case Wait():
                    self._tell_wait(step.for_nodes)
                    self._sleep(step.seconds)
                case _:
                    if not self._deeds.do(step, self._order, situation):
                        return None
        return None

    def _look(self) -> Situation:
        """The situation now: what the cluster said, then what the ledger says."""
        observations = self._observe([one.intent.token for one in self._view.open_attempts])
        before = {one.number: one for one in self._view.open_attempts}
        before |= {number: self._recalled.pop(number) for number in before.keys() & self._recalled}
        self._view.refresh()
        self._observations = observations
        elapsed_s = self._elapsed_s()
        watched = before.keys() | {one.number for one in self._view.open_attempts}
        for attempt in self._view.attempts:
            if attempt.number in watched:
                self._see(attempt, before.get(attempt.number), observations, elapsed_s)
        now_s = self._clock.monotonic()
        findings = self._deeds.take_findings()
        return Situation(
            now=self._clock.now(),
            attempts=self._view.attempts,
            observations=observations,
            nodes=findings.nodes,
            excluded=findings.excluded,
            submissions=dict(self._deeds.submissions),
            watches=dict(self._watches),
            cancelled_s={
                number: now_s - at_s for number, at_s in self._deeds.cancelled_at_s.items()
            },
            evidence=findings.evidence,
            newest_commit=findings.newest_commit,
            cancelled=self._cancelled,
        )

    def _observe(self, tokens: Sequence[str]) -> Mapping[str, JobObservation]:
        if not tokens:
            return {}
        try:
            observations = self._cluster.observe(tokens)
        except SlurmError as error:
            self._slurm.happened(error, at_s=self._clock.monotonic())
            return {}
        self._slurm.is_over(at_s=self._clock.monotonic())
        return observations

    def _elapsed_s(self) -> float:
        """Seconds since the last look, as far as they were spent on watching.

        An engine that was stopped for an hour has not seen an hour of silence.
        """
        now_s = self._clock.monotonic()
        passed_s = 0.0 if self._looked_at_s is None else now_s - self._looked_at_s
        self._looked_at, self._looked_at_s = self._clock.now(), now_s
        allowed_s, self._planned_s = self._planned_s + _SLACK_S, 0.0
        return min(passed_s, allowed_s)

    def _see(
        self,
        attempt: Attempt,
        before: Attempt | None,
        observations: Mapping[str, JobObservation],
        elapsed_s: float,
    ) -> None:
        observation = observations.get(attempt.intent.token)
        if not attempt.is_open:
            self._teller.tell_end(attempt)
            self._watches.pop(attempt.number, None)
            return
        if before is None and attempt.intent.fingerprint != self._order.fingerprint:
            self._context.eyes.say(
                f"attempt {attempt.number} was made from another spec or other code and goes on; "
                "its end is awaited first, cancel it to be faster"
            )
        self._teller.tell(attempt, observation)
        self._watches[attempt.number] = self._watches.get(attempt.number, Watch()).after(
            elapsed_s, before=before, attempt=attempt, observation=observation
        )

    def _failure(self, step: GiveUp) -> Exception:
        stage, attempt = self._order.stage, step.attempt
        if step.cancelled:
            return RunCancelled(f"{stage}: {step.reason}")
        folder = None if attempt is None else self._context.attempt_folder(stage, attempt.number)
        return AttemptFailed(
            stage=stage, unit=step.unit.name, reason=step.reason, attempt=attempt, folder=folder
        )

    def _sit_out(self, outage: Outage, error: HeadraceError) -> None:
        """Waits while a service is away. That time tells nothing about jobs, so it is not planned:
        a job that could not say that it lives has not been silent."""
        delay_s = outage.happened(error, at_s=self._clock.monotonic())
        self._looked_at = None
        self._rest(delay_s)

    def _tell_wait(self, for_nodes: str) -> None:
        """That an attempt is not made yet for want of nodes, once for each change."""
        if for_nodes and for_nodes != self._waits_for_nodes:
            self._context.eyes.say(for_nodes)
        self._waits_for_nodes = for_nodes

    def _sleep(self, seconds: float) -> None:
        self._planned_s += seconds
        self._rest(seconds, until=self._has_news)

    def _rest(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Sleeps, but hears within moments that a person wants the end, or the engine to go."""
        until_s = self._clock.monotonic() + seconds
        if until_s > self._engine.leaves_at_s:
            raise self._pause(seconds)
        while not self._cancelled and (left_s := until_s - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left_s, CANCEL_POLL_S))
            self._poll_cancel()
            if left_s > CANCEL_POLL_S and until():
                return

    def _has_news(self) -> bool:
        """The queue is looked at seldom while a job is old; its last word is not left waiting."""
        try:
            if not self._hear_news():
                return False
            asked = self._view.open_attempts[:_MOST_ASKED_FOR_NEWS]
            return self._cancelled or any(self._ledger.has_news(one) for one in asked)
        except StoreError:
            # The next look finds out for itself, and waits.
            return False

    def _hear_news(self) -> bool:
        """Whether it was time to ask again; a wish that the run should end is heard on the way."""
        now_s = self._clock.monotonic()
        if now_s - self._asked_for_news_at_s < NEWS_POLL_S:
            return False
        self._asked_for_news_at_s = now_s
        wish = self._ledger.asked_for_the_end(before=self._cancels_before)
        if wish is not None:
            self._cancelled = True
            self._order = replace(self._order, who=wish.who, why_end=wish.why)
        return True

    def _pause(self, wait_s: float) -> Paused:
        """Leaves behind what the next engine should know."""
        memory, open_attempts = self._engine.memory, self._view.open_attempts
        now_s = self._clock.monotonic()
        cancelled_at_s = self._deeds.cancelled_at_s
        if self._is_prepared:
            memory.sights = Sights(
                stage=self._order.stage,
                at=self._looked_at,
                attempts=tuple(
                    Sight(
                        attempt=one,
                        watch=self._watches.get(one.number, Watch()),
                        cancelled_s=now_s - cancelled_at_s[one.number]
                        if one.number in cancelled_at_s
                        else None,
                    )
                    for one in open_attempts
                ),
            )
        elif memory.sights is not None:
            memory.sights = replace(memory.sights, at=None)
        told, state = waiting_for(
            open_attempts, self._observations, for_nodes=self._waits_for_nodes
        )
        return Paused(stage=self._order.stage, told=told, state=state, wait_s=wait_s)

    def _poll_cancel(self) -> None:
        now_s = self._clock.monotonic()
        if self._cancelled or now_s - self._cancel_polled_at_s < CANCEL_POLL_S:
            return
        self._cancel_polled_at_s = now_s
        if self._context.eyes.leave_requested():
            raise self._pause(0.0)
        self._cancelled = self._context.eyes.cancel_requested()
