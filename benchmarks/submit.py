"""From the end of a job to the next submission, and what a job costs the controller in calls.

python -m benchmarks.submit [--jobs 6] [--rounds 3] [--json FILE]

Needs root and Slurm's Debian packages: it brings a dev cluster of its own up. Every chain runs the
same jobs (`benchmarks.chains`), in turn. Its calls are counted by wrappers that stand before
Slurm's own commands on PATH and note name and time.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.chains import CHAINS
from benchmarks.comparing import Row, Timing, show, write_json
from slurm.devcluster import ClusterShape, DevCluster
from storage.embedded import EmbeddedStore, resolved
from storage.spec import StoreSpec
from tasks.attending import SHORTEST_POLL_S

OURS = "headrace"
BOUND = "poll interval + 0.5 s"
COMMANDS = ("sbatch", "squeue", "sacct", "scontrol", "sinfo", "scancel")
SHAPE = ClusterShape(name="bench", subnet="10.98.30.0/24", num_nodes=2)
GAP = "job ended to next sbatch"
CALLS = "calls to Slurm a job"


@dataclass(frozen=True, kw_only=True)
class Chain:
    """One chain as it went: the gaps between a job's end and the next sbatch, and the calls."""

    gaps_s: tuple[float, ...]
    calls: Counter[str]
    jobs: int


def main(
    jobs: Annotated[int, typer.Option(min=2, help="Jobs a chain.")] = 6,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    json: Annotated[Path | None, typer.Option(help="Write the rows here, too.")] = None,
) -> None:
    """Run every chain `rounds` times, in turn."""
    cluster = DevCluster(SHAPE)
    chains: dict[str, list[Chain]] = {who: [] for who in CHAINS}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch, Progress() as progress:
        server = EmbeddedStore(
            directory=Path(scratch, "store"), host=str(SHAPE.bridge_address), bucket="headrace"
        )
        task = progress.add_task("chains", total=rounds * len(CHAINS))
        try:
            cluster.up(say=progress.console.print)
            store = resolved(StoreSpec(), server.ensure())
            for number in range(rounds):
                for who in CHAINS:
                    folder = Path(scratch, f"bench-{who.split()[0]}-{number}")
                    chains[who].append(_run(who, folder, jobs=jobs, cluster=cluster, store=store))
                    progress.advance(task)
        finally:
            server.stop()
            cluster.down()
    rows, timings = _rows(chains)
    show(rows, timings, ours=OURS)
    for who, ran in chains.items():
        total = sum((chain.calls for chain in ran), Counter[str]())
        per_job = {name: round(n / (rounds * jobs), 2) for name, n in sorted(total.items())}
        Console().print(f"{who}: calls a job {per_job}", highlight=False)
    if json is not None:
        write_json(rows, json)


def _run(who: str, folder: Path, *, jobs: int, cluster: DevCluster, store: StoreSpec) -> Chain:
    folder.mkdir()
    wrappers, log = folder / "bin", folder / "calls"
    wrappers.mkdir()
    for name in COMMANDS:
        real = shutil.which(name)
        wrapper = wrappers / name
        wrapper.write_text(
            f'#!/bin/bash\necho "{name} $(date +%s.%N)" >> {log}\nexec {real} "$@"\n'
        )
        wrapper.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{wrappers}{os.pathsep}{os.environ['PATH']}",
        "SLURM_CONF": str(cluster.slurm_conf),
        "HEADRACE_BENCH_STORE": store.model_dump_json(),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "benchmarks.chains", who, str(jobs), str(folder)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    calls = [line.split() for line in log.read_text().splitlines()]
    sent = [float(at) for name, at in calls if name == "sbatch"]
    ended = [float(at) for at in (folder / "ended").read_text().split()]
    assert len(sent) == len(ended) == jobs, f"{who}: {len(sent)} sbatch, {len(ended)} ends"
    return Chain(
        gaps_s=tuple(after - before for before, after in zip(ended, sent[1:], strict=False)),
        calls=Counter(name for name, _ in calls),
        jobs=jobs,
    )


def _rows(chains: dict[str, list[Chain]]) -> tuple[list[Row], dict[str, dict[str, Timing]]]:
    gaps = {
        who: Timing(seconds=tuple(gap for chain in ran for gap in chain.gaps_s))
        for who, ran in chains.items()
    }
    calls = {
        who: Timing(seconds=tuple(chain.calls.total() / chain.jobs for chain in ran))
        for who, ran in chains.items()
    }
    bound_s = SHORTEST_POLL_S + 0.5
    gaps[BOUND] = Timing(seconds=(bound_s,))
    rows = [
        *(_row(GAP, gaps, peer, unit="s") for peer in chains if peer != OURS),
        _row(GAP, gaps, BOUND, unit="s", goal=1.0),
        *(_row(CALLS, calls, peer, unit="calls") for peer in chains if peer != OURS),
    ]
    return rows, {GAP: gaps, CALLS: calls}


def _row(
    name: str, measured: dict[str, Timing], peer: str, *, unit: str, goal: float | None = None
) -> Row:
    ours, theirs = (statistics.median(measured[who].seconds) for who in (OURS, peer))
    ratio = ours / theirs
    return Row(
        name=name,
        unit=unit,
        ours=ours,
        peer=peer,
        theirs=theirs,
        ratio=ratio,
        goal=goal,
        met=None if goal is None else ratio <= goal,
    )


if __name__ == "__main__":
    typer.run(main)
