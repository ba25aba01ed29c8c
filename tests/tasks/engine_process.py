"""An engine as a process of its own, `python -m tests.tasks.engine_process`, to be killed in tests.

It reads a `Task` as JSON from its argument, tells what it sees as JSON lines on stdout, and ends
with the result. The cluster's kind is the task's: the same engine serves `local` and `slurm`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from slurm.cluster import open_cluster
from slurm.snapshot import take_snapshot
from slurm.spec import ClusterSpec, RetrySpec
from storage.attempts import Attempt
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.records import Stage
from storage.spec import StoreSpec
from tasks.context import RunContext, Unit
from tasks.eyes import Eyes
from tasks.runner import carry_out

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = Path(__file__).resolve().parent / "entries"
STAGE = Stage.SHARD
DEADLINE_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """All that an engine is told. The job's entry is `waiter`: it works until `<workdir>/go`."""

    run: str
    workdir: Path
    store: StoreSpec
    cluster: ClusterSpec
    payload: Mapping[str, Any] = field(default_factory=dict)

    def open_ledger(self) -> Ledger:
        return Ledger(ObjectStore(self.store), RunKeys(prefix=self.store.prefix, run=self.run))

    def let_jobs_end(self) -> None:
        (self.workdir / "go").touch()

    def jobs_past_the_start(self) -> dict[int, int]:
        """By attempt, how many jobs got as far as running their work."""
        counted: dict[int, int] = {}
        for mark in (self.workdir / self.run).rglob("worked.*"):
            attempt = int(mark.parent.name)
            counted[attempt] = counted.get(attempt, 0) + 1
        return counted

    def wait_for_work(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self.jobs_past_the_start():
            assert time.monotonic() < deadline, f"no job has worked within {DEADLINE_S:g} s"
            time.sleep(0.05)


class EngineProcess:
    """A running engine; its lines are read when it is waited for."""

    def __init__(self, task: Task) -> None:
        body = TypeAdapter(Task).dump_json(task).decode()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tasks.engine_process", body],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def wait(self) -> list[dict[str, Any]]:
        """What it told, the result last. It must have ended well."""
        told, _ = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, told
        return [json.loads(line) for line in told.splitlines()]


class _Teller(Eyes):
    def attempt_opened(self, attempt: Attempt) -> None:
        _tell("opened", attempt.number)

    def attempt_closed(self, attempt: Attempt) -> None:
        _tell("closed", attempt.number)

    def attempt_log(self, attempt: Attempt, lines: Sequence[str]) -> None:
        for line in lines:
            _tell("log", line)

    def attempt_progress(
        self, attempt: Attempt, *, step: int, numbers: Mapping[str, float]
    ) -> None:
        _tell("step", step)

    def say(self, message: str) -> None:
        _tell("said", message)

    def cancel_requested(self) -> bool:
        return False


def _tell(what: str, value: Any) -> None:
    print(json.dumps({what: value}), flush=True)


def told(lines: Sequence[Mapping[str, Any]], what: str) -> Iterator[Any]:
    return (line[what] for line in lines if what in line)


def main(body: str) -> None:
    task = TypeAdapter(Task).validate_json(body)
    env = {**task.cluster.env, "PYTHONPATH": str(ENTRIES)}
    spec = task.cluster.model_copy(update={"env": env})
    context = RunContext(
        run=task.run,
        workdir=task.workdir,
        cluster=open_cluster(spec, workdir=task.workdir),
        cluster_spec=spec,
        retry=RetrySpec(heartbeat_s=0.5),
        store=task.store,
        ledger=task.open_ledger(),
        snapshot=take_snapshot(task.workdir),
        eyes=_Teller(),
    )
    payload = {"go": str(task.workdir / "go"), **task.payload}
    unit = Unit(name="only", entry="waiter", payload=payload, nodes=spec.nodes)
    result = carry_out(context, STAGE, [unit], fingerprint="f.0")["only"]
    _tell("result", {"attempt": result.attempt.number, "outputs": dict(result.outputs)})


if __name__ == "__main__":
    main(sys.argv[1])
