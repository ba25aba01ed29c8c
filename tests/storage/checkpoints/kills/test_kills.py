"""Whoever is killed, stopped or slow, and when: every resume is from a whole, newest checkpoint.

The rounds run in a process of their own, `tests.storage.checkpoints.kills`, which tells how to have
one of them again by its seed.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.embedded import EmbeddedStore

pytestmark = [pytest.mark.s3, pytest.mark.distributed]

ROOT = Path(__file__).resolve().parents[4]
MODULE = "tests.storage.checkpoints.kills"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where a server of the rounds' own keeps its data."""
    yield tmp_path
    EmbeddedStore(directory=tmp_path, host="127.0.0.1", bucket="headrace").stop()


def run_rounds(folder: Path, *options: str) -> list[dict[str, Any]]:
    """The reports of rounds that all went well."""
    done = subprocess.run(
        [sys.executable, "-m", MODULE, "--store", str(folder), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    reports = [line for line in lines if "seed" in line]
    failed = [one for one in reports if one["failure"]]
    told = "\n".join(f"{one['failure']}\n{one['story']}\n{_again(one)}" for one in failed)
    assert not failed, told
    assert done.returncode == 0, done.stderr
    _show(reports)
    return reports


def _again(report: dict[str, Any]) -> str:
    which = f"--seed {report['seed']} --rounds 1"
    if report["server_kills"]:
        which = f"--seed {report['seed']} --rounds 0 --server-kills 1"
    elif report["seed"] < 1:
        which = "--rounds 0 --weakest"
    return f"again: python -m {MODULE} --store FOLDER {which}"


def _show(reports: list[dict[str, Any]]) -> None:
    """The figures of a campaign, for `pytest -s`."""
    numbers = (
        "has_disk",
        "attempts",
        "resumes",
        "from_disk",
        "commits",
        "orphans",
        "orphan_bytes",
        "woken",
        "server_kills",
    )
    sums = {name: sum(one[name] for one in reports) for name in numbers}
    met = Counter(" ".join(fault.split()[:2]) for one in reports for fault in one["met"])
    print(f"{len(reports)} rounds: {sums}; {dict(sorted(met.items()))}")


@pytest.mark.timeout(900)
def test_kills_of_ranks_flushers_and_the_server_at_their_lines_and_at_any_time(
    folder: Path,
) -> None:
    some = ("--weakest", "--rounds", "60", "--within-s", "30", "--at-least", "12")
    reports = run_rounds(folder, *some, "--server-kills", "2")
    assert any(one["met"] for one in reports)
    assert any(one["server_kills"] for one in reports)
    assert any(one["has_disk"] for one in reports)


def _seed() -> str:
    """Of a campaign's first round; the next ones count on from it."""
    seed = os.environ.get("HEADRACE_KILLS_SEED", str(secrets.randbelow(10**9)))
    print(f"first seed: {seed}")
    return seed


@pytest.mark.campaign
@pytest.mark.timeout(20_000)
def test_campaign_at_random(folder: Path) -> None:
    run_rounds(folder, "--seed", _seed(), "--rounds", "3000", "--at-once", "3")


@pytest.mark.campaign
@pytest.mark.timeout(20_000)
def test_campaign_at_every_line(folder: Path) -> None:
    run_rounds(folder, "--seed", _seed(), "--every-site", "1", "--at-once", "3")


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_campaign_of_server_kills(folder: Path) -> None:
    run_rounds(folder, "--seed", _seed(), "--rounds", "0", "--server-kills", "60")
