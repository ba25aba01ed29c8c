"""Jobs that Slurm leaves waiting: some are given up with its reason, of others a person is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from storage.records import Action, Kind
from tests.faults.runs import PATIENCE, FaultRun, make_run
from tests.faults.sites import Site

pytestmark = [pytest.mark.slurm, pytest.mark.s3]


def test_a_job_that_waits_in_vain_is_given_up_and_of_one_without_a_node_it_is_told(
    site: Site,
) -> None:
    in_vain = make_run(
        site,
        "vain",
        on=("n1",),
        time_limit_min=500,
        patience=replace(PATIENCE, hopeless_s=2.0),
        cluster={"partition": "short"},
    ).start()
    site.slurm("scontrol", "update", "nodename=n2", "state=drain", "reason=a test")
    try:
        drained = make_run(site, "drained", on=("n2",), faulty_until=0).start(_resume_when_told)
        assert drained.outcome.done, drained.outcome.story
    finally:
        _resume(site)
    (told,) = [words for words in drained.listener.said if "waits: " in words]
    assert "`sinfo -R`" in told

    outcome = in_vain.outcome
    assert not outcome.done
    assert "PartitionTimeLimit" in outcome.diagnosis().evidence[0], outcome.story
    assert outcome.diagnosis().kind is Kind.CODE
    assert outcome.decision().action is Action.GIVE_UP
    (attempt,) = outcome.attempts
    assert attempt.start is not None
    assert attempt.start.is_void
    assert attempt.cancel is not None
    assert any("cluster.time_limit_min" in words for words in in_vain.listener.said)
    assert site.slurm("squeue", "--noheader", f"--name={attempt.intent.token}") == ""


def _resume_when_told(run: FaultRun) -> None:
    run.until("a word that its node is away", lambda: "sinfo -R" in " ".join(run.listener.said))
    _resume(run.site)


def _resume(site: Site) -> None:
    if "drain" in site.slurm("sinfo", "--noheader", "--nodes=n2", "--format=%T"):
        site.slurm("scontrol", "update", "nodename=n2", "state=resume")
