"""An engine as a process of its own, that is killed or stopped at a line of its own code.

`python -m tests.faults.engine TASK` reads a `Task` as JSON. The fault comes from a trace function,
so the product has no hook for it: at the line's first execution the process sends itself a signal.
Without a fault but with `record` it tells the lines that a whole run goes through.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import TypeAdapter

from slurm.snapshot import Snapshot
from slurm.spec import ClusterSpec
from slurm.submit import SlurmCluster
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.spec import StoreSpec
from tasks.context import RunContext, Unit
from tasks.engine import Engine
from tasks.eyes import Unseen
from tasks.runner import carry_out
from tests.faults.runs import PATIENCE, RETRY, STAGE, UNIT

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = (
    "tasks/deeds.py",
    "tasks/runner.py",
    "tasks/jobs.py",
    "storage/ledger.py",
    "slurm/submit.py",
    "slurm/commands.py",
)
"""Where the steps from an intent to its end are carried out."""
BEGIN = "_allocate"
DEADLINE_S = 240.0


@dataclass(frozen=True, order=True)
class Line:
    """A line of the product, by its file below the folder that holds the packages."""

    file: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to the engine, and before which line."""

    line: Line
    signal: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """All that an engine is told."""

    run: str
    workdir: Path
    store: StoreSpec
    cluster: ClusterSpec
    snapshot: Snapshot
    payload: Mapping[str, Any]
    fault: Fault | None = None
    record: bool = False

    def open_ledger(self) -> Ledger:
        return Ledger(ObjectStore(self.store), RunKeys(prefix=self.store.prefix, run=self.run))


class EngineProcess:
    """A running engine; `path` comes before its PATH, and so before that of Slurm's commands.

    It runs the snapshot's code, so that a line is the same one however long the tests take.
    """

    def __init__(self, task: Task, *, path: Path) -> None:
        body = TypeAdapter(Task).dump_json(task).decode()
        self._log = task.workdir / task.run / f"engine.{time.monotonic_ns()}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.faults.engine", body],
                env={
                    **os.environ,
                    "PATH": f"{path}:{os.environ['PATH']}",
                    "PYTHONPATH": f"{task.snapshot.path}:{ROOT}",
                },
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    @property
    def is_stopped(self) -> bool:
        """By SIGSTOP, as the kernel says; see proc(5)."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def wait_for_fault(self) -> bool:
        """Whether it was killed or stopped; False when it came to its end before that."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            if self.is_stopped:
                return True
            assert time.monotonic() < deadline, f"neither stopped nor ended: {self.told}"
            time.sleep(0.05)
        if self.process.returncode != 0:
            assert self.process.returncode == -signal.SIGKILL, self.told
        return self.process.returncode != 0

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def told(self) -> str:
        return self._log.read_text()[-3000:]

    def result(self) -> dict[str, Any]:
        """What it told at its end, which must be a good one."""
        told, _ = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, f"{self.process.returncode}: {self.told}"
        result: dict[str, Any] = json.loads(told)
        return result


class _Tracer:
    """Calls `at` with each new line of the protocol's files, once an attempt was begun."""

    def __init__(self, root: Path, at: Callable[[Line], None]) -> None:
        self._at = at
        self._files = {str(root / name): name for name in PROTOCOL}
        self._seen: set[Line] = set()
        self._has_begun = False

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        name = self._files.get(frame.f_code.co_filename)
        if name is None:
            return None
        if frame.f_code.co_name == BEGIN:
            self._has_begun = True
        return self._trace if self._has_begun else None

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            line = Line(self._files[frame.f_code.co_filename], frame.f_lineno)
            if line not in self._seen:
                self._seen.add(line)
                self._at(line)
        return self._trace


def main(body: str) -> None:
    task = TypeAdapter(Task).validate_json(body)
    lines: list[Line] = []

    def at(line: Line) -> None:
        lines.append(line)
        if task.fault is not None and line == task.fault.line:
            os.kill(os.getpid(), task.fault.signal)

    context = RunContext(
        run=task.run,
        workdir=task.workdir,
        cluster=SlurmCluster(task.cluster),
        cluster_spec=task.cluster,
        retry=RETRY.model_copy(update={"lost_after_s": 20.0}),
        store=task.store,
        ledger=task.open_ledger(),
        snapshot=task.snapshot,
        eyes=Unseen(),
    )
    unit = Unit(name=UNIT, entry="faulty", payload=task.payload, nodes=1, resumes=True)
    if task.fault is not None or task.record:
        tracer = _Tracer(task.snapshot.path, at)
        threading.settrace(tracer)
        sys.settrace(tracer)
    result = carry_out(context, STAGE, [unit], fingerprint="f.0", engine=Engine(patience=PATIENCE))[
        UNIT
    ]
    sys.settrace(None)
    told = [[line.file, line.number] for line in lines] if task.record else []
    print(json.dumps({"attempt": result.attempt.number, "lines": told}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
