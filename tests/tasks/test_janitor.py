"""Which jobs nobody waits for: pure, from the queue and the ledger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slurm.cluster import JobObservation, JobState
from slurm.diagnose import THE_LOOP
from storage.attempts import Attempt
from storage.records import Cancel, JobIdentity, Stage, Start
from tasks.janitor import Named, named_by, orphans
from tests.flows.attempts import NOW, attempt, dead_node

TOKEN = "r-train-0001-0123456789abcdef"


def cancel(who: str) -> Cancel:
    return Cancel(who=who, why="", nonce="0", at=NOW)


def void() -> Start:
    return Start(job=None, nonce="0", at=NOW)


def started() -> Start:
    return Start(job=JobIdentity(job_id="7", token=TOKEN, host="n1"), nonce="0", at=NOW)


def found(one: Attempt, **job: Any) -> list[str]:
    fields = {"state": JobState.RUNNING, "job_id": "7", "raw_state": "RUNNING"} | job
    queue = {TOKEN: JobObservation(token=TOKEN, **fields)}
    return [orphan.why for orphan in orphans([one], queue, cluster="c")]


def test_a_job_of_a_closed_a_void_or_a_cancelled_attempt_is_an_orphan() -> None:
    plain = replace(attempt(token=TOKEN), start=started())
    assert found(plain) == []
    assert found(replace(plain, start=None)) == []
    assert "is closed: hardware on n3" in found(replace(plain, end=dead_node()))[0]
    assert "is void" in found(replace(plain, start=void()))[0]
    assert "cancelled by a@b" in found(replace(plain, cancel=cancel("a@b")))[0]
    assert found(replace(plain, cancel=cancel(THE_LOOP))) == []


def test_what_leaves_already_or_is_of_another_cluster_is_let_go() -> None:
    closed = attempt(token=TOKEN, end=dead_node())
    assert found(closed)
    assert found(closed, raw_state="COMPLETING") == []
    assert found(replace(closed, intent=replace(closed.intent, cluster="far"))) == []


@pytest.mark.parametrize(
    ("token", "named"),
    [
        (TOKEN, Named(stage=Stage.TRAIN, attempt=1)),
        ("r-train-12345-0123456789abcdef", Named(stage=Stage.TRAIN, attempt=12345)),
        ("r-x-train-0001-0123456789abcdef", None),
        ("r-train-0001-0123456789abcde", None),
        ("r-dinner-0001-0123456789abcdef", None),
        ("train", None),
    ],
)
def test_a_token_is_of_one_run_and_no_other(token: str, named: Named | None) -> None:
    assert named_by(token, run="r") == named
