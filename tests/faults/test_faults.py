"""Faults on a real cluster, each caused for real: what it is called, who is blamed, what follows.

All but the last begin side by side, and the tests wait for their ends. n1 is for what needs a node
of its own to go wrong on, n4 for preemption, n2 and n3 for the rest; once these are free, a node is
cut off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from storage.attempts import Attempt
from storage.embedded import EmbeddedStore, resolved
from storage.records import Action, Kind, Why
from storage.spec import StoreSpec
from tasks.failures import AttemptFailed, RunCancelled
from tests.faults import wrappers
from tests.faults.runs import UNIT, FaultRun, Outcome, make_run
from tests.faults.sites import Site
from tests.faults.wrappers import sbatch_calls

pytestmark = [pytest.mark.slurm, pytest.mark.s3, pytest.mark.timeout(600)]

REST = ("n2", "n3")
PREEMPTED_ON = ("n4",)
LONG = frozenset({"chain", "deaf"})
STORE_AWAY_S = 8.0

Deed = Callable[[FaultRun], None]


class Begin(Protocol):
    """Sets a run to work, and whatever shall happen to it."""

    def __call__(self, run: FaultRun, deed: Deed | None = None) -> None: ...


@pytest.fixture(scope="module")
def shaky_store(site: Site) -> Iterator[EmbeddedStore]:
    """A store of its own, to be stopped in the middle."""
    server = EmbeddedStore(
        directory=site.workdir / "shaky-store", host=site.cluster.host, bucket="headrace"
    )
    server.ensure()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def outcomes(site: Site, shaky_store: EmbeddedStore) -> dict[str, FaultRun]:
    """All runs whose faults do not disturb each other, at work."""
    runs: dict[str, FaultRun] = {}

    def begin(run: FaultRun, deed: Deed | None = None) -> None:
        runs[run.name] = run.start(deed)

    _begin_with_one_bad_folder(site, begin)
    short = {"partition": "short"}
    minute = {"on": ("n1",), "time_limit_min": 1, "cluster": short}
    begin(make_run(site, "chain", part="train", faulty_until=2, **minute))
    begin(make_run(site, "deaf", part="train deaf", **minute))
    begin(make_run(site, "preempted", on=PREEMPTED_ON, part="train deaf"))
    begin(
        make_run(site, "polite", on=PREEMPTED_ON, part="train"),
        lambda run: _preempt(site, runs["preempted"], run),
    )
    begin(make_run(site, "memory", on=REST, part="take memory"))
    begin(make_run(site, "operator", on=REST), _scancel)
    begin(make_run(site, "bug", on=REST, part="bug at once"))
    begin(make_run(site, "bug-twice", on=REST, part="bug later", faulty_until=9))
    begin(make_run(site, "killed", on=REST, ranks_per_node=2), lambda run: run.kill_rank(1))
    _begin_with_bad_folders(site, begin)
    torch = {"memory_per_node": "900M"}
    begin(make_run(site, "hang", on=("n1", *REST), part="hang", nodes=2, cluster=torch))
    shaky = resolved(StoreSpec(max_attempts=3), shaky_store.ensure())
    begin(make_run(site, "store-used", on=REST, part="use store", store=shaky))
    go = {"go": str(site.workdir / "go-store-unused")}
    begin(
        make_run(site, "store-unused", on=REST, payload=go, store=shaky),
        lambda run: _take_store_away(shaky_store, runs["store-used"], run),
    )
    lost = wrappers.swallowing(site.workdir / "bin-lost")
    begin(make_run(site, "sbatch-lost", on=REST, path=lost))
    late = wrappers.late(site.workdir / "bin-late", delay_s=12)
    begin(make_run(site, "sbatch-late", on=REST, path=late))
    return runs


def _begin_with_bad_folders(site: Site, begin: Begin) -> None:
    every = make_run(site, "output-all", on=REST, faulty_until=0)
    every.folder.mkdir()
    for node in REST:
        site.cluster.make_readonly(node, every.folder)
    begin(every)
    _begin_with_one_bad_folder(site, begin)
    scratch = site.workdir / "scratch"
    scratch.mkdir()
    for node in REST:
        site.cluster.make_tiny(node, scratch, size_mb=1)
    begin(make_run(site, "disk", on=REST, part="fill disk", payload={"scratch": str(scratch)}))


def _begin_with_one_bad_folder(site: Site, begin: Begin) -> None:
    """Until its first attempt has ended, another job has all GPUs of the node that is well."""
    bad, well = "n1", "n2"
    run = make_run(site, "output-one", on=(bad, well), cluster={"gpus_per_node": 8})
    run.folder.mkdir()
    site.cluster.make_readonly(bad, run.folder)
    taken = ("--parsable", f"--nodelist={well}", "--gpus-per-node=8", "--output=/dev/null")
    other = site.slurm("sbatch", *taken, "--mem=50M", "--wrap", "sleep 300")

    def free(run: FaultRun) -> None:
        run.wait_for_end()
        site.slurm("scancel", other)

    run.until("GPUs to be taken", lambda: site.slurm("squeue", "-h", "-j", other, "-t", "R"))
    begin(run, free)


def _scancel(run: FaultRun) -> None:
    run.wait_for_marks()
    run.site.slurm("scancel", run.job_id())


def _preempt(site: Site, deaf: FaultRun, polite: FaultRun) -> None:
    """An urgent job that needs the whole node, once both have something to lose."""
    for run in (deaf, polite):
        run.wait_for_marks("committed")
    urgent = ("--partition=urgent", f"--nodelist={PREEMPTED_ON[0]}", "--exclusive")
    site.slurm("sbatch", *urgent, "--output=/dev/null", "--wrap", "sleep 1")


def _take_store_away(server: EmbeddedStore, used: FaultRun, unused: FaultRun) -> None:
    for run in (used, unused):
        run.wait_for_heartbeats()
    server.stop()
    time.sleep(STORE_AWAY_S)
    server.ensure()
    Path(unused.unit.payload["go"]).touch()


@pytest.fixture(scope="module")
def cut(site: Site, outcomes: dict[str, FaultRun]) -> Iterator[dict[str, FaultRun]]:
    """Two runs that lose a node: one of its two, and its only one."""
    for name, run in outcomes.items():
        if name not in LONG:
            assert run.outcome
    pair = make_run(site, "cut-pair", on=("n2", "n3", "n4"), nodes=2).start()
    single = make_run(site, "cut-single", on=("n3", "n4")).start()
    victims = {pair.wait_for_heartbeats().start.nodes[1], *_nodes(single.wait_for_heartbeats())}
    for node in victims:
        site.cluster.cut(node)
    yield {"pair": pair, "single": single}
    for node in victims:
        site.cluster.heal(node)


def _nodes(attempt: Attempt) -> tuple[str, ...]:
    assert attempt.start is not None
    return attempt.start.nodes


def resumed(outcome: Outcome, *, floor: bool = False) -> None:
    """It went on to its end with one more attempt, from what the first had committed."""
    assert outcome.done, outcome.story
    intent = outcome.intent(2)
    assert (intent.why, intent.after) == (Why.RESUMED, 1)
    assert intent.floor == (outcome.commit(5) if floor else None)
    assert len(outcome.attempts) == 2, outcome.story


def gave_up(outcome: Outcome, *, attempts: int = 1) -> None:
    assert isinstance(outcome.error, AttemptFailed), outcome.story
    assert outcome.error.unit == UNIT
    assert outcome.decision(attempts).action is Action.GIVE_UP
    assert len(outcome.attempts) == attempts, outcome.story


def test_memory_overrun_gives_up(outcomes: dict[str, FaultRun]) -> None:
    outcome = outcomes["memory"].outcome
    assert outcome.diagnosis().kind is Kind.MEMORY, outcome.story
    assert outcome.diagnosis().culprit_nodes == ()
    gave_up(outcome)


def test_a_job_that_its_user_cancels_is_not_tried_again(outcomes: dict[str, FaultRun]) -> None:
    outcome = outcomes["operator"].outcome
    assert outcome.diagnosis().kind is Kind.OPERATOR, outcome.story
    assert outcome.decision().action is Action.STOP
    assert isinstance(outcome.error, RunCancelled)
    assert len(outcome.attempts) == 1, outcome.story


def test_a_bug_before_the_first_step_gives_up_at_once(outcomes: dict[str, FaultRun]) -> None:
    outcome = outcomes["bug"].outcome
    assert outcome.diagnosis().kind is Kind.CODE, outcome.story
    assert "hidden_size" in outcome.diagnosis().message
    gave_up(outcome)


def test_the_same_bug_twice_gives_up(outcomes: dict[str, FaultRun]) -> None:
    outcome = outcomes["bug-twice"].outcome
    assert outcome.decision(1).action is Action.RESUME, outcome.story
    assert outcome.diagnosis(1).culprit_nodes == ()
    assert outcome.newly_excluded(2) == set()
    gave_up(outcome, attempts=2)
    assert "the same error" in outcome.decision(2).reason


def test_a_killed_rank_is_resumed_and_nobody_blamed(outcomes: dict[str, FaultRun]) -> None:
    outcome = outcomes["killed"].outcome
    assert outcome.diagnosis().kind is Kind.UNKNOWN, outcome.story
    assert outcome.diagnosis().culprit_nodes == ()
    assert outcome.decision().action is Action.RESUME
    resumed(outcome)
    assert outcome.newly_excluded(2) == set()


def test_a_hanging_rank_is_named_and_its_node_excluded(outcomes: dict[str, FaultRun]) -> None:
    outcome = outcomes["hang"].outcome
    culprit = _nodes(outcome.attempts[0])[1]
    assert outcome.diagnosis().kind is Kind.HANG, outcome.story
    assert outcome.diagnosis().culprit_nodes == (culprit,)
    assert outcome.decision().action is Action.RETRY_ELSEWHERE
    resumed(outcome)
    assert outcome.newly_excluded(2) == {culprit}


def test_one_node_that_cannot_write_is_excluded(outcomes: dict[str, FaultRun]) -> None:
    outcome = outcomes["output-one"].outcome
    assert outcome.diagnosis().kind is Kind.OUTPUT, outcome.story
    assert outcome.diagnosis().culprit_nodes == ("n1",)
    assert outcome.decision().action is Action.RETRY_ELSEWHERE
    resumed(outcome)
    assert outcome.newly_excluded(2) == {"n1"}


def test_a_path_that_no_node_can_write_gives_up(outcomes: dict[str, FaultRun]) -> None:
    outcome = outcomes["output-all"].outcome
    assert outcome.diagnosis(1).kind is Kind.OUTPUT, outcome.story
    assert outcome.newly_excluded(2) == set(outcome.diagnosis(1).culprit_nodes)
    gave_up(outcome, attempts=2)


def test_a_full_disk_is_waited_for_and_no_node_blamed(
    site: Site, outcomes: dict[str, FaultRun]
) -> None:
    outcome = outcomes["disk"].outcome
    assert outcome.diagnosis().kind is Kind.STORAGE, outcome.story
    assert outcome.diagnosis().culprit_nodes == ()
    assert outcome.decision().action is Action.RESUME
    assert outcome.decision().delay_s > 0
    resumed(outcome)
    assert outcome.newly_excluded(2) == set()


def test_a_job_that_needs_an_absent_store_is_resumed(outcomes: dict[str, FaultRun]) -> None:
    outcome = outcomes["store-used"].outcome
    assert outcome.diagnosis().kind is Kind.STORAGE, outcome.story
    assert outcome.diagnosis().culprit_nodes == ()
    assert outcome.decision().action is Action.RESUME
    resumed(outcome)
    assert outcome.newly_excluded(2) == set()


def test_a_job_that_does_not_need_an_absent_store_goes_on(outcomes: dict[str, FaultRun]) -> None:
    outcome = outcomes["store-unused"].outcome
    assert outcome.done, outcome.story
    assert outcome.diagnosis().kind is Kind.DONE
    assert len(outcome.attempts) == 1, outcome.story
    assert any("does not answer" in line for line in outcome.run.listener.said)


def test_an_sbatch_that_never_lands_is_lost_and_sent_anew(
    site: Site, outcomes: dict[str, FaultRun]
) -> None:
    outcome = outcomes["sbatch-lost"].outcome
    assert outcome.diagnosis().kind is Kind.LOST, outcome.story
    assert outcome.diagnosis().culprit_nodes == ()
    resumed(outcome)
    assert outcome.newly_excluded(2) == set()
    assert len(set(sbatch_calls(site.workdir / "bin-lost"))) == 2
    assert len(sbatch_calls(site.workdir / "bin-lost")) == 2


def test_an_sbatch_that_lands_after_all_is_fenced(
    site: Site, outcomes: dict[str, FaultRun]
) -> None:
    run = outcomes["sbatch-late"]
    outcome = run.outcome
    assert outcome.diagnosis().kind is Kind.LOST, outcome.story
    resumed(outcome)
    assert len(sbatch_calls(site.workdir / "bin-late")) == 2
    token = outcome.intent(1).token

    def landed() -> str:
        return site.slurm("sacct", "-nP", f"--name={token}", "--format=JobID,State,ExitCode")

    deadline = time.monotonic() + 120
    while "FAILED|85:0" not in (seen := landed()) and "CANCELLED" not in seen:
        assert time.monotonic() < deadline, f"{token}: {seen!r}"
        time.sleep(0.5)
    assert ".0|" not in seen
    assert run.marks("worked", attempt=1) == ()


def test_a_preempted_job_is_resumed_from_its_commit_at_once(
    outcomes: dict[str, FaultRun],
) -> None:
    outcome = outcomes["preempted"].outcome
    assert outcome.diagnosis().kind is Kind.PREEMPTED, outcome.story
    assert outcome.diagnosis().culprit_nodes == ()
    assert (outcome.decision().action, outcome.decision().delay_s) == (Action.RESUME, 0)
    resumed(outcome, floor=True)
    assert outcome.newly_excluded(2) == set()


def test_a_job_that_heeds_its_preemption_is_resumed_too(outcomes: dict[str, FaultRun]) -> None:
    outcome = outcomes["polite"].outcome
    told = outcome.diagnosis()
    assert told.kind in {Kind.PREEMPTED, Kind.TIME}, outcome.story
    assert told.kind is Kind.PREEMPTED or any("preempted" in line for line in told.evidence)
    assert (outcome.decision().action, outcome.decision().delay_s) == (Action.RESUME, 0)
    resumed(outcome, floor=True)


def test_a_job_loses_one_of_its_nodes(cut: dict[str, FaultRun]) -> None:
    outcome = cut["pair"].outcome
    lost = _nodes(outcome.attempts[0])[1]
    # The other node knows within seconds, often before Slurm does.
    assert outcome.diagnosis().kind in {Kind.HARDWARE, Kind.NETWORK}, outcome.story
    assert outcome.diagnosis().culprit_nodes == (lost,)
    assert outcome.decision().action is Action.RETRY_ELSEWHERE
    resumed(outcome)
    assert outcome.newly_excluded(2) == {lost}


def test_a_job_loses_its_only_node(cut: dict[str, FaultRun]) -> None:
    outcome = cut["single"].outcome
    assert outcome.diagnosis().kind is Kind.HARDWARE, outcome.story
    assert outcome.diagnosis().culprit_nodes == _nodes(outcome.attempts[0])
    assert outcome.decision().action is Action.RETRY_ELSEWHERE
    resumed(outcome)
    assert outcome.newly_excluded(2) == set(outcome.diagnosis().culprit_nodes)


def test_a_job_ended_at_its_time_limit_goes_on_from_its_commit(
    outcomes: dict[str, FaultRun],
) -> None:
    outcome = outcomes["deaf"].outcome
    assert outcome.diagnosis().kind is Kind.TIME, outcome.story
    assert outcome.diagnosis().culprit_nodes == ()
    assert (outcome.decision().action, outcome.decision().delay_s) == (Action.RESUME, 0)
    resumed(outcome, floor=True)
    assert outcome.newly_excluded(2) == set()


def test_a_run_longer_than_the_limit_goes_on_through_several_jobs(
    outcomes: dict[str, FaultRun],
) -> None:
    outcome = outcomes["chain"].outcome
    assert outcome.done, outcome.story
    kinds = [outcome.diagnosis(one.number).kind for one in outcome.attempts]
    assert kinds == [Kind.TIME, Kind.TIME, Kind.DONE], outcome.story
    floors = [one.intent.floor for one in outcome.attempts]
    assert floors == [None, outcome.commit(5, attempt=1), outcome.commit(10, attempt=2)]
    for number in (1, 2):
        assert outcome.decision(number).action is Action.RESUME
        assert outcome.decision(number).delay_s == 0
        assert outcome.newly_excluded(number + 1) == set()
