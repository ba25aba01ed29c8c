"""`nodes: 2-4` on a real cluster of four: a job has as many nodes as there are for it."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest

from storage.records import (
    Action,
    Decision,
    Diagnosis,
    End,
    Intent,
    Kind,
    Start,
    Why,
    new_nonce,
)
from tests.faults.runs import RETRY, STAGE, UNIT, FaultRun, make_run
from tests.faults.sites import Site

pytestmark = [pytest.mark.slurm, pytest.mark.s3]

ALL = ("n1", "n2", "n3", "n4")
WAIT_S = 4.0


def test_a_job_starts_on_the_nodes_that_are_there(site: Site) -> None:
    """Of four, one is drained: three ranks start on the others, and a person is told."""
    site.slurm("scontrol", "update", "nodename=n2", "state=drain", "reason=a test")
    try:
        run = make_run(site, "drained", on=ALL, nodes=2, most_nodes=4, faulty_until=0).start()
        outcome = run.outcome
    finally:
        site.slurm("scontrol", "update", "nodename=n2", "state=resume")
    assert outcome.done, outcome.story
    (attempt,) = outcome.attempts
    assert (attempt.intent.nodes, attempt.intent.most_nodes) == (2, 4)
    assert attempt.nodes == ("n1", "n3", "n4")
    assert len(run.marks("worked")) == 3
    assert any("up to 4 nodes, and Slurm had 3" in words for words in run.listener.said)


def test_a_node_that_failed_is_waited_for_and_then_gone_without(site: Site) -> None:
    run = make_run(
        site,
        "waits",
        on=ALL,
        nodes=2,
        most_nodes=4,
        faulty_until=0,
        retry=RETRY.model_copy(update={"wait_for_nodes_s": WAIT_S}),
    )
    failed = _fail_on(run, "n3")
    outcome = run.start().outcome
    assert outcome.done, outcome.story
    attempt = outcome.attempts[1]
    waited_s = (attempt.intent.created_at - failed).total_seconds()
    assert waited_s >= WAIT_S, outcome.story
    assert (attempt.intent.nodes, attempt.intent.most_nodes) == (2, 3)
    assert attempt.intent.excluded == ("n3",)
    assert attempt.nodes == ("n1", "n2", "n4")
    (told,) = [words for words in run.listener.said if "waits for nodes" in words]
    assert "3 of 4 are left (n3: hardware in train attempt 1" in told


def _fail_on(run: FaultRun, node: str) -> datetime:
    """The records of a first attempt that ended on a node just now, and when that was."""
    ledger, now = run.context.ledger, datetime.now(UTC)
    intent = Intent(
        run=run.context.run,
        stage=STAGE,
        unit=UNIT,
        attempt=1,
        token=f"{run.context.run}-{time.monotonic_ns()}",
        nonce=new_nonce(),
        cluster=run.context.cluster.name,
        user="test",
        why=Why.FIRST,
        after=None,
        nodes=2,
        most_nodes=4,
        ranks_per_node=1,
        fingerprint="f.0",
        created_at=now,
    )
    end = End(
        diagnosis=Diagnosis(kind=Kind.HARDWARE, culprit_nodes=(node,)),
        decision=Decision(action=Action.RESUME, reason="it failed", exclude_nodes=(node,)),
        by="test",
        nonce=new_nonce(),
        at=now,
    )
    assert ledger.claim_intent(intent).won
    assert ledger.claim_start(intent, Start(job=None, nonce=new_nonce(), at=now)).won
    assert ledger.claim_end(intent, end).won
    return now
