"""A rank that makes no step is noticed by itself, sooner than its peers' collectives time out.

Every rank watches its own steps. When none comes for k times the median, a rank that is stuck on
its own writes the exit record at once and names itself. A rank that stands in a collective is more
likely a victim: it names a neighbour whose process answers nothing, for a stopped one cannot speak
for itself; else it gives the culprit time to speak, and then names nobody.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from storage.errors import HeadraceError
from storage.job import JobContext, Peer
from storage.records import Exit, ExitCode, new_nonce
from trainer.parallel.clock import CollectiveClock
from trainer.spec import WatchdogSpec

MEMORY_STEPS = 128
VICTIM_PATIENCE = 1.5
RECORD_DEADLINE_S = 60.0
UNANSWERED_S = 1.5
"""Several times the interval at which neighbours answer each other."""


def hang_limit_s(step_s: Sequence[float], *, spec: WatchdogSpec) -> float:
    """How long the next step may take, given how long the last ones took."""
    if not step_s:
        return float("inf")
    return max(spec.floor_s, spec.factor * statistics.median(step_s))


class Watchdog:
    """Runs from the first `stepped` on, as a context manager, in a thread of its own."""

    def __init__(
        self, context: JobContext, *, spec: WatchdogSpec, collectives: CollectiveClock
    ) -> None:
        self._context = context
        self._spec = spec
        self._collectives = collectives
        self._step_s: deque[float] = deque(maxlen=MEMORY_STEPS)
        self._step = 0
        self._last: float | None = None
        self._suspended = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def stepped(self, step: int) -> None:
        """This rank finished a step."""
        now = time.monotonic()
        if self._last is not None:
            self._step_s.append(now - self._last)
        self._step, self._last = step, now

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """What happens inside has deadlines of its own, and does not count as a step."""
        self._suspended = True
        try:
            yield
        finally:
            self._last = time.monotonic()
            self._suspended = False

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._spec.floor_s / 4)):
            last = self._last
            if self._suspended or last is None:
                continue
            silent_s = time.monotonic() - last
            limit_s = hang_limit_s(tuple(self._step_s), spec=self._spec)
            if silent_s <= limit_s:
                continue
            is_victim = self._collectives.is_waiting
            # Whoever holds the others up stopped answering about when their steps ended.
            deaf = self._deaf(for_s=max(UNANSWERED_S, silent_s / 2)) if is_victim else ()
            if not is_victim or deaf or silent_s > limit_s * VICTIM_PATIENCE:
                self._give_up(silent_s=silent_s, limit_s=limit_s, is_victim=is_victim, deaf=deaf)

    def _deaf(self, *, for_s: float) -> tuple[Peer, ...]:
        peers = self._context.peers
        return () if peers is None else peers.unanswering(for_s=for_s)

    def _give_up(
        self, *, silent_s: float, limit_s: float, is_victim: bool, deaf: Sequence[Peer]
    ) -> None:
        identity = self._context.identity
        place = f"rank {identity.rank} on {identity.node}"
        blamed = tuple(sorted({peer.node for peer in deaf}))
        if deaf:
            named = ", ".join(str(peer) for peer in deaf)
            what = f"waits in a collective, and {named} answers nothing: stopped, or in a long call"
        elif is_victim:
            what = "waits in a collective for its peers, none of which has said that it is stuck"
        else:
            what = "is stuck outside any collective; its stacks are in its log"
            blamed = (identity.node,)
        error = (
            f"{place} {what}: no step since step {self._step}, {silent_s:.0f} s ago, and "
            f"train.watchdog allows {limit_s:.0f} s"
        )
        print(f"headrace: {error}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        # The store may be what hangs: the job leaves all the same.
        deadline = threading.Timer(RECORD_DEADLINE_S, os._exit, args=(int(ExitCode.HANG),))
        deadline.daemon = True
        deadline.start()
        record = Exit(
            code=ExitCode.HANG,
            rank=None if is_victim else identity.rank,
            node="" if is_victim else identity.node,
            error=error,
            blamed_nodes=blamed,
            nonce=new_nonce(),
            at=datetime.now(UTC),
        )
        try:
            self._context.ledger.claim_exit(self._context.job.intent, record)
        except HeadraceError as failure:
            print(f"headrace: exit record not written: {failure}", file=sys.stderr, flush=True)
        finally:
            os._exit(int(ExitCode.HANG))
