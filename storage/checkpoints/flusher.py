"""The flusher: a process beside the ranks of a node that sends their snapshots and commits them.

It lives apart from the ranks so that their interpreters are not held up, and so that what they have
sealed reaches the store though they die. Killed and started again, it goes on where it was: what
there is to do is what lies in the buffers' folder. Loads no torch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from mmap import mmap

from storage.checkpoint_records import CommitRef
from storage.checkpoints.buffers import (
    BufferFolder,
    BufferPlan,
    Outcome,
    Result,
    Sealed,
    Tier,
    open_buffer,
)
from storage.checkpoints.commit import await_parts, commit_parts
from storage.checkpoints.disk import Disk
from storage.checkpoints.flush import Destination, send_part
from storage.checkpoints.settings import disk_of
from storage.errors import CheckpointError, HeadraceError
from storage.job import JobContext, JobExit
from storage.records import ExitCode
from storage.transfers import transfers_at_once

POLL_S = 0.05
RANKS_AT_ONCE = 4
UPLOADS_AT_ONCE = 16
"""Parts of objects, of all ranks together."""
COMMIT_DEADLINE_S = 600.0
LAST_PATIENCE_S = 5.0
"""When the ranks are over, a part that does not come for so long is not awaited any more: its rank
may have died before it had sealed it."""
RETRY_S, RETRY_MAX_S = 1.0, 30.0
NICENESS = 5
TOLD_FAILURES = frozenset(10**power for power in range(9))
"""A disk that is full stays so for many saves, all of which would be told alike."""


def run(context: JobContext, leave: threading.Event) -> None:
    """The sidecar of a training job: works until `leave` is set and nothing is left to be sent."""
    os.nice(NICENESS)
    folder = BufferFolder.of_job(context.job, node=context.identity.node)
    with folder.held(), folder.flushing():
        for left in folder.remove_leftovers():
            _say(f"removed checkpoint buffers that an earlier job left in {left}")
        Flusher(context, folder, leave).work()
        # Still locked: one that waits for its turn must not lose its folder while it works.
        folder.remove()


class Flusher:
    """Does what the folder says, until told to leave."""

    def __init__(self, context: JobContext, folder: BufferFolder, leave: threading.Event) -> None:
        self._ledger = context.ledger
        self._intent = context.job.intent
        self._curve = context.job.metrics_file
        self._folder = folder
        self._disk = disk_of(context.job)
        self._leave = leave
        self._sending: dict[int, Future[None]] = {}
        self._committing: Future[None] | None = None
        self._uploads = ThreadPoolExecutor(transfers_at_once(UPLOADS_AT_ONCE))
        self._fenced = ""
        self._disk_failures = 0
        self._tidied: set[int] = set()
        self._plan: Callable[[int], BufferPlan] = cache(folder.plan)
        self._buffer: Callable[[int, int], mmap] = cache(self._open)

    def work(self) -> None:
        """Returns when told to leave and nothing waits any more."""
        with (
            self._uploads,
            ThreadPoolExecutor(RANKS_AT_ONCE) as senders,
            ThreadPoolExecutor(1) as committer,
        ):
            while True:
                leaving = self._leave.is_set()
                busy = self._send_next(senders) | self._commit_next(committer)
                if leaving and not busy:
                    return
                self._leave.wait(POLL_S) if not leaving else time.sleep(POLL_S)

    def _send_next(self, pool: ThreadPoolExecutor) -> bool:
        """One snapshot of a rank at a time, its earliest; whether any is there."""
        for rank, sending in list(self._sending.items()):
            if sending.done():
                sending.result()
                del self._sending[rank]
        sealed = self._folder.sealed()
        for one in sealed:
            if one.rank not in self._sending:
                self._sending[one.rank] = pool.submit(self._send, one)
        return bool(sealed) or bool(self._sending)

    def _send(self, sealed: Sealed) -> None:
        if Tier.DISK in sealed.tiers and self._disk is not None and not self._fenced:
            self._keep_near(sealed, self._disk)
        if Tier.STORE in sealed.tiers and not self._fenced:
            self._insist(
                lambda: self._send_to(self._ledger.store, sealed),
                f"step {sealed.facts.step} not sent yet",
            )
        self._folder.free(sealed)

    def _keep_near(self, sealed: Sealed, disk: Disk) -> None:
        """A nearer tier that fails costs time at most, so it is told and not insisted on."""
        keys, attempt = self._ledger.keys, self._intent.attempt
        rank, world_size = sealed.rank, sealed.facts.world_size
        try:
            if rank not in self._tidied:
                disk.remove_torn(keys, attempt=attempt, rank=rank, world_size=world_size)
                self._tidied.add(rank)
            self._send_to(disk, sealed)
            disk.make_room(keys, attempt=attempt, rank=rank, world_size=world_size)
            if sealed.rank == 0:
                self._send_curve()
        except HeadraceError as error:
            facts, self._disk_failures = sealed.facts, self._disk_failures + 1
            ref = CommitRef(step=facts.step, attempt=attempt, save=facts.save)
            disk.remove_part(keys, ref, sealed.rank)
            if self._disk_failures in TOLD_FAILURES:
                _say(
                    f"step {facts.step} is not on the disk tier (failure "
                    f"{self._disk_failures:,} of this flusher): {error}"
                )

    def _send_to(self, destination: Destination, sealed: Sealed) -> None:
        plan = self._plan(sealed.rank)
        send_part(
            destination,
            self._ledger.keys,
            attempt=self._intent.attempt,
            facts=sealed.facts,
            rank=sealed.rank,
            files=plan.files,
            layout=sealed.layout(plan),
            data=memoryview(self._buffer(sealed.rank, sealed.slot)),
            executor=self._uploads,
        )

    def _commit_next(self, pool: ThreadPoolExecutor) -> bool:
        """One save at a time, the earliest first; whether any waits."""
        if self._committing is not None and self._committing.done():
            self._committing.result()
            self._committing = None
        waiting = self._folder.waiting()
        if waiting and self._committing is None:
            self._committing = pool.submit(self._commit, waiting[0])
        return bool(waiting) or self._committing is not None

    def _commit(self, sealed: Sealed) -> None:
        result, message = Result.COMMITTED, ""
        try:
            if self._fenced:
                raise JobExit(ExitCode.FENCED, self._fenced)
            self._insist(lambda: self._commit_once(sealed), "not committed yet")
        except JobExit as fence:
            result, message = Result.FENCED, str(fence)
            self._fenced = message
        except CheckpointError as error:
            result, message = Result.FAILED, str(error)
            _say(message)
        outcome = Outcome(
            step=sealed.facts.step,
            save=sealed.facts.save,
            result=result,
            message=message,
            durable_s=time.time() - self._folder.waiting_since(sealed),
        )
        self._folder.settle(sealed, outcome)

    def _commit_once(self, sealed: Sealed) -> None:
        parts = await_parts(
            self._ledger,
            attempt=self._intent.attempt,
            facts=sealed.facts,
            deadline_s=COMMIT_DEADLINE_S,
            patience_s=lambda: LAST_PATIENCE_S if self._leave.is_set() else float("inf"),
        )
        self._send_curve()
        commit_parts(self._ledger, self._intent, sealed.facts, parts)

    def _send_curve(self) -> None:
        """So that a curve cut at a commit has no gap. It may be further on, and is never behind.

        Only whole lines count: rank 0 may be writing one.
        """
        try:
            body = self._curve.read_bytes()
        except FileNotFoundError:
            return
        key = self._ledger.keys.metrics(self._intent.stage, self._intent.attempt)
        self._ledger.store.put(key, body[: body.rfind(b"\n") + 1])

    def _insist(self, act: Callable[[], None], what: str) -> None:
        """Again until the store takes it: training goes on meanwhile, and saves are skipped."""
        pause_s = RETRY_S
        while True:
            try:
                return act()
            except (JobExit, CheckpointError):
                raise
            except HeadraceError as error:
                _say(f"{what}, trying again in {pause_s:g} s: {error}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    def _open(self, rank: int, slot: int) -> mmap:
        return open_buffer(self._folder.buffer(rank, slot))


def _say(text: str) -> None:
    print(f"headrace: {text}", flush=True)
