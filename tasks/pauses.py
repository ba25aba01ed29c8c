"""An engine that leaves before its stage has a result: that ends nothing, and its jobs go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm.cluster import JobObservation, JobState
from storage.attempts import Attempt
from storage.errors import HeadraceError
from storage.records import Stage

ATTEMPTS_TOLD = 3


class Paused(HeadraceError):
    """The engine has left, as it was told to. Whoever carries the run on finds all in the ledger.

    `state` says what is waited for without the figures that change from look to look, and `wait_s`
    when to look again.
    """

    def __init__(self, *, stage: Stage, told: str, state: str, wait_s: float) -> None:
        self.stage = stage
        self.state = state
        self.wait_s = wait_s
        super().__init__(f"{stage}: {told}")


def waiting_for(
    open_attempts: Sequence[Attempt],
    observations: Mapping[str, JobObservation],
    *,
    for_nodes: str = "",
) -> tuple[str, str]:
    """What is waited for, with the figures of the moment and without them.

    `for_nodes` is what an attempt that is not made yet waits for, if that is nodes.
    """
    if not open_attempts:
        return (for_nodes or "the next attempt, after a delay",) * 2
    states = [_state(one, observations.get(one.intent.token)) for one in open_attempts]
    figures = [f"{state}{_step(one)}" for one, state in zip(open_attempts, states, strict=True)]
    return _listed(figures), _listed(states)


def _state(attempt: Attempt, seen: JobObservation | None) -> str:
    name = f"attempt {attempt.number}"
    if seen is None:
        return f"{name}, of whose job the cluster says nothing"
    job = "" if seen.job_id is None else f" (job {seen.job_id})"
    if attempt.exit is not None or seen.state is JobState.ENDED:
        return f"{name}{job}, which has left and is not settled yet"
    if seen.state is JobState.RUNNING:
        where = f" on {', '.join(seen.nodes[:8])}" if seen.nodes else ""
        return f"{name}{job}, running{where}"
    if seen.state is JobState.PENDING:
        reason = f" ({seen.reason})" if seen.reason else ""
        return f"{name}{job}, pending{reason}"
    if seen.state is JobState.ABSENT:
        return f"{name}, which no job in the queue belongs to"
    return f"{name}{job}, in the unknown state {seen.raw_state!r}"


def _step(attempt: Attempt) -> str:
    return "" if attempt.progress is None else f", at step {attempt.progress.step}"


def _listed(texts: Sequence[str]) -> str:
    left_out = len(texts) - ATTEMPTS_TOLD
    more = f"; and {left_out} more" if left_out > 0 else ""
    return "; ".join(texts[:ATTEMPTS_TOLD]) + more
