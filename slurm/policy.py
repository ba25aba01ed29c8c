"""What follows a diagnosis: done, resume, elsewhere, a step back, or an end. Pure.

Each kind of end has a budget of tries that progress refills, so that a job may be cut off a
thousand times on its way, and a mistake is not tried forty times.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from slurm.spec import RetrySpec
from slurm.tracebacks import TRACEBACK, same_root
from storage.records import Action, Attempt, CommitRef, Decision, Diagnosis, Kind

_FINAL: dict[Kind, tuple[Action, str]] = {
    Kind.DONE: (Action.DONE, "the work is done"),
    Kind.OPERATOR: (Action.STOP, "a person stopped it"),
    Kind.CODE: (Action.GIVE_UP, "a mistake in code or spec stays one on every node"),
    Kind.MEMORY: (
        Action.GIVE_UP,
        "it would need as much memory again; raise the limit or ask less",
    ),
    Kind.DATA: (Action.GIVE_UP, "the data stay as they are; mend them first"),
}
_FREE = frozenset({Kind.PREEMPTED, Kind.LOST, Kind.LIMIT, Kind.FENCED})
_AT_ONCE = frozenset({Kind.PREEMPTED, Kind.TIME})
_BUDGET_OF: dict[Kind, str] = {
    Kind.HARDWARE: "hardware",
    Kind.NETWORK: "network",
    Kind.CASCADE: "network",
    Kind.STORAGE: "storage",
    Kind.SITE: "site",
    Kind.HANG: "hang",
    Kind.UNKNOWN: "unknown",
    Kind.TIME: "unknown",
}
_MAX_OUTPUT_FAILURES = 1
_MAX_STEPS_BACK = 1


@dataclass(frozen=True)
class _Past:
    """The attempts since the last one that made progress, the newest, which is judged, last."""

    attempts: tuple[Attempt, ...]
    kinds: tuple[Kind, ...]
    progressed: bool

    def count(self, *kinds: Kind) -> int:
        return sum(kind in kinds for kind in self.kinds)


def decide(
    diagnosis: Diagnosis,
    *,
    attempt: Attempt,
    history: Sequence[Attempt],
    retry: RetrySpec,
    seed: int,
    newest: CommitRef | None = None,
) -> Decision:
    """What follows the end of `attempt`.

    `history` holds the unit's earlier attempts, oldest first; `newest` is the newest commit now.
    `exclude_nodes` of the decision are those that this diagnosis blames, and no earlier ones.
    """
    kind = diagnosis.kind
    if kind in _FINAL:
        action, reason = _FINAL[kind]
        return Decision(action=action, reason=reason)
    past = _since_progress(diagnosis, attempt, history, newest)
    for judge in (_same_traceback, _divergence, _output, _budget):
        if (decision := judge(diagnosis, past, retry, history)) is not None:
            return decision
    return _try_again(diagnosis, past, retry, seed=seed)


def _since_progress(
    diagnosis: Diagnosis,
    attempt: Attempt,
    history: Sequence[Attempt],
    newest: CommitRef | None,
) -> _Past:
    """An attempt that gained a commit counts itself, with a budget that it has just refilled."""
    everyone = [*history, attempt]
    reached = [later.intent.floor for later in everyone[1:]] + [newest]
    gained = [
        _step(ref) > _step(one.intent.floor) for one, ref in zip(everyone, reached, strict=True)
    ]
    begin = max((index for index, gain in enumerate(gained) if gain), default=0)
    counted = everyone[begin:]
    kinds = [one.end.diagnosis.kind if one.end else Kind.UNKNOWN for one in counted[:-1]]
    return _Past(tuple(counted), (*kinds, diagnosis.kind), gained[-1])


def _same_traceback(
    diagnosis: Diagnosis, past: _Past, _retry: RetrySpec, _history: Sequence[Attempt]
) -> Decision | None:
    """The same error twice, with no commit in between, is no accident."""
    if diagnosis.kind is not Kind.UNKNOWN or len(past.attempts) < 2:
        return None
    before, now = past.attempts[-2].exit, past.attempts[-1].exit
    if before is None or now is None or TRACEBACK not in now.error:
        return None
    if not same_root(before, now):
        return None
    return Decision(
        action=Action.GIVE_UP, reason="the same error twice from the same step: a mistake in code"
    )


def _divergence(
    diagnosis: Diagnosis, _past: _Past, _retry: RetrySpec, history: Sequence[Attempt]
) -> Decision | None:
    if diagnosis.kind is not Kind.NUMERIC:
        return None
    back = sum(a.end is not None and a.end.decision.action is Action.STEP_BACK for a in history)
    if back >= _MAX_STEPS_BACK:
        return Decision(action=Action.GIVE_UP, reason="it diverged again after a step back")
    return Decision(
        action=Action.STEP_BACK, reason="go back one commit and skip the data that led here"
    )


def _output(
    diagnosis: Diagnosis, past: _Past, _retry: RetrySpec, _history: Sequence[Attempt]
) -> Decision | None:
    """One node that cannot write the log is its own fault; several are the path's."""
    if diagnosis.kind is not Kind.OUTPUT:
        return None
    if past.count(Kind.OUTPUT) > _MAX_OUTPUT_FAILURES:
        return Decision(
            action=Action.GIVE_UP,
            reason="several nodes cannot write the job's folder; choose a workdir that all mount",
        )
    return None


def _budget(
    diagnosis: Diagnosis, past: _Past, retry: RetrySpec, _history: Sequence[Attempt]
) -> Decision | None:
    kind = diagnosis.kind
    if kind in _FREE or kind not in _BUDGET_OF or (kind is Kind.TIME and past.progressed):
        return None
    name = _BUDGET_OF[kind]
    budget: int = getattr(retry, name)
    used = past.count(*(other for other, field in _BUDGET_OF.items() if field == name))
    if used <= budget:
        return None
    return Decision(
        action=Action.GIVE_UP,
        reason=f"{used} ends of kind {kind.value} without progress; retry.{name} allows {budget}",
    )


def _try_again(diagnosis: Diagnosis, past: _Past, retry: RetrySpec, *, seed: int) -> Decision:
    culprits = diagnosis.culprit_nodes
    failures = len(past.attempts)
    if diagnosis.kind in _AT_ONCE or (culprits and failures == 1):
        delay_s = 0.0
    else:
        delay_s = _backoff_s(retry, failures=failures, seed=seed)
    return Decision(
        action=Action.RETRY_ELSEWHERE if culprits else Action.RESUME,
        reason=f"without {', '.join(culprits)}" if culprits else _why_again(diagnosis.kind),
        exclude_nodes=culprits,
        delay_s=delay_s,
    )


def _why_again(kind: Kind) -> str:
    if kind is Kind.TIME:
        return "time limit reached, or asked to leave; it goes on from what is committed"
    if kind is Kind.LIMIT:
        return "the site takes more jobs when fewer are submitted"
    return "the cause may have passed"


def _backoff_s(retry: RetrySpec, *, failures: int, seed: int) -> float:
    """Doubles with each failure; the jitter, from half to whole, is the same for every engine."""
    whole = min(retry.backoff_s * 2.0 ** min(failures - 1, 32), retry.backoff_max_s)
    jitter = random.Random(f"{seed}.{failures}").uniform(0.5, 1.0)
    return round(whole * jitter, 3)


def _step(ref: CommitRef | None) -> int:
    return -1 if ref is None else ref.step
