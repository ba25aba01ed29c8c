"""What follows a diagnosis: done, resume, elsewhere, a step back, or an end. Pure.

Each kind of end has a budget of tries that progress refills, so that a job may be cut off a
thousand times on its way, and a mistake is not tried forty times.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm.spec import RetrySpec
from slurm.tracebacks import TRACEBACK, same_root
from storage.attempts import Attempt
from storage.checkpoint_records import CommitRef
from storage.records import Action, Decision, Diagnosis, Kind, Stage

_FINAL: Mapping[Kind, tuple[Action, str]] = {
    Kind.DONE: (Action.DONE, "the work is done"),
    Kind.OPERATOR: (Action.STOP, "a person stopped it"),
    Kind.CODE: (Action.GIVE_UP, "a mistake in code or spec stays one on every node"),
    Kind.MEMORY: (
        Action.GIVE_UP,
        "it would need as much memory again; raise the limit or ask less",
    ),
    Kind.DATA: (Action.GIVE_UP, "the data stay as they are; mend them first"),
}
FREE = frozenset({Kind.PREEMPTED, Kind.LOST, Kind.LIMIT, Kind.FENCED})
"""Ends that say nothing about the job: they cost no budget, however often they come."""
BUDGETS: Mapping[Kind, str] = {
    Kind.HARDWARE: "hardware",
    Kind.NETWORK: "network",
    Kind.CASCADE: "network",
    Kind.STORAGE: "storage",
    Kind.SITE: "site",
    Kind.HANG: "hang",
    Kind.UNKNOWN: "unknown",
    Kind.TIME: "unknown",
}
"""Which field of `RetrySpec` bounds the ends of a kind between two progresses."""
SUSPICIONS = frozenset({Kind.NETWORK, Kind.CASCADE, Kind.HANG})
"""Kinds that suspect a node and prove nothing: it is avoided at once, and ruled out at the second
time, as `tasks.exclusions` says."""
MANY_CULPRITS = 4
"""So many different nodes blamed in a row, without progress, are not what fails."""
_AT_ONCE = frozenset({Kind.PREEMPTED, Kind.TIME})
_SUDDEN = frozenset({Kind.HARDWARE, Kind.NETWORK, Kind.CASCADE, Kind.HANG, Kind.UNKNOWN})
"""Ends that no waiting mends, as it would a store or a site: who had got on goes on at once."""
_MAX_OUTPUT_FAILURES = 1
_MAX_STEPS_BACK = 1


@dataclass(frozen=True)
class _Past:
    """The attempts since the last one that made progress, the newest, which is judged, last.

    `begins_with_progress` is false where not even the first of them made any.
    """

    attempts: tuple[Attempt, ...]
    diagnoses: tuple[Diagnosis, ...]
    begins_with_progress: bool

    def of(self, *kinds: Kind) -> tuple[Diagnosis, ...]:
        return tuple(one for one in self.diagnoses if one.kind in kinds)

    def costing(self, budget: str) -> tuple[Diagnosis, ...]:
        """The ends that count against a budget. A time limit that came after progress does not."""
        is_chained = self.begins_with_progress and self.diagnoses[0].kind is Kind.TIME
        counted = self.diagnoses[1:] if is_chained else self.diagnoses
        return tuple(one for one in counted if BUDGETS.get(one.kind) == budget)

    @property
    def is_fresh(self) -> bool:
        """Whether the attempt that is judged made progress itself, so that nothing failed twice."""
        return self.begins_with_progress and len(self.attempts) == 1

    @property
    def blames_ever_others(self) -> bool:
        """Whether the last ends each blamed nodes that none of them had blamed before."""
        blamed = [set(one.culprit_nodes) for one in self.diagnoses if one.culprit_nodes]
        last = blamed[-MANY_CULPRITS:]
        return len(last) == MANY_CULPRITS and len(set().union(*last)) == sum(map(len, last))


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
    """An attempt that made progress counts itself, with a budget that it has just refilled."""
    everyone = [*history, attempt]
    gained = _steps_gained(everyone) if _keeps_its_own(everyone, newest) else None
    if gained is None:
        reached = [later.intent.floor for later in everyone[1:]] + [newest]
        gained = [
            _step(ref) > _step(one.intent.floor) for one, ref in zip(everyone, reached, strict=True)
        ]
    begin = max((index for index, gain in enumerate(gained) if gain), default=0)
    ends = [one.end.diagnosis if one.end else _NO_WORD for one in everyone[begin:-1]]
    return _Past(tuple(everyone[begin:]), (*ends, diagnosis), gained[begin])


_NO_WORD = Diagnosis(kind=Kind.UNKNOWN)


def _keeps_its_own(everyone: Sequence[Attempt], newest: CommitRef | None) -> bool:
    """Whether its checkpoints are its own affair, as a `command`'s are: there is none of ours.

    Then a step that was told of is taken for a step that is kept.
    """
    if newest is not None or everyone[0].intent.stage is not Stage.TRAIN:
        return False
    return all(one.resume is None and one.intent.floor is None for one in everyone)


def _steps_gained(everyone: Sequence[Attempt]) -> list[bool]:
    """For each attempt, whether it told of a step beyond all that were told of before."""
    told = [max((beat.step or 0 for beat in one.heartbeats), default=0) for one in everyone]
    return [step > max(told[:index], default=0) for index, step in enumerate(told)]


def _same_traceback(
    diagnosis: Diagnosis, past: _Past, _retry: RetrySpec, _history: Sequence[Attempt]
) -> Decision | None:
    """The same error twice, with no commit in between, is no accident, whatever came between."""
    now = past.attempts[-1].exit
    if diagnosis.kind is not Kind.UNKNOWN or now is None or TRACEBACK not in now.error:
        return None
    earlier = (one for one in past.attempts[:-1] if one.exit and same_root(one.exit, now))
    before = next(earlier, None)
    if before is None:
        return None
    return Decision(
        action=Action.GIVE_UP,
        reason=f"the same error as in attempt {before.number}, from the same step: a mistake in "
        "code, or in the data there",
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
    if len(past.of(Kind.OUTPUT)) > _MAX_OUTPUT_FAILURES:
        return Decision(
            action=Action.GIVE_UP,
            reason="several nodes cannot write the job's folder; choose a workdir that all mount",
        )
    return None


def _budget(
    diagnosis: Diagnosis, past: _Past, retry: RetrySpec, _history: Sequence[Attempt]
) -> Decision | None:
    kind = diagnosis.kind
    if kind in FREE or kind not in BUDGETS:
        return None
    name = BUDGETS[kind]
    budget: int = getattr(retry, name)
    counted = past.costing(name)
    if len(counted) <= budget:
        return None
    reason = f"{_ends(counted)} without progress; retry.{name} allows {budget}"
    return Decision(action=Action.GIVE_UP, reason=reason + _advice(kind, past, counted))


def _ends(counted: Sequence[Diagnosis]) -> str:
    """`3 ends of kind network or cascade`."""
    kinds = dict.fromkeys(one.kind.value for one in counted)
    return f"{len(counted)} {'end' if len(counted) == 1 else 'ends'} of kind {' or '.join(kinds)}"


def _advice(kind: Kind, past: _Past, counted: Sequence[Diagnosis]) -> str:
    """What a person may do about it."""
    if kind is Kind.TIME:
        return (
            "; each left to be resumed before there was anything new: raise "
            "cluster.time_limit_min, or checkpoint more often (train.checkpoint.every_steps); of a "
            "script of your own only command.progress shows that there is"
        )
    blamed = sorted({node for one in counted for node in one.culprit_nodes})
    if past.blames_ever_others:
        return f"; {_not_the_nodes(blamed)}"
    return f"; they blame {', '.join(blamed)}" if blamed else ""


def _not_the_nodes(blamed: Sequence[str]) -> str:
    return (
        f"each time other nodes were blamed ({', '.join(blamed)}), so the cause is likelier "
        "something that they share: network, storage, driver, or the code"
    )


def _try_again(diagnosis: Diagnosis, past: _Past, retry: RetrySpec, *, seed: int) -> Decision:
    kind, culprits = diagnosis.kind, diagnosis.culprit_nodes
    failures = len(past.of(kind) if kind in FREE else past.of(*(set(Kind) - FREE)))
    at_once = kind in _AT_ONCE or (kind in _SUDDEN and past.is_fresh)
    if at_once or (culprits and failures == 1):
        delay_s = 0.0
    else:
        delay_s = _backoff_s(retry, failures=failures, seed=seed)
    if culprits and past.blames_ever_others:
        blamed = sorted({node for one in past.diagnoses for node in one.culprit_nodes})
        return Decision(
            action=Action.RESUME,
            reason=f"no further node is excluded: {_not_the_nodes(blamed)}",
            delay_s=delay_s,
        )
    return Decision(
        action=Action.RETRY_ELSEWHERE if culprits else Action.RESUME,
        reason=_without(kind, culprits)
        if culprits
        else _WHY_AGAIN.get(kind, "the cause may have passed"),
        exclude_nodes=culprits,
        delay_s=delay_s,
    )


def _without(kind: Kind, culprits: Sequence[str]) -> str:
    names = ", ".join(culprits)
    if kind in SUSPICIONS:
        return f"without {names}, suspected and not proven: used only where no other node is left"
    return f"without {names}"


_WHY_AGAIN: Mapping[Kind, str] = {
    Kind.TIME: "time limit reached, or asked to leave; it goes on from what is committed",
    Kind.PREEMPTED: "preempted, which costs nothing; it goes on from what is committed",
    Kind.LIMIT: "the site takes more jobs when fewer are submitted",
    Kind.LOST: "no job carried it, so nothing was tried",
    Kind.FENCED: "another job held the attempt",
    Kind.CASCADE: "no rank says why, and no node looks ill; should it come again, probe the nodes "
    "with --force validate",
}


def _backoff_s(retry: RetrySpec, *, failures: int, seed: int) -> float:
    """Doubles with each failure; the jitter, from half to whole, is the same for every engine."""
    whole = min(retry.backoff_s * 2.0 ** min(failures - 1, 32), retry.backoff_max_s)
    jitter = random.Random(f"{seed}.{failures}").uniform(0.5, 1.0)
    return round(whole * jitter, 3)


def _step(ref: CommitRef | None) -> int:
    return -1 if ref is None else ref.step
