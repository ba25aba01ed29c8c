"""A node that is cut off at any moment of a save: the training goes on from the newest commit.

The cut node lives on, with all that its ranks had sealed, and is plugged in again while its
successor trains: what it sends then changes nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from storage.checkpoints.commits import newest_commit
from tests.faults.runs import ENTRIES, FaultRun, make_run
from tests.faults.sites import Site
from tests.storage.checkpoints.kills.judging import judge
from tests.storage.checkpoints.kills.promises import Promises
from tests.storage.checkpoints.kills.training import LAST_STEP

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.s3,
    pytest.mark.campaign,
    pytest.mark.timeout(20_000),
]

ROOT = Path(__file__).resolve().parents[2]
CUTS = int(os.environ.get("HEADRACE_CUTS", "20"))
STEP_S = 0.8


def test_a_training_goes_on_from_the_newest_commit_whenever_a_node_is_cut(site: Site) -> None:
    seed = int(os.environ.get("HEADRACE_KILLS_SEED", str(secrets.randbelow(10**9))))
    for number in range(seed, seed + CUTS):
        print(f"seed {number}: {_cut_once(site, Random(f'cut {number}'))}", flush=True)


def _cut_once(site: Site, random: Random) -> str:
    """One run that loses a node, which comes back later; what became of it."""
    run = _start(site)
    node = random.choice(run.until("a start", lambda: _nodes(run)))
    run.until("a first step", lambda: any(one["kind"] == "loss" for one in _events(run)))
    time.sleep(random.uniform(0.0, STEP_S * (LAST_STEP - 1)))
    site.cluster.cut(node)
    try:
        cut_at = time.monotonic()
        wakes = random.choice(("loading", "resumed", "outcome", "end"))
        run.until(f"a successor's {wakes}", lambda: _has_come_to(run, wakes))
    finally:
        site.cluster.heal(node)
    outcome = run.outcome
    assert outcome.done, outcome.story
    promises, events = Promises(), _events(run)
    for event in events:
        promises.hear(event)
    ledger = run.context.ledger
    newest = newest_commit(ledger)
    assert newest is not None
    assert newest.step == LAST_STEP, outcome.story
    _let_the_node_finish(site, node)
    assert newest_commit(ledger) == newest
    holdings = judge(ledger, seed=0)
    committed = max((one["step"] for one in events if _is_commit(one, cut_at)), default=0)
    sources = [one.resume.source for one in outcome.attempts if one.resume is not None]
    return (
        f"{node} cut after the commit of step {committed}, back at {wakes}; resumed from "
        f"{[one.step for one in sources if one is not None]}; {holdings}"
    )


def _start(site: Site) -> FaultRun:
    events = site.workdir / f"events-{secrets.token_hex(4)}.jsonl"
    run = make_run(
        site,
        "exact",
        on=site.cluster.shape.nodes,
        nodes=2,
        payload={"events": str(events), "step_s": STEP_S},
        cluster={"memory_per_node": "900M", "env": {"PYTHONPATH": f"{ENTRIES}:{ROOT}"}},
    )
    run.unit = replace(run.unit, entry="exact", sidecar="storage.checkpoints.flusher")
    return run.start()


def _events(run: FaultRun) -> list[dict[str, Any]]:
    path = Path(run.unit.payload["events"])
    if not path.exists():
        return []
    told = path.read_bytes()
    return [json.loads(line) for line in told[: told.rfind(b"\n") + 1].splitlines()]


def _nodes(run: FaultRun) -> tuple[str, ...]:
    attempts = run.attempts()
    return attempts[0].nodes if attempts else ()


def _has_come_to(run: FaultRun, what: str) -> bool:
    """A successor's event, or the end of the run: a cut may come after the last save."""
    assert run.works is not None
    return run.works.done() or any(
        one["attempt"] > 1 and one["kind"] == what for one in _events(run)
    )


def _is_commit(event: dict[str, Any], before: float) -> bool:
    return event["kind"] == "outcome" and event["result"] == "committed" and event["at"] < before


def _let_the_node_finish(site: Site, node: str) -> None:
    """Until Slurm has it back, and has ended what still ran there."""
    deadline = time.monotonic() + 120
    while (state := site.slurm("sinfo", "-h", "-n", node, "-o", "%t")) not in {"idle", "mix"}:
        assert time.monotonic() < deadline, f"{node} is {state}"
        time.sleep(0.5)
