"""One open attempt: what it needs now. `tasks.attempts` lists the questions; all of it is pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from slurm.cluster import JobObservation, JobState
from slurm.diagnose import THE_LOOP, diagnose, is_settled, refusal
from slurm.diagnosis.job_rules import IN_VAIN, in_vain
from slurm.pending import Outlook, PendingReason, explain
from slurm.policy import decide
from storage.attempts import Attempt
from storage.records import Action, Decision, Diagnosis, ExitCode, Kind
from tasks.context import Unit
from tasks.situation import (
    CancelJob,
    Close,
    Gather,
    Order,
    Quote,
    Rejected,
    Situation,
    Step,
    Submission,
    Submit,
    Void,
    Watch,
)

FINAL = frozenset({Action.GIVE_UP, Action.STOP})
_ALIVE = frozenset({JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN})

SHORTEST_POLL_S = 0.5
LONGEST_POLL_S = 30.0


def poll_s(age_s: float) -> float:
    """Seconds until the next look at a job of this age: a thirtieth of it, within bounds."""
    return min(LONGEST_POLL_S, max(SHORTEST_POLL_S, age_s / 30))


@dataclass(frozen=True, kw_only=True)
class Busy:
    """A unit that is not at its end. `patient` when the steps leave the situation as it is.

    `for_nodes` tells of the nodes that its next attempt waits for, where it does.
    """

    unit: Unit
    steps: tuple[Step, ...] = ()
    wait_s: float = LONGEST_POLL_S
    patient: bool = True
    for_nodes: str = ""


def history_of(seen: Situation, unit: Unit, fingerprint: str) -> tuple[Attempt, ...]:
    """The unit's closed attempts that count against its budgets, oldest first.

    Whoever runs the command again after a give-up asks for new budgets, and so does whoever changes
    the spec or the code.
    """
    counting: list[Attempt] = []
    for attempt in seen.attempts:
        if attempt.intent.unit != unit.name or attempt.intent.fingerprint != fingerprint:
            continue
        if attempt.end is None:
            continue
        counting.append(attempt)
        if attempt.end.decision.action in FINAL:
            counting.clear()
    return tuple(counting)


def _diagnosis_of(rejected: Rejected) -> Diagnosis:
    if not rejected.for_now:
        return refusal(rejected.message)
    words = f"the site lets no more jobs be submitted for now: {rejected.message}"
    return Diagnosis(kind=Kind.LIMIT, evidence=(words,))


def attend(order: Order, seen: Situation, unit: Unit, attempt: Attempt, *, why_end: str) -> Busy:
    """What an open attempt of this cluster needs now; `why_end` is recorded should it be ended."""
    return _Case(order=order, seen=seen, unit=unit, attempt=attempt, why_end=why_end).next()


@dataclass(frozen=True, kw_only=True)
class _Case:
    order: Order
    seen: Situation
    unit: Unit
    attempt: Attempt
    why_end: str

    def next(self) -> Busy:
        attempt = self.attempt
        is_done = attempt.exit is not None and attempt.exit.code == ExitCode.DONE
        if self._is_asked_to_end and not is_done:
            return self._stop()
        submission = self.seen.submissions.get(attempt.intent.nonce)
        if isinstance(submission, Rejected):
            return self._close(_diagnosis_of(submission))
        if attempt.start is None and attempt.exit is None:
            is_due = submission is Submission.DUE
            return self._do(Submit(attempt=attempt, unit=self.unit)) if is_due else self._doubt()
        if attempt.start is not None and attempt.start.is_void:
            return self._void()
        return self._over() if self._is_over else self._wait(self._next_look_s)

    @cached_property
    def _observation(self) -> JobObservation | None:
        """What the cluster says of the attempt's own job: both its id and its token must agree."""
        found = self.seen.observations.get(self.attempt.intent.token)
        job = self.attempt.start.job if self.attempt.start is not None else None
        if found is not None and job is not None and found.job_id not in (None, job.job_id):
            return JobObservation(token=found.token, state=JobState.ABSENT)
        return found

    @property
    def _watch(self) -> Watch:
        return self.seen.watches.get(self.attempt.number, Watch())

    @property
    def _hopeless(self) -> PendingReason | None:
        """For what the job waits in vain, where it does."""
        seen = self._observation
        if seen is None or seen.state is not JobState.PENDING:
            return None
        reason = explain(seen.reason, one_partition=self.order.one_partition)
        return reason if reason.outlook is Outlook.GIVE_UP else None

    @property
    def _cancelled_s(self) -> float | None:
        return self.seen.cancelled_s.get(self.attempt.number)

    @property
    def _is_alive(self) -> bool:
        return self._observation is not None and self._observation.state in _ALIVE

    @property
    def _job_id(self) -> str | None:
        start, submitted = self.attempt.start, self.attempt.submitted
        if start is not None and start.job is not None:
            return start.job.job_id
        if self._observation is not None and self._observation.job_id is not None:
            return self._observation.job_id
        return submitted.job_id if submitted is not None else None

    @property
    def _is_asked_to_end(self) -> bool:
        cancel = self.attempt.cancel
        return self.seen.cancelled or (cancel is not None and cancel.who != THE_LOOP)

    @property
    def _next_look_s(self) -> float:
        return poll_s((self.seen.now - self.attempt.intent.created_at).total_seconds())

    @property
    def _is_over(self) -> bool:
        attempt, observation = self.attempt, self._observation
        if attempt.exit is not None:
            return observation is not None or attempt.exit.code == ExitCode.DONE
        if observation is None:
            return False
        if observation.state is JobState.ENDED:
            return True
        # Before its first heartbeat a running job may still be starting, for as long as it takes.
        says_something = observation.state is JobState.ABSENT or (
            observation.state is JobState.RUNNING and bool(attempt.unfinished_heartbeats)
        )
        return says_something and self._watch.silent_s >= self.order.retry.lost_after_s

    def _do(self, *steps: Step) -> Busy:
        return Busy(unit=self.unit, steps=steps, patient=False)

    def _wait(self, seconds: float, *steps: Step) -> Busy:
        return Busy(unit=self.unit, steps=steps, wait_s=seconds)

    def _doubt(self) -> Busy:
        """No start stands. That a job does not exist cannot be proven, only made not to matter."""
        observation = self._observation
        is_in_vain = self._watch.pending_s >= self.order.patience.hopeless_s
        if self._hopeless is not None and is_in_vain:
            return self._do(Void(attempt=self.attempt))
        if observation is None or self._is_alive:
            return self._wait(self._next_look_s)
        is_absent = observation.state is JobState.ABSENT
        if is_absent and self._watch.traceless_s < self.order.patience.doubt_s:
            return self._wait(1.0)
        return self._do(Void(attempt=self.attempt))

    def _void(self) -> Busy:
        """Nobody can pass the start: a job that still queues is cancelled, not waited for."""
        if self._observation is not None and self._observation.state is JobState.ENDED:
            return self._judge()
        token, hopeless = self.attempt.intent.token, self._hopeless
        if hopeless is None:
            words = f"no job of token {token} has started, and none can any more"
            closing = self._close(Diagnosis(kind=Kind.LOST, evidence=(words,)))
        else:
            closing = self._close(in_vain(str(hopeless)))
        if not self._is_alive or self._job_id is None:
            return closing
        why = "the attempt's start is void" if hopeless is None else f"{IN_VAIN}{hopeless}"
        return self._do(self._cancel(THE_LOOP, why), *closing.steps)

    def _over(self) -> Busy:
        """Its last word is said. Slurm gets a moment to notice, then the job is cancelled."""
        last, watch = self.attempt.exit, self._watch
        if not self._is_alive or self._cancelled_s is not None:
            return self._judge()
        if last is None:
            return self._do(self._cancel(THE_LOOP, f"no heartbeat for {watch.silent_s:.0f} s"))
        # Who blames a node knows more than Slurm, which would ask that node for minutes.
        knows_better = last.code == ExitCode.PEER_LOST and bool(last.blamed_nodes)
        if watch.over_s < self.order.patience.linger_s and not knows_better:
            return self._wait(SHORTEST_POLL_S)
        return self._do(
            self._cancel(THE_LOOP, f"it has left with code {last.code}, and its job goes on")
        )

    def _judge(self) -> Busy:
        word = self.attempt.first_failure
        if self.attempt.exit is None and word is not None:
            return self._do(Quote(attempt=self.attempt, word=word))
        evidence = self.seen.evidence.get(self.attempt.number)
        if evidence is None:
            return self._do(Gather(attempt=self.attempt))
        settle_s = self.order.patience.settle_s
        if not is_settled(evidence) and self._watch.over_s < settle_s:
            return self._wait(SHORTEST_POLL_S, Gather(attempt=self.attempt))
        return self._close(diagnose(evidence))

    def _close(self, diagnosis: Diagnosis) -> Busy:
        # The seed is the attempt's own, so that two engines decide the same.
        intent = self.attempt.intent
        decision = decide(
            diagnosis,
            attempt=self.attempt,
            history=history_of(self.seen, self.unit, intent.fingerprint),
            retry=self.order.retry,
            seed=int(intent.nonce, 16),
            newest=self.seen.newest_commit,
        )
        return self._do(Close(attempt=self.attempt, diagnosis=diagnosis, decision=decision))

    def _cancel(self, who: str, why: str) -> CancelJob:
        return CancelJob(attempt=self.attempt, job_id=self._job_id, who=who, why=why)

    def _stop(self) -> Busy:
        """A person wants the end: that is recorded, the job is cancelled, and nothing follows."""
        recorded = self.attempt.cancel
        who = self.order.who if recorded is None else recorded.who
        why = self.why_end if recorded is None else recorded.why
        if recorded is None:
            return self._do(self._cancel(who, why))
        may_live = self._observation is None or self._is_alive
        if may_live and self._job_id is not None and self._cancelled_s is None:
            return self._do(self._cancel(who, why))
        if self.attempt.start is None:
            return self._do(Void(attempt=self.attempt))
        is_patient = (self._cancelled_s or 0.0) < self.order.patience.cancel_s
        if may_live and self._job_id is not None and is_patient:
            return self._wait(SHORTEST_POLL_S)
        diagnosis = Diagnosis(kind=Kind.OPERATOR, evidence=(f"cancelled by {who}: {why}",))
        decision = Decision(action=Action.STOP, reason=f"{who} cancelled it: {why}")
        return self._do(Close(attempt=self.attempt, diagnosis=diagnosis, decision=decision))
