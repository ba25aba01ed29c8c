"""The sidecars of a job as the batch step sees them: started, kept, told when to leave, ended.

On every node a guard (`slurm.sidecar`) keeps the sidecar itself running. Here the guards are kept
running: by a step of srun's beside that of the ranks, or as processes of this host. Nothing that
becomes of a sidecar is an end of the job.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from slurm.answers import expand_nodes
from slurm.job_logs import SIDECAR_PATTERN, sidecars_log
from slurm.job_script import output_pattern
from slurm.launchers import NOT_LAUNCHED, failures, shell_code
from slurm.sidecar import GAVE_UP, LEAVING, pause_s
from storage.job import JobDescription

_POLL_S = 0.1
_STEADY_S = 60.0
_TELL_EVERY_S = 5.0
_KILL_PATIENCE_S = 1.0
_ASK_TIMEOUT_S = 5.0
_NAME = "sidecar"
_STEPS = "--format=%i|%j"
_MAX_NAMED = 8


def guard_command(job: JobDescription, *, leaving: bool = False) -> list[str]:
    python = job.rank_python or str(job.python)
    told = [LEAVING] if leaving else []
    return [python, "-P", "-m", "slurm.sidecar", str(job.folder / "job.json"), *told]


def guard_step_command(
    job: JobDescription, nodes: Sequence[str], *, leaving: bool = False
) -> list[str]:
    """A step that shares all that the job has with the ranks' own, which does not wait for it.

    Without `--wait=0` a site may end it soon after the first node has done its work.
    """
    return [
        "srun",
        "--overlap",
        f"--nodes={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cpus_per_rank * job.intent.ranks_per_node}",
        "--cpu-bind=none",
        "--kill-on-bad-exit=0",
        "--wait=0",
        f"--job-name={_NAME}",
        "--export=ALL",
        "--input=none",
        "--open-mode=append",
        f"--output={output_pattern(job, SIDECAR_PATTERN.format('%N'))}",
        *job.srun_options,
        *job.rank_prefix,
        *guard_command(job, leaving=leaving),
    ]


class Guards(Protocol):
    """What starts the guards of nodes, and knows of their ends."""

    def start(self, nodes: Sequence[str], *, leaving: bool) -> None: ...

    def ended(self) -> Mapping[str, int]:
        """The nodes whose guards have ended since this was last asked, each with its code."""

    def signal(self, number: signal.Signals) -> None: ...

    def kill(self) -> None:
        """End all of them, and what they guard."""


class LocalGuards:
    """One process for each node that this host stands for, in the process group of the job."""

    def __init__(self, job: JobDescription, *, logs: Path, environment: Mapping[str, str]) -> None:
        self._job = job
        self._logs = logs
        self._environment = environment
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, nodes: Sequence[str], *, leaving: bool) -> None:
        for node in nodes:
            with (self._logs / SIDECAR_PATTERN.format(node)).open("ab") as output:
                self._running[node] = subprocess.Popen(
                    guard_command(self._job, leaving=leaving),
                    env={**self._environment, "SLURMD_NODENAME": node},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )

    def ended(self) -> Mapping[str, int]:
        codes = {node: process.poll() for node, process in self._running.items()}
        gone = {node: shell_code(code) for node, code in codes.items() if code is not None}
        for node in gone:
            del self._running[node]
        return gone

    def signal(self, number: signal.Signals) -> None:
        for process in self._running.values():
            process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self._running.values():
            process.wait()


class SrunGuards:
    """Steps of srun's. The first is of all nodes; one that is started again, of those it is for."""

    def __init__(self, job: JobDescription, *, logs: Path, environment: Mapping[str, str]) -> None:
        self._job = job
        self._log = sidecars_log(logs)
        self._environment = environment
        self._job_id = environment.get("SLURM_JOB_ID", "")
        self._steps: set[subprocess.Popen[bytes]] = set()
        self._step_of: dict[str, subprocess.Popen[bytes]] = {}
        self._blamed: set[subprocess.Popen[bytes]] = set()
        self._read = self._log.stat().st_size if self._log.exists() else 0

    def start(self, nodes: Sequence[str], *, leaving: bool) -> None:
        with self._log.open("ab") as words:
            step = subprocess.Popen(
                guard_step_command(self._job, nodes, leaving=leaving),
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
            )
        self._steps.add(step)
        self._step_of |= dict.fromkeys(nodes, step)

    def ended(self) -> Mapping[str, int]:
        codes = {step: step.poll() for step in self._steps}
        said = self._new_words()
        gone: dict[str, int] = {}
        for one in failures(said):
            for node in expand_nodes(one.node or ""):
                if (step := self._step_of.pop(node, None)) is not None:
                    self._blamed.add(step)
                    gone[node] = one.code
        for node, step in tuple(self._step_of.items()):
            if (code := codes.get(step)) is not None:
                del self._step_of[node]
                gone[node] = self._code_of_rest(step, code, said)
        # A step of which all nodes are told of already may still have to end itself.
        self._steps -= {step for step, code in codes.items() if code is not None}
        return gone

    def _code_of_rest(self, step: subprocess.Popen[bytes], code: int, said: str) -> int:
        """How a guard ended of which srun, that left with `code`, has said nothing."""
        if code > 0 and step in self._blamed:
            return 0
        return 1 if code == 0 and NOT_LAUNCHED.search(said) else shell_code(code)

    def _new_words(self) -> str:
        """The whole lines that were written since this was last asked."""
        try:
            with self._log.open("rb") as words:
                words.seek(self._read)
                whole = words.read().rpartition(b"\n")[0]
        except OSError:
            return ""  # How srun left tells of them, too, only later.
        self._read += len(whole)
        return whole.decode(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        for step in self._steps:
            step.send_signal(number)

    def kill(self) -> None:
        """By srun, which takes SIGTERM for that wish, and by Slurm's controller: srun passes one
        signal on after the other, and waits for a dead node with each."""
        self.signal(signal.SIGTERM)
        listed = self._ask("squeue", "--noheader", "--steps", f"--jobs={self._job_id}", _STEPS)
        ours = [step for step, _, name in (line.partition("|") for line in listed) if name == _NAME]
        if ours:
            self._ask("scancel", "--ctld", "--signal=KILL", *ours)
        deadline = time.monotonic() + _KILL_PATIENCE_S
        while any(step.poll() is None for step in self._steps) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self.signal(signal.SIGKILL)

    def _ask(self, *command: str) -> list[str]:
        """What one of Slurm's commands prints; nothing where it cannot be asked now."""
        try:
            with self._log.open("ab") as words:
                done = subprocess.run(
                    command,
                    check=False,
                    env=dict(self._environment),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=words,
                    text=True,
                    timeout=_ASK_TIMEOUT_S,
                )
        except (OSError, subprocess.TimeoutExpired):
            return []
        return done.stdout.splitlines()


class Sidecars:
    """The sidecars of a job, watched by a thread, so that nothing waits for them but their end."""

    def __init__(self, guards: Guards, nodes: Sequence[str], *, log: Path) -> None:
        self._guards = guards
        self._nodes = tuple(nodes)
        self._log = log
        self._awaited: set[str] = set()
        self._lost: set[str] = set()
        self._leaving = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sidecars", daemon=True)

    def start(self) -> None:
        self._awaited = set(self._nodes)
        self._thread.start()

    def tell(self) -> None:
        """Say that the ranks are over: what is left to do is done, and nothing more will come."""
        self._leaving.set()

    def finish(self, limit_s: float) -> bool:
        """Tell them, wait so long for what is left to do, and end the rest.

        Returns whether all of them had done their work.
        """
        if self._awaited:
            left = f"at most {limit_s:g} s are left for {_spell(self._awaited)}"
            self._say(f"the ranks are over; {left}")
        self.tell()
        if self._thread.is_alive():
            self._thread.join(limit_s)
            self._stopped.set()
            self._thread.join()
        if not self._awaited:
            return True
        self._say(f"not done after {limit_s:g} s on {_spell(self._awaited)}; killing them")
        self._guards.kill()
        return False

    def _watch(self) -> None:
        started, brief, told_at = time.monotonic(), 0, float("-inf")
        self._start(self._nodes)
        while self._awaited and not self._stopped.wait(_POLL_S):
            self._note_ends()
            if self._leaving.is_set() and time.monotonic() - told_at >= _TELL_EVERY_S:
                # Told again, since nobody hears srun's signals before its tasks are there.
                self._guards.signal(signal.SIGUSR1)
                told_at = time.monotonic()
            if self._lost and time.monotonic() - started >= pause_s(brief):
                brief = 0 if time.monotonic() - started > _STEADY_S else brief + 1
                started, again = time.monotonic(), sorted(self._lost)
                self._lost.clear()
                self._start(again)

    def _start(self, nodes: Sequence[str]) -> None:
        try:
            self._guards.start(nodes, leaving=self._leaving.is_set())
        except OSError as error:
            self._say(f"cannot be started: {error}")
            self._lost |= set(nodes)

    def _note_ends(self) -> None:
        for node, code in self._guards.ended().items():
            if code == 0 or (code == GAVE_UP and self._leaving.is_set()):
                self._awaited.discard(node)
            else:
                self._lost.add(node)
                self._say(f"that of {node} is gone ({code}); starting it again")

    def _say(self, words: str) -> None:
        try:
            with self._log.open("a") as log:
                log.write(f"headrace: sidecars: {words}\n")
        except OSError:
            print(f"headrace: sidecars: {words}", flush=True)


def _spell(nodes: Collection[str]) -> str:
    named = ", ".join(sorted(nodes)[:_MAX_NAMED])
    return named if len(nodes) <= _MAX_NAMED else f"{named} and {len(nodes) - _MAX_NAMED} more"
