"""The deeds that the loop's steps stand for: claims in the ledger, calls to the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurm.cluster import NodeState, SubmitDoubtful, SubmitLimited
from slurm.evidence import Evidence, gather
from storage.attempts import Attempt
from storage.checkpoint_records import CommitRef
from storage.checkpoints.commits import counting_commits, newest_commit
from storage.checkpoints.lineage import ceiling_of_next, owed
from storage.errors import SubmitRejected
from storage.records import (
    Action,
    Cancel,
    End,
    ExitCode,
    Intent,
    Kind,
    Refusal,
    Start,
    Submitted,
)
from tasks.context import RunContext, Unit
from tasks.engine import Engine
from tasks.exclusions import Exclusion
from tasks.jobs import describe, resources
from tasks.situation import (
    Allocate,
    CancelJob,
    Close,
    Gather,
    GiveUp,
    Order,
    Quote,
    Rejected,
    Situation,
    Step,
    Submission,
    Submit,
    Survey,
    Void,
)
from tasks.survey import all_ends, survey


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What surveys and gathering have found since the last look. They serve one look."""

    nodes: tuple[NodeState, ...] | None = None
    excluded: Mapping[str, Exclusion] = field(default_factory=dict)
    evidence: Mapping[int, Evidence] = field(default_factory=dict)
    newest_commit: CommitRef | None = None


class Deeds:
    """One engine's hands. It remembers only what is its own: submissions, cancels, findings."""

    def __init__(self, context: RunContext, engine: Engine) -> None:
        self._context = context
        self._ledger = context.ledger
        self._cluster = context.cluster
        self._engine = engine
        self._clock = engine.clock
        self._earlier_ends: tuple[Attempt, ...] = ()
        self._findings = Findings()
        self.submissions: dict[str, Submission | Rejected] = {}
        self.cancelled_at_s: dict[int, float] = {}
        self._waits_for_site = False

    def prepare(self) -> None:
        """Read once what earlier attempts, of all stages, have decided about nodes."""
        self._earlier_ends = all_ends(self._ledger)

    def take_findings(self) -> Findings:
        """Hand out the findings and forget them: by the next look they are stale."""
        findings, self._findings = self._findings, Findings()
        return findings

    def do(self, step: Step, order: Order, seen: Situation) -> bool:
        """False when somebody else was faster, so that the steps after it may be out of date."""
        match step:
            case Survey():
                self._survey(seen)
            case Allocate():
                return self._allocate(step, order)
            case Submit():
                self._submit(step)
            case Void():
                start = Start(job=None, nonce=self._engine.nonce(), at=self._clock.now())
                self._ledger.claim_start(step.attempt.intent, start)
            case CancelJob():
                self._cancel(step)
            case Quote():
                self._ledger.claim_exit(step.attempt.intent, step.word)
            case Gather():
                self._gather(step.attempt, order, seen)
            case Close():
                self._close(step)
            case _:
                raise TypeError(f"{step} is for the runner, not a deed")
        return True

    def refuse(self, step: GiveUp, order: Order, seen: Situation) -> None:
        """Leave the reason to whoever looks later, unless an attempt's own end says it."""
        end = None if step.attempt is None else step.attempt.end
        if step.cancelled and end is not None and end.decision.action is Action.STOP:
            return
        refusal = Refusal(
            stage=order.stage,
            unit=step.unit.name,
            reason=step.reason,
            cancelled=step.cancelled,
            after=seen.attempts[-1].number if seen.attempts else None,
            by=self._engine.name,
            at=self._clock.now(),
        )
        self._ledger.put_refusal(refusal)

    def _survey(self, seen: Situation) -> None:
        closed = (*self._earlier_ends, *seen.attempts)
        found = survey(self._context, closed=closed, now=self._clock.now())
        self._findings = replace(self._findings, nodes=found.nodes, excluded=found.excluded)

    def _allocate(self, step: Allocate, order: Order) -> bool:
        unit, after, nonce = step.unit, step.after, self._engine.nonce()
        # First the floor: what a job commits after it has honoured a ceiling is not beyond it.
        floor = newest_commit(self._ledger) if unit.resumes else None
        ceiling, skip_data = self._rollback(after)
        intent = Intent(
            run=order.run,
            stage=order.stage,
            unit=unit.name,
            attempt=step.number,
            token=f"{order.run}-{order.stage}-{step.number:04d}-{nonce}",
            nonce=nonce,
            cluster=order.cluster,
            user=self._engine.user,
            why=step.why,
            after=None if after is None else after.number,
            nodes=unit.nodes,
            most_nodes=step.most_nodes,
            ranks_per_node=unit.ranks_per_node,
            elements=self._elements(unit, after),
            node_list=unit.node_list,
            excluded=step.excluded,
            fingerprint=order.fingerprint,
            floor=floor,
            ceiling=ceiling,
            skip_data=skip_data,
            created_at=self._clock.now(),
        )
        # Before the claim: should its answer be lost, the intent is still known as ours.
        self.submissions[nonce] = Submission.DUE
        return self._ledger.claim_intent(intent).won

    def _elements(self, unit: Unit, after: Attempt | None) -> int:
        """As many as the unit and the site take. Each counts as a job against the site's limits, so
        an array that was one too many is halved."""
        if unit.elements == 1:
            return 1
        wanted = unit.elements
        if after is not None and after.end is not None:
            was_too_large = after.end.diagnosis.kind is Kind.LIMIT
            wanted = max(1, after.intent.elements // 2) if was_too_large else wanted
        return min(wanted, self._cluster.max_elements)

    def _rollback(self, after: Attempt | None) -> tuple[int | None, tuple[tuple[int, int], ...]]:
        """The ceiling of the next attempt, and the data it is to skip: what a step back ordered.

        Both are carried on from intent to intent until a job has honoured them.
        """
        if after is None:
            return None, ()
        ordered = after.end is not None and after.end.decision.action is Action.STEP_BACK
        if not (ordered or after.intent.ceiling is not None or after.intent.skip_data):
            return None, ()
        # Read anew: a job that was thought lost may have honoured it since it was closed.
        attempts = [
            one for one in self._ledger.attempts(after.intent.stage) if one.number <= after.number
        ]
        refs = [one.ref for one in counting_commits(self._ledger)] if ordered else []
        carrier = owed(attempts)
        return ceiling_of_next(attempts, refs), () if carrier is None else carrier.intent.skip_data

    def _submit(self, step: Submit) -> None:
        """The one sbatch of the attempt. It counts as sent from here on, whatever happens."""
        intent, unit = step.attempt.intent, step.unit
        self.submissions[intent.nonce] = Submission.SENT
        job = describe(self._context, intent, unit)
        try:
            job_id = self._cluster.submit(
                job,
                resources(
                    self._context,
                    unit,
                    elements=intent.elements,
                    excluded=intent.excluded,
                    most_nodes=intent.most_nodes,
                ),
            )
        except SubmitLimited as error:
            self.submissions[intent.nonce] = Rejected(message=str(error), for_now=True)
            if not self._waits_for_site:
                self._context.eyes.say(f"waiting until the site takes more jobs: {error}")
            self._waits_for_site = True
            return
        except SubmitRejected as error:
            self.submissions[intent.nonce] = Rejected(message=str(error))
            return
        except SubmitDoubtful as error:
            self._context.eyes.say(f"looking for attempt {intent.attempt} in the queue: {error}")
            return
        self._waits_for_site = False
        submitted = Submitted(job_id=job_id, nonce=self._engine.nonce(), at=self._clock.now())
        self._ledger.claim_submitted(intent, submitted)

    def _cancel(self, step: CancelJob) -> None:
        intent = step.attempt.intent
        cancel = Cancel(
            who=step.who, why=step.why, nonce=self._engine.nonce(), at=self._clock.now()
        )
        self._ledger.claim_cancel(intent, cancel)
        if step.job_id is not None:
            self._cluster.cancel(job_id=step.job_id, token=intent.token)
            self.cancelled_at_s[intent.attempt] = self._clock.monotonic()

    def _gather(self, attempt: Attempt, order: Order, seen: Situation) -> None:
        intent = attempt.intent
        resumes = any(unit.resumes for unit in order.units if unit.name == intent.unit)
        is_done = attempt.exit is not None and attempt.exit.code == ExitCode.DONE
        evidence = gather(
            attempt,
            seen.observations.get(intent.token),
            # Nobody is to blame for a job that is done, so it needs no cluster that answers.
            nodes=() if is_done else self._cluster.nodes(),
            folder=self._folder(intent),
            now=self._clock.now(),
            heartbeat_s=self._context.retry.heartbeat_s,
        )
        self._findings = replace(
            self._findings,
            evidence={**self._findings.evidence, intent.attempt: evidence},
            newest_commit=newest_commit(self._ledger) if resumes else self._findings.newest_commit,
        )

    def _close(self, step: Close) -> None:
        end = End(
            diagnosis=step.diagnosis,
            decision=step.decision,
            by=self._engine.name,
            nonce=self._engine.nonce(),
            at=self._clock.now(),
        )
        self._ledger.claim_end(step.attempt.intent, end)

    def _folder(self, intent: Intent) -> Path:
        return self._context.attempt_folder(intent.stage, intent.attempt)
