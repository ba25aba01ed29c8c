"""Saving and restoring a sharded training state beside what else one could use, on one store.

python -m benchmarks.checkpoint [--size-mib 256] [--size-mib 1024] [--rounds 3] [--json FILE]

Two ranks share core 0; the store and whatever runs beside the ranks share core 1. Each contestant
trains the same model in processes of its own, saves while it trains, saves at rest, and restores
what it saved; then one save and one restore more go through a proxy that counts requests. Peers
that are not installed are named and left out: `pip install 'headrace[bench]'` (s3fs pins botocore,
so rather into an environment of its own). A size of 1 GiB takes three quarters of an hour; to try
it out, `--size-mib 64 --rounds 1`.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.checkpoint_costs import RequestCounter
from benchmarks.checkpoint_training import Measured, Plan
from benchmarks.checkpoint_ways import OTHER_CORE, OURS, RANK_CORE, WAYS, Job, missing
from benchmarks.comparing import Row, Timing, compare, show, write_json
from storage.embedded import EmbeddedStore, resolved
from storage.records import decode, encode
from storage.spec import StoreSpec

RANKS = 2
LIMIT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """What was measured of one of them, on all ranks."""

    ranks: tuple[Measured, ...]
    save_requests: int
    load_requests: int

    @property
    def state_bytes(self) -> int:
        return sum(rank.state_bytes for rank in self.ranks)

    def slowest(self, of: Callable[[Measured], list[float]]) -> tuple[float, ...]:
        """A value a round, each of the rank that took longest."""
        return tuple(max(values) for values in zip(*map(of, self.ranks), strict=True))

    @property
    def summary(self) -> str:
        """What has been seen so far, for who waits an hour for the table."""
        blocked, durable, restore = (
            statistics.median(self.slowest(of))
            for of in (
                lambda rank: rank.blocked,
                lambda rank: rank.durable,
                lambda rank: rank.restore,
            )
        )
        return f"blocked {blocked:.4f} s, durable {durable:.2f} s, restore {restore:.2f} s"

    @property
    def slowdown(self) -> float:
        """A step while a save is on its way ÷ one without."""
        first = self.ranks[0]
        return statistics.mean(first.busy_steps) / statistics.mean(first.plain_steps)


def main(
    size_mib: Annotated[list[int] | None, typer.Option(min=16, help="Of the state.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    only: Annotated[str | None, typer.Option(help="Just peers whose names hold this.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the rows here, too.")] = None,
) -> None:
    """Ours and the peers in turn, for each size."""
    # So that no server and no rank outlives this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ways = [OURS]
    for way in WAYS:
        package = missing(way)
        if package is not None:
            Console().print(f"[bold red]LEFT OUT: {way}, since {package} is not installed[/]")
        elif way != OURS and (only is None or only in way):
            ways.append(way)
    rows: list[Row] = []
    for size in size_mib or [256, 1024]:
        found = {}
        for way in ways:
            found[way] = _contest(way, size_mib=size, rounds=rounds)
            Console(soft_wrap=True).print(f"{way}, {size} MiB: {found[way].summary}")
        more, timings = compare_all(found)
        show(more, timings, ours=OURS)
        rows.extend(more)
        if json is not None:
            write_json(rows, json)


def _contest(way: str, *, size_mib: int, rounds: int) -> Contestant:
    """One contestant, with an empty store of its own."""
    os.sched_setaffinity(0, {OTHER_CORE})
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        server = EmbeddedStore(directory=place / "store", host="127.0.0.1", bucket="headrace")
        try:
            with server.in_use() as endpoint:
                store = resolved(StoreSpec(), endpoint)
                plan = Plan(
                    job=Job(store=store, run="timed", folder=place / "timed"),
                    way=way,
                    size_mib=size_mib,
                    rounds=rounds,
                    results=place / "timed.results",
                )
                ranks = _run_ranks(plan)
                with RequestCounter(endpoint.endpoint_url).serving() as counter:
                    counted = store.model_copy(update={"endpoint_url": counter.url})
                    _run_ranks(
                        replace(
                            plan,
                            job=Job(store=counted, run="counted", folder=place / "counted"),
                            results=place / "counted.results",
                            phases_url=counter.url,
                        )
                    )
        finally:
            server.stop()
    return Contestant(
        ranks=ranks,
        save_requests=counter.counts["save"],
        load_requests=counter.counts["load"],
    )


def _run_ranks(plan: Plan) -> tuple[Measured, ...]:
    plan.job.folder.mkdir()
    given = plan.job.folder / "plan.json"
    given.write_bytes(encode(plan))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    os.sched_setaffinity(0, {RANK_CORE})
    try:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.checkpoint_training", str(given)],
                env=os.environ | _environment(plan, rank=rank, port=port),
            )
            for rank in range(RANKS)
        ]
    finally:
        os.sched_setaffinity(0, {OTHER_CORE})
    try:
        codes = [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        raise RuntimeError(f"ranks of {plan.way} ended with {codes}; what they said is above")
    return tuple(
        decode(Measured, (plan.results / f"{rank}.json").read_bytes()) for rank in range(RANKS)
    )


def _environment(plan: Plan, *, rank: int, port: int) -> Mapping[str, str]:
    store = plan.job.store
    return {
        "OMP_NUM_THREADS": "1",
        "HEADRACE_NODES": "n1",
        "SLURMD_NODENAME": "n1",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(RANKS),
        "HEADRACE_MASTER_ADDR": "127.0.0.1",
        "HEADRACE_MASTER_PORT": str(port),
        "AWS_SHARED_CREDENTIALS_FILE": str(store.credentials_file),
        "AWS_PROFILE": str(store.profile),
        "AWS_REGION": store.region,
        "AWS_DEFAULT_REGION": store.region,
        "NO_PROXY": "127.0.0.1",
    }


def compare_all(
    found: Mapping[str, Contestant],
) -> tuple[list[Row], dict[str, dict[str, Timing]]]:
    """All rows of one size. Ratios are ours ÷ theirs; the best peer decides on a goal."""
    gigabytes = found[OURS].state_bytes / 1e9
    rows: list[Row] = []
    timings: dict[str, dict[str, Timing]] = {}

    def add(
        what: str,
        unit: str,
        values: Mapping[str, tuple[float, ...]],
        goal: float | None = None,
    ) -> None:
        name = f"{what}, {gigabytes:.2f} GB"
        these = {way: Timing(seconds=seconds) for way, seconds in values.items()}
        timings.setdefault(name, {}).update(these)
        rows.extend(replace(row, unit=unit) for row in compare(name, these, ours=OURS, goal=goal))

    def of_all(of: Callable[[Contestant], tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        return {way: of(one) for way, one in found.items()}

    ours = found[OURS]
    first = ours.slowest(lambda rank: rank.first_blocked)
    later = ours.slowest(lambda rank: rank.blocked)
    copy = max(rank.warm_copy for rank in ours.ranks)
    add("loop blocked", "s", {OURS: later, "one warm copy": (copy,)}, goal=0.2)
    add("loop blocked, first save", "s", {OURS: first, "a later one": later}, goal=1.15)
    add("loop blocked", "s", of_all(lambda one: one.slowest(lambda rank: rank.blocked)), 0.2)
    add(
        "loop blocked, first save",
        "s",
        of_all(lambda one: one.slowest(lambda rank: rank.first_blocked)),
    )
    add("step while saving", "× plain", {OURS: (ours.slowdown,), "no save": (1.0,)}, goal=1.05)
    add("step while saving", "× plain", of_all(lambda one: (one.slowdown,)))
    add("durable after", "s", of_all(lambda one: one.slowest(lambda rank: rank.durable)), 1.0)
    add("restore", "s", of_all(lambda one: one.slowest(lambda rank: rank.restore)), goal=1.0)
    add(
        "restore, verified",
        "s",
        {
            OURS: ours.slowest(lambda rank: rank.verified),
            "not verified": ours.slowest(lambda rank: rank.unverified),
        },
        goal=1.03,
    )
    add(
        "client CPU",
        "s/GB",
        of_all(lambda one: tuple(spent / gigabytes for spent in one.ranks[0].cpu)),
        goal=1.0,
    )
    add(
        "peak memory beyond training",
        "MiB",
        of_all(lambda one: (max(1.0, one.ranks[0].memory_bytes / 2**20),)),
    )
    add("requests of a save", "", of_all(lambda one: (float(one.save_requests),)))
    add("requests of a restore", "", of_all(lambda one: (float(one.load_requests),)))
    return rows, timings


if __name__ == "__main__":
    typer.run(main)
