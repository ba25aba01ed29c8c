"""The entry of a `command:` job: a training script that is not ours, carried like one that is.

It is started on every node or rank, told when to save and leave, followed by what it prints, and
its end is put into the words of the exit record. Its checkpoints are its own affair: it is handed a
folder that all attempts of the run share, and is expected to go on from what it finds there.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import IO, Any

from pydantic import ValidationError

from storage.errors import SpecError
from storage.job import JobContext, JobExit
from storage.records import ExitCode
from trainer.signals import StopFlag, stop_on_signals
from trainer.spec import CommandJob, CommandSpec

TAIL_LINES = 80
_POLL_S = 0.1
_DRAIN_S = 5.0
_OWN_CODES = frozenset(ExitCode) - {ExitCode.DONE, ExitCode.CRASHED, ExitCode.FENCED}
_LAUNCHERS_OWN_ERROR = re.compile(r"ChildFailedError|SignalException")
_LAUNCHERS_OWN_LINE = re.compile(r"^[EWI]\d{4} .*torch/distributed/elastic")
_RANK_LABEL = re.compile(r"^\[rank\d+\]: ?")
_TRACEBACK = "Traceback (most recent call last)"


def run(context: JobContext) -> Mapping[str, Any]:
    """Runs the command to its end and returns the last step that it told of.

    Raises:
        SpecError: the command cannot be started.
        JobExit: it left with another code than 0, hung, or was asked to leave.
    """
    try:
        job = CommandJob.model_validate(context.job.payload)
    except ValidationError as error:
        raise SpecError(f"the job's payload is no CommandJob: {error}") from error
    job.checkpoints.mkdir(parents=True, exist_ok=True)
    with stop_on_signals() as stop:
        return _Command(context, job, stop).run()


class _Command:
    def __init__(self, context: JobContext, job: CommandJob, stop: StopFlag) -> None:
        self._context = context
        self._spec = job.command
        self._stop = stop
        self._output = Output(context, job.command)
        self._process = self._start(job)

    def run(self) -> Mapping[str, Any]:
        reader = threading.Thread(target=self._read, name="command-output", daemon=True)
        reader.start()
        try:
            code = self._attend()
        finally:
            self._process.kill()
            self._process.wait()
            # What the command left behind may hold its pipe open for ever.
            reader.join(timeout=_DRAIN_S)
        return self._ended(code)

    def _attend(self) -> int:
        told = False
        while (code := self._process.poll()) is None:
            if self._stop.is_set and not told:
                told = True
                self._say(f"asks the command to save and leave ({self._spec.stop_signal})")
                self._process.send_signal(signal.Signals[f"SIG{self._spec.stop_signal}"])
            self._require_progress()
            time.sleep(_POLL_S)
        return code

    def _start(self, job: CommandJob) -> subprocess.Popen[bytes]:
        environment = command_environment(os.environ, context=self._context, job=job)
        try:
            return subprocess.Popen(
                self._spec.argv,
                cwd=self._spec.cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise SpecError(
                f"command.argv {shlex.join(self._spec.argv)!r} cannot be started in "
                f"{str(self._spec.cwd)!r} on {self._context.identity.node}: {error.strerror}; "
                "correct command.argv or command.cwd, or load what it needs in cluster.setup"
            ) from None

    def _read(self) -> None:
        stream: IO[bytes] | None = self._process.stdout
        assert stream is not None
        with stream:
            for line in stream:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
                self._output.heard(line.decode(errors="replace").rstrip())

    def _require_progress(self) -> None:
        spec, silent_s, step = self._spec, self._output.silent_s, self._output.step
        if spec.hang_after_s is None or self._stop.is_set:
            return
        if step is None and silent_s > spec.start_timeout_s:
            raise JobExit(
                ExitCode.HANG,
                f"no first step for {silent_s:.0f} s, and command.start_timeout_s allows "
                f"{spec.start_timeout_s:g}; or command.progress {spec.progress!r} matches no line",
            )
        if step is not None and silent_s > spec.hang_after_s:
            raise JobExit(
                ExitCode.HANG,
                f"no new step for {silent_s:.0f} s, and command.hang_after_s allows "
                f"{spec.hang_after_s:g}; the last one was step {step}",
            )

    def _ended(self, code: int) -> Mapping[str, Any]:
        step = self._output.step
        if self._stop.is_set:
            raise JobExit(
                ExitCode.RESUME,
                f"{self._stop}; the command left with {_spell(code)}, last seen at step {step}",
                outputs={"final_step": step},
            )
        if step is None and self._spec.progress is not None:
            self._say(f"no line of the output matched command.progress {self._spec.progress!r}")
        if code == 0:
            return {"final_step": step}
        said = f"`{shlex.join(self._spec.argv)}` left with {_spell(code)}"
        known = ExitCode(code) if code in _OWN_CODES else ExitCode.CRASHED
        raise JobExit(known, f"{said}\n{self._output.tail()}", outputs={"final_step": step})

    def _say(self, words: str) -> None:
        print(f"headrace: {words}", flush=True)


class Output:
    """What the command has printed: its last lines, and the steps that it told of."""

    def __init__(self, context: JobContext, spec: CommandSpec) -> None:
        self._context = context
        self._pattern = None if spec.progress is None else re.compile(spec.progress)
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._changed_at_s = time.monotonic()
        self.step: int | None = None

    @property
    def silent_s(self) -> float:
        """Seconds since the last new step; before the first one, since the start."""
        return time.monotonic() - self._changed_at_s

    def heard(self, line: str) -> None:
        self._lines.append(line)
        found = None if self._pattern is None else self._pattern.search(line)
        if found is None:
            return
        numbers = {name: _number(text) for name, text in found.groupdict().items()}
        step = numbers.pop("step")
        if step is None:
            return
        if int(step) != self.step:
            self.step, self._changed_at_s = int(step), time.monotonic()
        told = {name: number for name, number in numbers.items() if number is not None}
        self._context.progress(step=int(step), **told)

    def tail(self) -> str:
        return own_words(self._lines)


def own_words(lines: Iterable[str]) -> str:
    """What the script said, without what torchrun adds: labels of ranks, and its own traceback."""
    kept = [line for line in lines if not _LAUNCHERS_OWN_LINE.match(line)]
    text = "\n".join(_RANK_LABEL.sub("", line) for line in kept)
    before, mark, last = text.rpartition(_TRACEBACK)
    if mark and _TRACEBACK in before and _LAUNCHERS_OWN_ERROR.search(last):
        return before.rstrip()
    return text


def command_environment(
    environ: Mapping[str, str], *, context: JobContext, job: CommandJob
) -> dict[str, str]:
    """What the command sees beside the job's own variables.

    Under `per: rank` it is what torchrun would set, so that a script can be run without it; under
    `per: node` it is what torchrun reads (`PET_*`), so that plain `torchrun script.py` spans the
    nodes. Headrace's own packages are not on its path; the folder of its interpreter is the last
    one on PATH, so that a `torchrun` beside it is found where there is no other.
    """
    identity = context.identity
    node_rank = identity.nodes.index(identity.node)
    master = {
        "MASTER_ADDR": identity.master_addr,
        "MASTER_PORT": str(identity.master_port),
    }
    per_node = str(job.ranks_per_node)
    place = {"NNODES": str(len(identity.nodes)), "NODE_RANK": str(node_rank)}
    if job.command.per == "node":
        launch = {**place, "NPROC_PER_NODE": per_node}
        launch |= {f"PET_{name}": value for name, value in {**launch, **master}.items()}
    else:
        launch = {
            **place,
            "RANK": str(identity.rank),
            "WORLD_SIZE": str(identity.world_size),
            "LOCAL_RANK": str(identity.local_rank),
            "LOCAL_WORLD_SIZE": per_node,
        }
    own = str(context.job.code)
    path = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part != own]
    kept = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    return {
        **kept,
        "PATH": os.pathsep.join([environ.get("PATH", os.defpath), str(context.job.python.parent)]),
        **({"PYTHONPATH": os.pathsep.join(path)} if any(path) else {}),
        **master,
        **launch,
        "HEADRACE_RUN": context.job.intent.run,
        "HEADRACE_ATTEMPT": str(context.attempt),
        "HEADRACE_CHECKPOINTS": str(job.checkpoints),
    }


def _number(text: str | None) -> float | None:
    """`1,000` and `1_000` are how people print steps; what is no finite number is passed over."""
    try:
        number = float((text or "").replace(",", "").replace("_", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _spell(code: int) -> str:
    return f"{code}" if code >= 0 else signal.Signals(-code).name
