"""Rounds, each in a process forked from this one, which has only imported.

`python -m tests.storage.checkpoints.kills --store FOLDER --seed N --rounds 1` runs one again by its
seed. Each round's report is a line of JSON on the standard output.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path

os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

import torch
import torch._dynamo
import torch.distributed.tensor

from storage.embedded import EmbeddedStore, resolved
from storage.spec import StoreSpec
from tests.storage.checkpoints.kills.faults import Deed, Fault, Site
from tests.storage.checkpoints.kills.plans import DiskPlan, Plan, at_site, draw, weakest
from tests.storage.checkpoints.kills.processes import UnusedStore
from tests.storage.checkpoints.kills.reports import Parent, Report
from tests.storage.checkpoints.kills.rounds import Round
from tests.storage.checkpoints.kills.training import LAST_STEP, reference

ROUND_DEADLINE_S = 300.0
DEEDS = (Deed.KILL, Deed.ZOMBIE, Deed.DELAY)


class Rounds:
    """Has rounds run, a few side by side."""

    def __init__(self, parent: Parent, *, at_once: int) -> None:
        self._parent = parent
        self._at_once = at_once
        self._running: dict[int, tuple[int, float]] = {}

    def run(self, plans: Iterator[Plan], *, lines: bool = False) -> Iterator[Report]:
        waiting = iter(plans)
        is_done = False
        while True:
            while not is_done and len(self._running) < self._at_once:
                plan = next(waiting, None)
                if plan is None:
                    is_done = True
                else:
                    self._running[self._fork(plan, lines)] = plan.seed, time.monotonic()
            if not self._running:
                return
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                seed, _ = self._running.pop(pid)
                yield self._read(seed, status)
                continue
            self._end_hanging()
            time.sleep(0.01)

    def _fork(self, plan: Plan, lines: bool) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            report = Round(self._parent, plan, lines=lines).run()
            self._path(plan.seed).write_text(json.dumps(asdict(report)))
            code = 0
        except BaseException:
            import traceback

            self._path(plan.seed).with_suffix(".error").write_text(traceback.format_exc())
        finally:
            os._exit(code)

    def _read(self, seed: int, status: int) -> Report:
        if status != 0:
            error = self._path(seed).with_suffix(".error")
            why = error.read_text() if error.exists() else f"status {status}"
            return Report(seed=seed, failure=f"the round itself failed: {why}")
        told = json.loads(self._path(seed).read_text())
        return Report(**{**told, "sites": [Site(**site) for site in told["sites"]]})

    def _end_hanging(self) -> None:
        for pid, (_, since) in self._running.items():
            if time.monotonic() - since > ROUND_DEADLINE_S:
                os.kill(pid, signal.SIGKILL)

    def _path(self, seed: int) -> Path:
        return self._parent.folder / f"{seed}.json"


def find_sites(rounds: Rounds) -> tuple[Site, ...]:
    """The lines that ranks and flushers come to in rounds in which nothing happens.

    But that one has to begin again, so that something is loaded: from a disk, if it was in time.
    """
    end = Fault(role="rank1", deed=Deed.KILL, after_s=0.25, since="resumed")
    plans = [
        Plan(seed=-1, step_s=0.02),
        Plan(seed=-2, step_s=0.02, nodes=2, awaits_last=True),
        Plan(seed=-3, step_s=0.05, every_steps=5, disk=DiskPlan(), faults=((end,),)),
    ]
    found: dict[tuple[str, str, int], Site] = {}
    for report in rounds.run(iter(plans), lines=True):
        assert not report.failure, f"{report.failure}\n{report.story}"
        for site in report.sites:
            place = (site.role, site.file, site.line)
            if place not in found or found[place].times < site.times:
                found[place] = site
    return tuple(sorted(found.values()))


def main() -> None:
    options = _options()
    server = EmbeddedStore(directory=options.store, host="127.0.0.1", bucket="headrace")
    spec = resolved(StoreSpec(), server.ensure())
    torch.set_num_threads(1)
    reference(LAST_STEP)
    folder = options.store / f"rounds-{os.getpid()}"
    folder.mkdir()
    parent = Parent(
        spec=spec,
        for_round=UnusedStore(spec),
        for_children=UnusedStore(spec),
        folder=folder,
        server=server,
    )
    # So the children's collector touches, and copies, no page of what was imported.
    gc.collect()
    gc.freeze()
    rounds = Rounds(parent, at_once=options.at_once)
    sites = find_sites(rounds)
    print(json.dumps({"sites": len(sites)}), flush=True)
    first, last = options.seed, options.seed + options.rounds
    if options.every_site:
        pairs = [(site, deed) for deed in DEEDS for site in sites]
        chosen = enumerate(pairs[:: options.every_site], start=first)
        drawn = (at_site(seed, site, deed) for seed, (site, deed) in chosen)
    else:
        drawn = (draw(seed, sites) for seed in range(first, last))
    first_of_all = weakest(first, sites) if options.weakest else iter(())
    # One at a time: a server that is killed is killed for all.
    alone = Rounds(parent, at_once=1)
    seeds = range(last, last + options.server_kills)
    with_server = (draw(seed, sites, server_kills=True) for seed in seeds)
    reports = chain(rounds.run(_until(chain(first_of_all, drawn), options)), alone.run(with_server))
    failed = 0
    for report in reports:
        failed += bool(report.failure)
        print(json.dumps({**asdict(report), "sites": len(report.sites)}), flush=True)
        if not report.failure:
            for left in folder.glob(f"r{report.seed}-*"):
                shutil.rmtree(left)
    if not failed:
        shutil.rmtree(folder)
    sys.exit(1 if failed else 0)


def _until(plans: Iterator[Plan], options: argparse.Namespace) -> Iterator[Plan]:
    """No more of them once the time is over, but `--at-least` so many."""
    begin = time.monotonic()
    for number, plan in enumerate(plans):
        if number < options.at_least or time.monotonic() - begin < options.within_s:
            yield plan


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.storage.checkpoints.kills")
    parser.add_argument("--store", type=Path, required=True, help="folder of an embedded server")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next has N+1")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--weakest", action="store_true", help="first a round at each weak point")
    parser.add_argument("--within-s", type=float, default=float("inf"), help="begin none later")
    parser.add_argument("--at-least", type=int, default=0, help="begin so many even then")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument(
        "--server-kills", type=int, default=0, help="so many more, with SIGKILLs of the server"
    )
    parser.add_argument("--every-site", type=int, default=0, help="each N-th line, with each deed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
