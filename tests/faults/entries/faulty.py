"""The job of the fault tests: on its first attempt it goes wrong as it is told, later it works.

What happens to it from outside (a cut node, a signal, a full disk) it only waits for.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from storage.checkpoint_records import Commit, FileRecord, Resume
from storage.checkpoints.sealing import encode_sealed
from storage.job import JobContext, JobExit
from storage.records import ExitCode, new_nonce

DEADLINE_S = 280.0
_NOTHING = FileRecord(key="none", size_bytes=0, crc64nvme="AAAAAAAAAAA=")


def run(context: JobContext) -> Mapping[str, Any]:
    """Carry out the part that the payload names; an attempt after `faulty_until` just works."""
    payload = context.job.payload
    _mark(context, "worked")
    _say_what_was_loaded(context)
    if context.attempt <= payload.get("faulty_until", 1):
        _PARTS[payload["part"]](context)
    return {"attempt": context.attempt}


def _mark(context: JobContext, name: str) -> None:
    """A file that tells who was here; its text is this process's id."""
    job, rank = os.environ["SLURM_JOB_ID"], context.identity.rank
    Path(context.job.folder, f"{name}.{job}.{rank}").write_text(str(os.getpid()))


def _say_what_was_loaded(context: JobContext) -> None:
    """As a trainer does before its first step: only then do the attempt's commits count."""
    intent = context.job.intent
    context.ledger.claim_resume(
        intent,
        Resume(
            source=intent.floor,
            world_size=context.identity.world_size,
            nonce=new_nonce(),
            at=datetime.now(UTC),
        ),
    )


def _commit(context: JobContext, step: int) -> None:
    """A checkpoint without bytes: only the record by which it counts."""
    commit = Commit(
        run=context.job.intent.run,
        attempt=context.attempt,
        step=step,
        save=new_nonce(),
        world_size=1,
        mesh={},
        metadata=_NOTHING,
        files=(),
        samples_consumed=0,
        samples_hash="",
        dataset_id="",
        model_hash="",
        metrics={},
        nonce=new_nonce(),
        at=datetime.now(UTC),
    )
    context.progress(step=step)
    key = context.ledger.keys.commit(context.attempt, step=step)
    context.store.create(key, encode_sealed(commit))


def _wait(context: JobContext) -> None:
    """Until the file `go` is there, if the payload names one."""
    go = context.job.payload.get("go")
    deadline = time.monotonic() + DEADLINE_S
    while go is None or not Path(go).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing happened within {DEADLINE_S:g} s")
        time.sleep(0.05)


def _train(context: JobContext) -> None:
    """Commits five steps more; heeds the warning before a time limit or a preemption."""
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, _: told.append(number))
    _commit(context, 5 * context.attempt)
    _mark(context, "committed")
    while not told:
        time.sleep(0.05)
    raise JobExit(ExitCode.RESUME, f"told by {signal.Signals(told[0]).name}")


def _train_deaf(context: JobContext) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    _commit(context, 5)
    _mark(context, "committed")
    _wait(context)


def _take_memory(context: JobContext) -> None:
    taken = []
    while True:
        taken.append(bytearray(2**20))


def _bug_at_once(context: JobContext) -> None:
    raise KeyError("hidden_size")


def _bug_later(context: JobContext) -> None:
    """After its first steps, as soon as they are known outside."""
    context.progress(step=3)
    intent = context.job.intent
    while not any(
        beat.step == 3 for beat in context.ledger.heartbeats(intent.stage, intent.attempt)
    ):
        time.sleep(0.1)
    raise RuntimeError("index 7 is out of bounds")


def _fill_disk(context: JobContext) -> None:
    Path(context.job.payload["scratch"], "big").write_bytes(bytes(2 * 2**20))


def _use_store(context: JobContext) -> None:
    """Reads and writes until the store answers no more."""
    key = f"{context.ledger.keys.root}/used"
    while True:
        context.store.put(key, b"x")
        time.sleep(0.2)


def _hang(context: JobContext) -> None:
    """Rank 1 is stuck on its own; rank 0 waits for it as in a collective."""
    from trainer.parallel.clock import CollectiveClock
    from trainer.spec import WatchdogSpec
    from trainer.vitals.watchdog import Watchdog

    # As the first collective would: all begin together.
    _mark(context, "ready")
    while len(list(Path(context.job.folder).glob("ready.*"))) < context.identity.world_size:
        time.sleep(0.05)
    collectives = CollectiveClock()
    spec = WatchdogSpec(factor=2.0, floor_s=4.0)
    with Watchdog(context, spec=spec, collectives=collectives) as watchdog:
        for step in range(1, 4):
            context.progress(step=step)
            watchdog.stepped(step)
            time.sleep(0.2)
        collectives.is_waiting = context.identity.rank == 0
        _wait(context)


_PARTS = {
    "bug at once": _bug_at_once,
    "bug later": _bug_later,
    "fill disk": _fill_disk,
    "hang": _hang,
    "take memory": _take_memory,
    "train": _train,
    "train deaf": _train_deaf,
    "use store": _use_store,
    "wait": _wait,
}
