"""The processes of a job: ranks and flushers, forked from a parent that has only imported."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from storage.checkpoint_records import Commit, SaveFacts
from storage.checkpoints import flusher
from storage.checkpoints.buffers import BufferFolder, Result
from storage.checkpoints.commits import read_commit
from storage.checkpoints.load import load_newest
from storage.checkpoints.ranks import Ranks
from storage.checkpoints.staging import Stager
from storage.job import JobContext, JobDescription, JobExit, RankIdentity
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.records import ExitCode
from tests.storage.checkpoints.kills.faults import Deed, Fault, Tracer, install
from tests.storage.checkpoints.kills.plans import Plan
from tests.storage.checkpoints.kills.training import LAST_STEP, Training

SIGNALS = {
    Deed.KILL: signal.SIGKILL,
    Deed.NODE: signal.SIGKILL,
    Deed.PAUSE: signal.SIGSTOP,
    Deed.ZOMBIE: signal.SIGSTOP,
    Deed.TWIN: signal.SIGSTOP,
}
GROUP_S = 30.0
LAST_OUTCOME_S = 30.0
LAST_PATIENCE_S = 0.5
"""How long a flusher that leaves waits for parts of ranks that may be dead, instead of seconds."""


class UnusedStore(ObjectStore):
    """Made before a fork and never used before it: it has no connection that two would share."""

    def adopt(self) -> UnusedStore:
        self._pid = os.getpid()
        return self


@dataclass(frozen=True, kw_only=True)
class Job(JobDescription):
    """A job whose processes take the store that their parent has made."""

    made: UnusedStore

    def open_ledger(self) -> Ledger:
        return Ledger(self.made.adopt(), RunKeys(prefix="", run=self.intent.run))


class Voice:
    """Events as lines of a file that all processes append to: what was said survives a SIGKILL."""

    def __init__(self, path: Path, **about: Any) -> None:
        self._path = path
        self._about = about
        self._file = -1

    def __call__(self, kind: str, **what: Any) -> None:
        if self._file < 0:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        event = {"kind": kind, "at": time.monotonic(), "pid": os.getpid(), **self._about, **what}
        os.write(self._file, json.dumps(event).encode() + b"\n")


def fork(work: Callable[[], None], *, log: Path) -> int:
    """The process id of a child that does the work; it dies with this process."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        work()
        code = 0
    except JobExit as error:
        print(f"left with {error.code}: {error}", flush=True)
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def record(say: Voice) -> Callable[[], None]:
    """Notes all lines that this process comes to; the returned function tells them."""
    times: dict[tuple[str, int], int] = {}

    def at(file: str, line: int, nth: int) -> None:
        times[file, line] = nth

    Tracer(at).install()

    def tell() -> None:
        sys.settrace(None)
        for (file, line), count in sorted(times.items()):
            say("line", file=file, line=line, times=count)

    return tell


def trace(fault: Fault | None, say: Voice) -> None:
    if fault is not None:
        install(fault, SIGNALS, met=lambda: say("met", fault=str(fault)))


def run_flusher(
    job: Job, identity: RankIdentity, say: Voice, fault: Fault | None, *, leaving: bool, lines: bool
) -> None:
    """As `slurm.sidecar_work` runs it."""
    flusher.LAST_PATIENCE_S = LAST_PATIENCE_S
    flusher.RETRY_S = 0.1
    leave = threading.Event()
    if leaving:
        leave.set()

    def hear() -> None:
        while True:
            signal.sigwait({signal.SIGUSR1})
            leave.set()

    threading.Thread(target=hear, daemon=True).start()
    tell = record(say) if lines else None
    trace(fault, say)
    flusher.run(JobContext(job, identity), leave)
    if tell is not None:
        tell()


def run_rank(
    job: Job,
    identity: RankIdentity,
    say: Voice,
    fault: Fault | None,
    *,
    plan: Plan,
    listener: socket.socket,
    lines: bool,
) -> None:
    """Loads, trains to the last step, and leaves."""
    torch.set_num_threads(1)
    _join(identity, listener)
    tell = record(say) if lines else None
    trace(fault, say)
    load_and_train(JobContext(job, identity), say, plan=plan)
    if tell is not None:
        tell()


def load_and_train(context: JobContext, say: Voice, *, plan: Plan) -> None:
    """A rank's work, once it has met the others."""
    is_own = plan.disk is not None and not plan.disk.is_shared
    training = Training(is_all_sharded=is_own)
    say("loading")
    commit = load_newest(context, training.state, model_hash="model", dataset_id="data")
    if commit is None:
        training.begin()
    step = 0 if commit is None else commit.step
    world = context.identity.world_size
    say("resumed", step=step, world=world, faults=training.faults(step=step))
    if step < LAST_STEP:
        _train(context, training, say, plan=plan, step=step)
    elif commit is not None:
        _keep(context, training, say, plan=plan, commit=commit)


def _join(identity: RankIdentity, listener: socket.socket) -> None:
    """The group meets at a socket that is bound already, so no other round can take its port."""
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        identity.world_size,
        is_master=identity.rank == 0,
        timeout=timedelta(seconds=GROUP_S),
        master_listen_fd=listener.detach() if identity.rank == 0 else None,
    )
    if identity.rank:
        listener.close()
    dist.init_process_group(
        "gloo",
        store=store,
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=timedelta(seconds=GROUP_S),
    )


def _train(context: JobContext, training: Training, say: Voice, *, plan: Plan, step: int) -> None:
    identity = context.identity
    folder = BufferFolder.of(token=context.job.intent.token, node=identity.node)
    stager = Stager(folder, buffers=plan.buffers)
    stager.prepare(training.state)
    said = _Outcomes(folder, say) if identity.rank == 0 else None
    facts = _first_facts(identity.world_size)
    for current in range(step + 1, LAST_STEP + 1):
        tiers = plan.tiers(current, is_last=current == LAST_STEP)
        must_save = current == LAST_STEP or (bool(tiers) and plan.waits)
        partial = training.partial_loss()
        while True:
            votes = torch.tensor(
                [
                    partial,
                    not stager.is_free,
                    said is not None and said.is_fenced(),
                    int.from_bytes(os.urandom(6)) if said is not None else 0,
                ],
                dtype=torch.int64,
            )
            dist.all_reduce(votes)
            summed, busy, fenced, drawn = votes.tolist()
            if fenced:
                raise JobExit(ExitCode.FENCED, "told by the flusher")
            if not (must_save and busy):
                break
            time.sleep(0.005)
        loss = training.loss(summed)
        if said is not None:
            say("loss", step=current, loss=loss)
        stager.finish()
        training.update(current, loss)
        if tiers and not busy:
            save = f"{drawn:013x}"
            stager.begin(training.state, replace(facts, step=current, save=save), tiers=tiers)
        time.sleep(plan.step_s)
    stager.finish()
    _end(stager, said, plan=plan)


def _keep(
    context: JobContext, training: Training, say: Voice, *, plan: Plan, commit: Commit
) -> None:
    """As the trainer does: the last step is saved anew where it was only on a disk."""
    identity, place = context.identity, {"attempt": commit.attempt, "step": commit.step}
    if Ranks().from_first(lambda: read_commit(context.ledger, **place) is not None):
        return
    folder = BufferFolder.of(token=context.job.intent.token, node=identity.node)
    stager = Stager(folder, buffers=plan.buffers)
    stager.prepare(training.state)
    said = _Outcomes(folder, say) if identity.rank == 0 else None
    facts = replace(_first_facts(identity.world_size), step=commit.step, save=commit.save)
    stager.begin(training.state, facts, tiers=plan.tiers(commit.step, is_last=True))
    _end(stager, said, plan=plan)


def _end(stager: Stager, said: _Outcomes | None, *, plan: Plan) -> None:
    """Not closed before the last save is heard of: the buffers would be nobody's meanwhile."""
    if said is not None and plan.awaits_last:
        said.wait_for(LAST_STEP)
    stager.close()


class _Outcomes:
    """What rank 0 hears of its saves."""

    def __init__(self, folder: BufferFolder, say: Voice) -> None:
        self._folder = folder
        self._say = say
        self._settled: set[int] = set()

    def is_fenced(self) -> bool:
        outcomes = self._folder.take_outcomes()
        for one in outcomes:
            self._settled.add(one.step)
            self._say("outcome", step=one.step, save=one.save, result=one.result, why=one.message)
        return any(one.result is Result.FENCED for one in outcomes)

    def wait_for(self, step: int) -> None:
        deadline = time.monotonic() + LAST_OUTCOME_S
        while step not in self._settled:
            if self.is_fenced():
                raise JobExit(ExitCode.FENCED, "told by the flusher")
            assert time.monotonic() < deadline, "nothing was heard of the last save"
            time.sleep(0.005)


def _first_facts(world_size: int) -> SaveFacts:
    return SaveFacts(
        step=0,
        save="",
        world_size=world_size,
        mesh={"dp_shard": world_size},
        samples_consumed=0,
        samples_hash="",
        dataset_id="data",
        model_hash="model",
        metrics={"loss": 1.0},
    )
