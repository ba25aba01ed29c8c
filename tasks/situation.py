"""What the loop's decision is made from, and what it may ask for: data only.

`tasks.attempts.advance` turns an `Order` and a `Situation` into steps; `tasks.runner` takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

from slurm.cluster import JobObservation, JobState, NodeState
from slurm.evidence import Evidence
from slurm.spec import RetrySpec
from storage.attempts import Attempt
from storage.checkpoint_records import CommitRef
from storage.records import Decision, Diagnosis, Exit, Stage, Why
from tasks.context import Unit
from tasks.exclusions import Exclusion


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How many seconds of its own watching an engine waits before it acts on what is missing.

    Time in which the engine itself was stopped, or Slurm or the store did not answer, counts little
    or nothing: it says nothing about the job.
    """

    doubt_s: float = 30.0
    """No job of the token in a healthy queue and no start: then the start is claimed as void."""
    linger_s: float = 10.0
    """An exit record stands and Slurm still says the job runs: then the job is cancelled."""
    settle_s: float = 60.0
    """Evidence that is still incomplete: then it is judged as it is."""
    cancel_s: float = 30.0
    """A cancelled job that still runs: it is cancelled again, then left to the fence."""
    hopeless_s: float = 30.0
    """A job that waits for what no waiting mends, at every look: then the attempt is given up."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What an engine was asked for. It stays the same while the engine lives.

    `past` are the attempts that had ended before it was asked: that they gave up does not bind it,
    for a person who runs the command again asks for another try. `who` it is, and, should a person
    want the end, `why_end`, are what the records say.
    """

    run: str
    stage: Stage
    units: tuple[Unit, ...]
    fingerprint: str
    cluster: str
    who: str
    why_end: str = "the run was cancelled on request"
    retry: RetrySpec
    past: frozenset[int] = frozenset()
    replaces_nodes: bool = False
    one_partition: bool = False
    tolerate: bool = False
    max_age_s: float | None = None
    patience: Patience = field(default_factory=Patience)


class Submission(Enum):
    """How far the creator of an intent has come with its one sbatch. Known to that engine alone."""

    DUE = "due"
    SENT = "sent"


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """sbatch refused, in its own words: nothing was queued.

    `for_now` when the site has only too many submitted jobs at the moment.
    """

    message: str
    for_now: bool = False


@dataclass(frozen=True, kw_only=True)
class Watch:
    """How long an engine has watched an open attempt without news, in seconds.

    `pending_s` is how long its job has been waiting for one and the same `pending_reason`.
    """

    traceless_s: float = 0.0
    silent_s: float = 0.0
    over_s: float = 0.0
    pending_reason: str = ""
    pending_s: float = 0.0

    def after(
        self,
        elapsed_s: float,
        *,
        before: Attempt | None,
        attempt: Attempt,
        observation: JobObservation | None,
    ) -> Watch:
        """The watch after one more look at the attempt, `elapsed_s` after the one before."""
        if observation is None:
            return self
        is_traceless = observation.state is JobState.ABSENT
        # An array whose next elements wait for nodes has nothing to say meanwhile.
        is_silent = (
            before is not None
            and observation.state is not JobState.PENDING
            and _signs_of_life(before) == _signs_of_life(attempt)
        )
        is_over = attempt.exit is not None or observation.state is JobState.ENDED
        reason = observation.reason if observation.state is JobState.PENDING else ""
        still_waits = bool(reason) and reason == self.pending_reason
        return Watch(
            traceless_s=self.traceless_s + elapsed_s if is_traceless else 0.0,
            silent_s=self.silent_s + elapsed_s if is_silent else 0.0,
            over_s=self.over_s + elapsed_s if is_over else 0.0,
            pending_reason=reason,
            pending_s=self.pending_s + elapsed_s if still_waits else 0.0,
        )


def _signs_of_life(attempt: Attempt) -> object:
    return attempt.start, attempt.elements, attempt.heartbeats


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What one engine sees now.

    `observations` is by token, and holds nothing while the cluster does not answer. `nodes` and
    `excluded` are what the last survey found, None without one.
    `submissions` is by the nonce of the intents that this engine created, the others are by
    attempt; `cancelled_s` says how long ago this engine last cancelled the attempt's job.
    """

    now: datetime
    attempts: tuple[Attempt, ...] = ()
    observations: Mapping[str, JobObservation] = field(default_factory=dict)
    nodes: tuple[NodeState, ...] | None = None
    excluded: Mapping[str, Exclusion] = field(default_factory=dict)
    submissions: Mapping[str, Submission | Rejected] = field(default_factory=dict)
    watches: Mapping[int, Watch] = field(default_factory=dict)
    cancelled_s: Mapping[int, float] = field(default_factory=dict)
    evidence: Mapping[int, Evidence] = field(default_factory=dict)
    newest_commit: CommitRef | None = None
    cancelled: bool = False


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Ask the cluster which nodes it has, and the ledger which of them are excluded."""


@dataclass(frozen=True, kw_only=True)
class Allocate:
    """Claim the next attempt of a unit by creating its intent.

    `most_nodes` is None for a unit that takes one number of nodes only.
    """

    unit: Unit
    number: int
    why: Why
    after: Attempt | None
    excluded: tuple[str, ...]
    most_nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Submit:
    """Call sbatch, once: this engine created the intent and has not called it yet."""

    attempt: Attempt
    unit: Unit


@dataclass(frozen=True, kw_only=True)
class Void:
    """Claim the start for nobody, so that no job of this attempt can pass it any more."""

    attempt: Attempt


@dataclass(frozen=True, kw_only=True)
class CancelJob:
    """Say who cancels and why, then cancel the job, where one is known."""

    attempt: Attempt
    job_id: str | None
    who: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Quote:
    """Let the last word of one of its elements stand for an attempt of which none lives."""

    attempt: Attempt
    word: Exit


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Look closely why an attempt is over: logs, nodes, accounting."""

    attempt: Attempt


@dataclass(frozen=True, kw_only=True)
class Close:
    """End an attempt with a diagnosis and a decision; what is read back afterwards holds."""

    attempt: Attempt
    diagnosis: Diagnosis
    decision: Decision


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing to do for so long. `for_nodes` says for which nodes an attempt waits to be made."""

    seconds: float
    for_nodes: str = ""


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Every unit has its last attempt, by the unit's name."""

    results: Mapping[str, Attempt]


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """The stage has no result. `attempt` is the one that decided it, where one did."""

    unit: Unit
    reason: str
    attempt: Attempt | None = None
    cancelled: bool = False


Step = (
    Survey | Allocate | Submit | Void | CancelJob | Quote | Gather | Close | Wait | Finish | GiveUp
)
