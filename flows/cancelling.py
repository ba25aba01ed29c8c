"""`headrace cancel`: ends what runs of a run, from anywhere, and says what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from flows.console import Lines
from flows.names import attempt_title
from flows.opening import open_begun
from flows.spec import PipelineSpec
from slurm.cluster import open_cluster
from slurm.snapshot import Snapshot
from storage.attempts import Attempt
from storage.records import Stage
from tasks.cancelling import cancel_attempts, open_attempts
from tasks.context import RunContext
from tasks.eyes import Eyes

MOST_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Found:
    """The open attempts of a run: `ours` are of this cluster, `foreign` of others."""

    ours: tuple[Attempt, ...]
    foreign: tuple[Attempt, ...]


@contextmanager
def open_existing(spec: PipelineSpec, *, eyes: Eyes) -> Iterator[RunContext]:
    """The run as it is, to look after its jobs: nothing is claimed, and nothing gets submitted.

    Raises:
        HeadraceError: there is no such run.
    """
    with open_begun(spec) as (store, ledger, record):
        yield RunContext(
            run=spec.run,
            workdir=spec.workdir,
            cluster=open_cluster(spec.cluster, workdir=spec.workdir),
            cluster_spec=spec.cluster,
            retry=spec.retry,
            store=store,
            ledger=ledger,
            snapshot=Snapshot(
                path=spec.workdir / "code" / record.code,
                digest=record.code,
                git_commit=record.git_commit,
                git_dirty=record.git_dirty,
            ),
            eyes=eyes,
        )


def find_open(context: RunContext, stages: Sequence[Stage]) -> Found:
    """What there is to cancel."""
    found = open_attempts(context.ledger, stages)
    here = context.cluster.name if found else ""
    return Found(
        ours=tuple(one for one in found if one.intent.cluster == here),
        foreign=tuple(one for one in found if one.intent.cluster != here),
    )


def cancel(
    context: RunContext, attempts: Sequence[Attempt], *, why: str, stages: Sequence[Stage]
) -> tuple[Attempt, ...]:
    """Cancel these attempts, and those that a living engine made meanwhile; returns what is left.

    It makes none any more once it has seen one of them end by a cancel, or has heard of a wish that
    the run should end (`tasks.cancelling.ask_for_the_end`).
    """
    left: list[Attempt] = []
    for _ in range(MOST_ROUNDS):
        left += cancel_attempts(context, attempts, why=why)
        known = {one.intent.token for one in left}
        attempts = [one for one in find_open(context, stages).ours if one.intent.token not in known]
        if not attempts:
            break
    return (*left, *attempts)


class Wish(Lines):
    """The eyes of whoever cancels; what happens is told at once."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def attempt_opened(self, attempt: Attempt) -> None:
        """That it was open is known."""

    def say(self, message: str) -> None:
        self._tell(message)

    def _news(self, line: str) -> None:
        self._tell(line)

    def cancel_requested(self) -> bool:
        return True


def described(attempt: Attempt) -> str:
    """An open attempt, as the question whether to cancel it names it."""
    start, submitted = attempt.start, attempt.submitted
    if start is not None and start.job is not None:
        return f"{attempt_title(attempt)}, job {start.job.job_id} on {', '.join(attempt.nodes)}"
    if submitted is not None:
        return f"{attempt_title(attempt)}, job {submitted.job_id}, which has not started"
    return f"{attempt_title(attempt)}, whose job is not known yet"
