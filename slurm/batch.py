"""The batch step of every job: passes the start or leaves, launches the ranks, has the last word.

Run as `python -P -m slurm.batch <job.json>` on the job's first node, before any rank. The start
register has one winner; whoever is not it leaves here with `FENCED` and has touched nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from slurm.answers import expand_nodes
from slurm.job_logs import element_folder, rank_tail, sidecars_log
from slurm.launchers import TIMED_OUT, Ended, Limits, run_local, run_srun
from slurm.sidecars import LocalGuards, Sidecars, SrunGuards
from storage.errors import HeadraceError, StoreError
from storage.job import JobDescription
from storage.ledger import Ledger
from storage.probe import check_from_job
from storage.records import Exit, ExitCode, JobIdentity, Start, new_nonce

_LOG_BYTES = 6000
DEAD_NODE_PATIENCE_S = 2.0
"""srun waits for the ranks of a dead node until Slurm gives the node up, minutes later at most
sites. The batch step waits this long, so that the other nodes are free for the next attempt."""
DRAIN_S = 600.0
"""Sidecars may finish their work for so long after the ranks are over. Where Slurm itself ends the
job it leaves them less, its KillWait."""
DEAD_NODE_DRAIN_S = 1.0
"""After the patience above: without the part of the node that is gone, little can be finished."""
TIMED_OUT_DRAIN_S = 30.0
"""At the time limit that the batch step keeps itself: as long as Slurm waits at most sites."""
_DRAINS_S: Mapping[int | None, float] = {
    ExitCode.PEER_LOST: DEAD_NODE_DRAIN_S,
    TIMED_OUT: TIMED_OUT_DRAIN_S,
}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which job this is and where it was put, read from what Slurm or the local keeper set."""

    job_id: str
    restart_count: int
    nodes: tuple[str, ...]
    element: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Placement:
        named = environ.get("HEADRACE_NODES")
        nodes = named.split(",") if named else expand_nodes(environ["SLURM_JOB_NODELIST"])
        element = environ.get("SLURM_ARRAY_TASK_ID")
        return cls(
            # Each element has an id of its own, too, by which nobody else knows it.
            job_id=environ["SLURM_JOB_ID" if element is None else "SLURM_ARRAY_JOB_ID"],
            restart_count=int(environ.get("SLURM_RESTART_COUNT", "0")),
            nodes=tuple(nodes),
            element=None if element is None else int(element),
        )

    @property
    def head(self) -> str:
        return self.nodes[0]


class Signals:
    """Keeps the batch step alive through the signals that are meant for the ranks."""

    def __init__(self) -> None:
        self.ended_by: signal.Signals | None = None
        self._forward: Callable[[int], None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._receive)

    def forward_to(self, forward: Callable[[int], None]) -> None:
        self._forward = forward
        if self.ended_by is not None:
            forward(self.ended_by)

    def end_after(self, delay_s: float) -> None:
        """Kill what launches the ranks, should it still be there then."""
        if self._forward is not None:
            timer = threading.Timer(delay_s, self._forward, args=(signal.SIGKILL,))
            timer.daemon = True
            timer.start()

    def _receive(self, number: int, _: object) -> None:
        if number != signal.SIGUSR2:
            self.ended_by = signal.Signals(number)
        if self._forward is not None:
            self._forward(number)


def pass_start(ledger: Ledger, job: JobDescription, placement: Placement) -> ExitCode | None:
    """Claim the start. None means that this job, and no other, may go on.

    The elements of an array are one job to the attempt's register, whichever comes first. Each then
    has a register of its own, in which it is alone: so a requeued element is told from another one.
    """
    me = JobIdentity(
        job_id=placement.job_id,
        token=job.intent.token,
        restart_count=placement.restart_count,
        host=socket.gethostname(),
    )
    start = Start(
        job=me,
        element=placement.element,
        nodes=placement.nodes,
        nonce=new_nonce(),
        at=datetime.now(UTC),
    )
    claim = ledger.claim_start(job.intent, start)
    if placement.element is not None and _is_same_job(me, claim.record.job):
        claim = ledger.claim_element_start(job.intent, placement.element, start)
    if not claim.won:
        return _reason_to_leave(me, claim.record.job)
    if ledger.is_superseded(job.intent):
        _say("this attempt was closed, or another was made in its place; leaving")
        return ExitCode.FENCED
    return None


def _reason_to_leave(me: JobIdentity, winner: JobIdentity | None) -> ExitCode:
    if winner is None:
        _say("the attempt was given up before this job began; leaving")
        return ExitCode.FENCED
    if _is_same_job(me, winner) and me.restart_count > winner.restart_count:
        _say("Slurm requeued this job, and retries have another owner; leaving to be resumed")
        return ExitCode.RESUME
    _say(f"job {winner.job_id} holds this attempt; leaving")
    return ExitCode.FENCED


def _is_same_job(me: JobIdentity, winner: JobIdentity | None) -> bool:
    return winner is not None and (winner.job_id, winner.token) == (me.job_id, me.token)


def run_batch(job: JobDescription, placement: Placement, signals: Signals) -> int:
    """Carry the job out and return the code to leave with.

    Raises:
        StoreError: the ledger cannot be reached, or is another one than the run's.
    """
    ledger = job.open_ledger()
    check_from_job(ledger, job.intent)
    leave = pass_start(ledger, job, placement)
    if leave is ExitCode.FENCED:
        return leave
    if leave is not None:
        words = "requeued by Slurm after it had started"
        return _last_word(ledger, job, placement, Ended(code=leave, words=words))
    environment = _environment(job, placement)
    sidecars = None if job.sidecar is None else _sidecars(job, placement, environment)
    code = None
    try:
        ended = _launch(ledger, job, placement, signals, environment=environment, sidecars=sidecars)
        if signals.ended_by is not None and ended.code != 0:
            words = f"ended by {signals.ended_by.name}\n{ended.words}".strip()
            ended = Ended(code=ended.code, rank=ended.rank, node=ended.node, words=words)
        code = _last_word(ledger, job, placement, ended)
        code = TIMED_OUT if ended.timed_out else code
    finally:
        if sidecars is not None:
            sidecars.finish(_DRAINS_S.get(code, DRAIN_S))
    return code


def _environment(job: JobDescription, placement: Placement) -> dict[str, str]:
    """What ranks and sidecars find in their environment."""
    is_local = job.launcher == "local"
    element = {} if placement.element is None else {"HEADRACE_ELEMENT": str(placement.element)}
    return {
        **os.environ,
        "HEADRACE_NODES": ",".join(placement.nodes),
        "HEADRACE_MASTER_ADDR": "127.0.0.1" if is_local else placement.head,
        "HEADRACE_MASTER_PORT": str(_free_port()),
        **element,
    }


def _sidecars(
    job: JobDescription, placement: Placement, environment: Mapping[str, str]
) -> Sidecars:
    logs = element_folder(job.folder, placement.element)
    kind = LocalGuards if job.launcher == "local" else SrunGuards
    guards = kind(job, logs=logs, environment=environment)
    return Sidecars(guards, placement.nodes, log=sidecars_log(logs))


def _launch(
    ledger: Ledger,
    job: JobDescription,
    placement: Placement,
    signals: Signals,
    *,
    environment: Mapping[str, str],
    sidecars: Sidecars | None,
) -> Ended:
    def on_start(forward: Callable[[int], None]) -> None:
        signals.forward_to(forward)
        # After the ranks, so that those come first to whoever starts them.
        if sidecars is not None:
            sidecars.start()

    def on_failure(ended: Ended) -> None:
        if ended.timed_out or signals.ended_by is not None:
            return
        if _last_word(ledger, job, placement, ended) == ExitCode.PEER_LOST:
            signals.end_after(DEAD_NODE_PATIENCE_S)
            if sidecars is not None:
                sidecars.tell()

    if job.launcher != "local":
        return run_srun(
            job,
            logs=element_folder(job.folder, placement.element),
            environment=environment,
            nodes=placement.nodes,
            on_start=on_start,
            on_failure=on_failure,
        )
    limits = Limits(
        limit_s=float(environment["HEADRACE_TIME_LIMIT_S"]),
        lead_s=float(environment["HEADRACE_SIGNAL_LEAD_S"]),
    )
    return run_local(
        job,
        environment=environment,
        nodes=placement.nodes,
        limits=limits,
        on_start=on_start,
        on_failure=on_failure,
    )


def _last_word(ledger: Ledger, job: JobDescription, placement: Placement, ended: Ended) -> int:
    """Write the exit record unless a rank did, and return the code of the one that stands."""
    silent = ended.code == 0
    words = "every rank left with 0 and none said that the work is done" if silent else ended.words
    log = rank_tail(
        element_folder(job.folder, placement.element),
        rank=ended.rank or 0,
        nodes=[ended.node or placement.head],
        size_bytes=_LOG_BYTES,
    )
    record = Exit(
        code=ExitCode.CRASHED if silent else ended.code,
        element=placement.element,
        rank=ended.rank,
        node=ended.node or placement.head,
        error=f"{words}\n{log}".strip(),
        nonce=new_nonce(),
        at=datetime.now(UTC),
    )
    return ledger.claim_word(job.intent, record).record.code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _say(message: str) -> None:
    print(f"headrace: {message}", flush=True)


def main(arguments: Sequence[str]) -> int:
    signals = Signals()
    job = JobDescription.read(Path(arguments[0]))
    placement = Placement.from_environment()
    which = "" if placement.element is None else f", element {placement.element},"
    _say(f"job {placement.job_id}{which} on {', '.join(placement.nodes)}: {job.intent.token}")
    try:
        code = run_batch(job, placement, signals)
    except StoreError as error:
        _say(str(error))
        code = ExitCode.STORAGE
    except HeadraceError as error:
        _say(f"{type(error).__name__}: {error}")
        code = ExitCode.CRASHED
    _say(f"leaving with {int(code)}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
