"""From a fault to the first new training step, and the steps lost, beside a script that requeues.

python -m benchmarks.recovery [--rounds 2] [--json FILE]

The same training (`benchmarks.line_fit`) runs under Headrace, as a spec with `command:`, and in a
batch script that calls `scontrol requeue` on its own failure; both on a dev cluster of 4 nodes that
this script brings up, in turn, with the same fault: a rank killed, a node cut, a preemption, a time
limit. A cut is measured with `SlurmdTimeout` of 6 s and of 300 s, as sites have it; Slurm's own
time to notice is given apart. Most of the script's time is Slurm's, which makes every job that is
requeued wait for two minutes. Needs root and Slurm's Debian packages; takes three quarters of an
hour.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.comparing import Row, Timing, compare, show, write_json
from slurm.devcluster import ClusterShape, DevCluster
from storage.embedded import EmbeddedStore, resolved
from storage.spec import StoreSpec

OURS, PEER = "headrace", "bare script that requeues"
USUAL_S = {"a rank killed": 30.0, "a node cut": 120.0}
STEPS = 1_000_000
WARM_STEPS = 60
DEADLINE_S = 900.0
_SUBNETS = {6: "10.98.31.0/24", 300: "10.98.32.0/24"}

BARE = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append
#SBATCH --signal=B:USR2@20 --time={limit_min} --output={folder}/batch.log
trap 'kill -USR2 $job; wait $job; scontrol requeue $SLURM_JOB_ID; exit' USR2
trap 'wait $job; scontrol requeue $SLURM_JOB_ID; exit' TERM
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1) MASTER_PORT=29507
srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS \\
  exec {python} {script} {folder} ${{SLURM_RESTART_COUNT:-0}} {steps}' &
job=$!
wait $job || scontrol requeue $SLURM_JOB_ID
"""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A line of the training's notes."""

    incarnation: str
    step: int
    at: float


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How one training came back: seconds to its first new step, steps lost, when Slurm knew."""

    gap_s: float
    lost: int
    noticed_s: float | None = None


class Training:
    """One training that runs now, under whichever owner, and its notes."""

    def __init__(self, folder: Path, cluster: DevCluster) -> None:
        self.folder = folder
        self.cluster = cluster

    def steps(self) -> list[Step]:
        try:
            lines = (self.folder / "steps").read_text().splitlines()
        except FileNotFoundError:
            return []
        words = (line.split() for line in lines)
        return [
            Step(incarnation=w[0], step=int(w[1]), at=float(w[2])) for w in words if len(w) == 3
        ]

    def wait_until_warm(self, *, ran: str = "") -> None:
        def is_warm() -> bool:
            mine = [one for one in self.steps() if one.incarnation != ran]
            return len(mine) >= WARM_STEPS and (self.folder / "newest.pt").exists()

        wait_for(is_warm, what=f"{WARM_STEPS} steps in {self.folder.name}")

    def ranks(self) -> list[psutil.Process]:
        """The training's processes, rank 0 first."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if str(self.folder) in command and any(
                word.endswith("line_fit.py") for word in command
            ):
                found.append((int(process.environ()["RANK"]), process))
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]

    def nodes(self) -> list[str]:
        """Where the training's job runs now, by its job's own variables."""
        return [process.environ()["SLURMD_NODENAME"] for process in self.ranks()]


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    only: Annotated[str | None, typer.Option(help="Just the fault whose name holds this.")] = None,
    slow: Annotated[bool, typer.Option(help="Also with a SlurmdTimeout of 300 s.")] = True,
    json: Annotated[Path | None, typer.Option(help="Write the rows here, too.")] = None,
) -> None:
    """Break and time each training `rounds` times; the 300 s cut once."""
    seen: dict[str, dict[str, list[Recovery]]] = {}
    for timeout_s in (6, 300) if slow else (6,):
        with _standing(timeout_s) as (cluster, store, scratch):
            for name, fault in FAULTS.items():
                if (timeout_s == 300 and name != "a node cut") or (
                    only is not None and only not in name
                ):
                    continue
                title = f"{name}, SlurmdTimeout {timeout_s}" if name == "a node cut" else name
                for number in range(1 if timeout_s == 300 else rounds):
                    for who, start in STARTS.items():
                        folder = scratch / f"{who.split()[0]}-{len(seen)}-{number}"
                        folder.mkdir()
                        found = _measure(fault, start, folder, cluster, store)
                        seen.setdefault(title, {}).setdefault(who, []).append(found)
                        Console().print(f"{title}, {who}: {found}", highlight=False)
    rows, timings = _rows(seen)
    show(rows, timings, ours=OURS)
    Console().print(_lost(seen))
    if json is not None:
        write_json(rows, json)


@contextmanager
def _standing(timeout_s: int):  # type: ignore[no-untyped-def]
    shape = ClusterShape(
        name=f"rec{timeout_s}", subnet=_SUBNETS[timeout_s], slurmd_timeout_s=timeout_s
    )
    cluster = DevCluster(shape)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        server = EmbeddedStore(
            directory=Path(scratch, "store"), host=str(shape.bridge_address), bucket="headrace"
        )
        try:
            cluster.up(say=print)
            yield cluster, resolved(StoreSpec(), server.ensure()), Path(scratch)
        finally:
            server.stop()
            cluster.down()


def _start_headrace(
    folder: Path, cluster: DevCluster, store: StoreSpec, *, limit_min: int
) -> Callable[[], None]:
    environment = {
        **os.environ,
        "SLURM_CONF": str(cluster.slurm_conf),
        "HEADRACE_BENCH_STORE": store.model_dump_json(),
    }
    argv = [
        sys.executable,
        "-m",
        "benchmarks.line_fit_run",
        str(folder),
        str(limit_min),
        str(STEPS),
    ]
    engine = subprocess.Popen(argv, env=environment, stdout=(folder / "engine.log").open("w"))

    def stop() -> None:
        engine.kill()
        engine.wait()
        _slurm(cluster, "scancel", f"--user={os.getuid()}")

    return stop


def _start_bare(
    folder: Path, cluster: DevCluster, store: StoreSpec, *, limit_min: int
) -> Callable[[], None]:
    del store
    script = folder / "job.sh"
    script.write_text(
        BARE.format(
            folder=folder,
            limit_min=limit_min,
            python=sys.executable,
            script=Path(__file__).with_name("line_fit.py"),
            steps=STEPS,
        )
    )
    answer = _slurm(cluster, "sbatch", "--parsable", str(script))

    def stop() -> None:
        _slurm(cluster, "scancel", answer.strip())

    return stop


STARTS = {OURS: _start_headrace, PEER: _start_bare}


def kill_a_rank(training: Training) -> float:
    rank = training.ranks()[1]
    at = time.time()
    rank.send_signal(signal.SIGKILL)
    return at


def cut_a_node(training: Training) -> float:
    node = training.nodes()[1]
    at = time.time()
    training.cluster.cut(node)
    return at


def preempt(training: Training) -> float:
    nodes = ",".join(training.nodes())
    at = time.time()
    options = ["--partition=urgent", "--nodes=2", f"--nodelist={nodes}", "--exclusive", "--time=1"]
    _slurm(training.cluster, "sbatch", *options, "--output=/dev/null", "--wrap=sleep 5")
    return at


def reach_the_time_limit(training: Training) -> float:
    """Nothing to do but to wait: the gap begins with the last step before."""
    first = training.steps()[0].incarnation
    wait_for(lambda: training.steps()[-1].incarnation != first, what="the time limit to be over")
    return max(one.at for one in training.steps() if one.incarnation == first)


FAULTS: dict[str, Callable[[Training], float]] = {
    "a rank killed": kill_a_rank,
    "a node cut": cut_a_node,
    "a preemption": preempt,
    "a time limit": reach_the_time_limit,
}


def _measure(
    fault: Callable[[Training], float],
    start: Callable[..., Callable[[], None]],
    folder: Path,
    cluster: DevCluster,
    store: StoreSpec,
) -> Recovery:
    training = Training(folder, cluster)
    stop = start(folder, cluster, store, limit_min=1 if fault is reach_the_time_limit else 30)
    noticed: _Notice | None = None
    try:
        training.wait_until_warm()
        before = training.steps()[-1].incarnation
        nodes = training.nodes()
        at = fault(training)
        noticed = _Notice(cluster, nodes[1]) if fault is cut_a_node else None
        wait_for(
            lambda: training.steps()[-1].incarnation != before,
            what="a step after the fault",
            each=noticed.look if noticed else None,
        )
        first = next(one for one in training.steps() if one.incarnation != before)
        last = max(one.step for one in training.steps() if one.incarnation == before)
        if noticed is not None:
            wait_for(lambda: noticed.at, what="Slurm to notice the cut", each=noticed.look)
        return Recovery(
            gap_s=first.at - at,
            lost=last - (first.step - 1),
            noticed_s=None if noticed is None or noticed.at is None else noticed.at - at,
        )
    finally:
        stop()
        for node in cluster.shape.nodes:
            cluster.heal(node)
        if noticed is not None:
            # As a machine that is back does; Slurm itself would hardly ask it at 300 s.
            cluster.stop("slurmd", host=nodes[1])
            cluster.start("slurmd", host=nodes[1])
        wait_for(lambda: _all_idle(cluster), what="idle nodes", each=None)


class _Notice:
    """When Slurm itself called a node down."""

    def __init__(self, cluster: DevCluster, node: str) -> None:
        self._cluster = cluster
        self._node = node
        self.at: float | None = None

    def look(self) -> None:
        state = _slurm(self._cluster, "sinfo", "--noheader", f"--nodes={self._node}", "--format=%T")
        if self.at is None and "down" in state:
            self.at = time.time()


def _all_idle(cluster: DevCluster) -> bool:
    states = _slurm(cluster, "sinfo", "--noheader", "--partition=dev", "--Node", "--format=%T")
    return set(states.split()) == {"idle"}


def _slurm(cluster: DevCluster, *command: str) -> str:
    environment = {**os.environ, "SLURM_CONF": str(cluster.slurm_conf)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def wait_for(
    ask: Callable[[], object], *, what: str, each: Callable[[], None] | None = None
) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not ask():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {DEADLINE_S:g} s in vain for {what}")
        if each is not None:
            each()
        time.sleep(0.25)


def _rows(
    seen: dict[str, dict[str, list[Recovery]]],
) -> tuple[list[Row], dict[str, dict[str, Timing]]]:
    timings: dict[str, dict[str, Timing]] = {}
    rows: list[Row] = []
    for title, by_owner in seen.items():
        timings[title] = {
            who: Timing(seconds=tuple(one.gap_s for one in found))
            for who, found in by_owner.items()
        }
        rows += compare(title, timings[title], ours=OURS, goal=1.0)
        usual_s = next((s for name, s in USUAL_S.items() if title.startswith(name)), None)
        if usual_s is not None:
            usual = f"the usual {usual_s:g} s"
            timings[title][usual] = Timing(seconds=(usual_s,))
            rows += compare(
                title,
                {OURS: timings[title][OURS], usual: timings[title][usual]},
                ours=OURS,
                goal=0.5,
            )
    return rows, timings


def _lost(seen: dict[str, dict[str, list[Recovery]]]) -> Table:
    table = Table("fault", "who", "steps lost", "Slurm noticed after, s")
    for title, by_owner in seen.items():
        for who, found in by_owner.items():
            noticed = [f"{one.noticed_s:.1f}" for one in found if one.noticed_s is not None]
            lost = ", ".join(str(one.lost) for one in found)
            table.add_row(title, who, lost, ", ".join(noticed) or "-")
    return table


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
