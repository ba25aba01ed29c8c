"""The two ways to start a job's ranks and to wait for them: srun, and processes of this host.

Both end the job at its first bad exit, and say which rank that was.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm.job_logs import NODE_PATTERN, srun_log
from slurm.job_script import output_pattern
from slurm.rank_output import RankOutput
from storage.job import JobDescription
from storage.records import ExitCode

TIMED_OUT = 124
"""How the batch step leaves at the time limit that it keeps itself, as timeout(1) does."""

GRACE_S = 5.0
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the ranks ended: a code as a shell would give it, and who was the first to fail."""

    code: int
    rank: int | None = None
    node: str | None = None
    words: str = ""
    timed_out: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The time limit that the batch step itself keeps where no Slurm does, from now on."""

    lead_s: float
    limit_s: float


def rank_command(job: JobDescription) -> list[str]:
    python = job.rank_python or str(job.python)
    return [python, "-P", "-m", "slurm.rank", str(job.folder / "job.json")]


def srun_command(job: JobDescription, *, num_nodes: int) -> list[str]:
    """Asks for everything by name: what srun takes from sbatch differs between versions.

    `num_nodes` is what the job was given, which the intent may leave open.
    """
    intent = job.intent
    return [
        "srun",
        f"--nodes={num_nodes}",
        f"--ntasks={num_nodes * intent.ranks_per_node}",
        f"--ntasks-per-node={intent.ranks_per_node}",
        f"--cpus-per-task={job.cpus_per_rank}",
        "--kill-on-bad-exit=1",
        "--export=ALL",
        "--input=none",
        "--open-mode=append",
        "--label",
        f"--output={output_pattern(job, NODE_PATTERN.format('%N'))}",
        *job.srun_options,
        *job.rank_prefix,
        *rank_command(job),
    ]


def run_srun(
    job: JobDescription,
    *,
    logs: Path,
    environment: Mapping[str, str],
    nodes: Sequence[str],
    on_start: Callable[[Callable[[int], None]], None],
    on_failure: Callable[[Ended], None],
) -> Ended:
    """Launches the ranks by srun, whose own words go to the folder `logs`.

    `on_start` is given a function that signals the ranks. `on_failure` is told of the first bad
    exit as soon as srun says so, while srun is ending the other ranks.
    """
    log = srun_log(logs)
    log.touch()
    with log.open("r+b") as words:
        words.seek(0, 2)
        begin = words.tell()
        with log.open("ab") as output:
            srun = subprocess.Popen(
                srun_command(job, num_nodes=len(nodes)),
                env=dict(environment),
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
        on_start(srun.send_signal)
        first: Ended | None = None
        while True:
            code = srun.poll()
            words.seek(begin)
            said = words.read().decode(errors="replace")
            if first is None and (first := first_failure(said)) is not None:
                on_failure(first)
            if code is not None:
                break
            time.sleep(_POLL_S)
    code = shell_code(code)
    if code == 0 and NOT_LAUNCHED.search(said):
        return Ended(code=1, words=said.strip())
    if first is None or code == 0:
        return Ended(code=code, words=said.strip())
    return replace(first, words=said.strip())


NOT_LAUNCHED = re.compile(r"^srun: error: .*launch failed", re.MULTILINE)
"""What srun says where a node cannot open the output file. It leaves with 0 all the same."""


_SRUN_FAILURE = re.compile(
    r"^srun: error: (?P<node>[^\s:]+): tasks? (?P<rank>\d+)[^:\n]*: (?P<what>.*)$", re.MULTILINE
)
_EXITED = re.compile(r"Exited with exit code (\d+)")


def first_failure(srun_words: str) -> Ended | None:
    """The first bad exit in what srun said, where it named one.

    Ranks that were terminated are passed over: they were told to end, and are no cause.
    """
    for one in failures(srun_words):
        if one.code != 128 + signal.SIGTERM:
            return replace(one, words=srun_words.strip())
    return None


def failures(srun_words: str) -> Iterator[Ended]:
    """Every bad exit that srun named, as it came."""
    for failure in _SRUN_FAILURE.finditer(srun_words):
        yield Ended(code=_code_of(failure["what"]), rank=int(failure["rank"]), node=failure["node"])


def _code_of(what: str) -> int:
    if what.startswith("Out Of Memory"):
        return ExitCode.OUT_OF_MEMORY
    exited = _EXITED.search(what)
    if exited is not None:
        return int(exited[1])
    for number in signal.Signals:
        if what.startswith(signal.strsignal(number) or number.name):
            return 128 + number
    return 1


def run_local(
    job: JobDescription,
    *,
    environment: Mapping[str, str],
    nodes: Sequence[str],
    limits: Limits,
    on_start: Callable[[Callable[[int], None]], None],
    on_failure: Callable[[Ended], None],
) -> Ended:
    """Launches the ranks as processes; they are in this process's group and end with it.

    `on_failure` is told of the first bad exit before the other ranks are ended.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with RankOutput(job.folder) as output:
        for rank, place in enumerate(_places(nodes, job.intent.ranks_per_node)):
            process = subprocess.Popen(
                rank_command(job),
                env={**environment, **place},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
            )
            assert process.stdout is not None
            output.add(process.stdout, rank=rank, node=place["SLURMD_NODENAME"])
            ranks.append(process)
        on_start(lambda number: _signal_all(ranks, number))
        ended = _watch(
            ranks, output, nodes=nodes, limits=limits, per_node=job.intent.ranks_per_node
        )
        if ended.code != 0:
            on_failure(ended)
            _end_all(ranks, output)
    return ended


def _places(nodes: Sequence[str], ranks_per_node: int) -> list[dict[str, str]]:
    """The variables that srun would set, for each rank in order."""
    world_size = len(nodes) * ranks_per_node
    return [
        {
            "SLURM_JOB_NUM_NODES": str(len(nodes)),
            "SLURM_NTASKS": str(world_size),
            "SLURM_PROCID": str(index * ranks_per_node + local_rank),
            "SLURM_LOCALID": str(local_rank),
            "SLURM_NODEID": str(index),
            "SLURMD_NODENAME": node,
        }
        for index, node in enumerate(nodes)
        for local_rank in range(ranks_per_node)
    ]


def _watch(
    ranks: Sequence[subprocess.Popen[bytes]],
    output: RankOutput,
    *,
    nodes: Sequence[str],
    limits: Limits,
    per_node: int,
) -> Ended:
    begin = time.monotonic()
    told = False
    while True:
        codes = [rank.poll() for rank in ranks]
        for rank, code in enumerate(codes):
            if code:
                # What it said last counts as evidence from here on.
                output.pump(0.0)
                words = f"rank {rank} ended with {_spell(code)}"
                node = nodes[rank // per_node]
                return Ended(code=shell_code(code), rank=rank, node=node, words=words)
        if all(code == 0 for code in codes):
            return Ended(code=0)
        elapsed = time.monotonic() - begin
        if elapsed > limits.limit_s:
            words = f"the time limit of {limits.limit_s:g} s was reached"
            return Ended(code=128 + signal.SIGTERM, words=words, timed_out=True)
        if elapsed > limits.limit_s - limits.lead_s and not told:
            told = True
            _signal_all(ranks, signal.SIGUSR2)
        output.pump(_POLL_S)


def _end_all(ranks: Sequence[subprocess.Popen[bytes]], output: RankOutput) -> None:
    _signal_all(ranks, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        output.pump(_POLL_S)
    _signal_all(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _signal_all(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        rank.send_signal(number)


def shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _spell(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else str(code)
