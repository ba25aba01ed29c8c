"""When evidence is whole enough to be judged; what a refusal and a traceback mean."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from slurm.cluster import JobState
from slurm.diagnose import is_settled, refusal
from slurm.tracebacks import TRACEBACK, logged_root, root_of, same_root
from storage.records import ExitCode, Kind
from tests.slurm.attempts import NOW, an_exit, beat
from tests.slurm.sights import (
    LOST_N2,
    N2_DOWN,
    ODD,
    PEER,
    TYPE_ERROR,
    job,
    seen,
    traceback,
)


def test_a_lost_peer_is_not_judged_before_slurm_can_have_seen_a_dead_node() -> None:
    fresh = seen(an_exit(1, PEER, at=NOW - timedelta(seconds=5)), job())
    assert not is_settled(fresh, settle_s=40)
    assert is_settled(replace(fresh, node_states=N2_DOWN), settle_s=40)
    assert is_settled(replace(fresh, now=NOW + timedelta(seconds=40)), settle_s=40)


def test_a_node_failure_waits_for_its_node_to_be_named() -> None:
    fresh = seen(job=job("NODE_FAIL", "1:0"), beats=(beat("n1", age_s=1), beat("n2", age_s=2)))
    assert not is_settled(fresh)
    assert is_settled(replace(fresh, node_states=N2_DOWN))


def test_the_only_node_of_a_job_was_alive_when_it_said_why() -> None:
    hang = an_exit(ExitCode.HANG, "no new step for 90 s", at=NOW - timedelta(seconds=5))
    fresh = seen(hang, job())
    assert not is_settled(fresh)
    assert fresh.attempt.start is not None
    start = replace(fresh.attempt.start, nodes=("n1",))
    assert is_settled(replace(fresh, attempt=replace(fresh.attempt, start=start)))


def test_an_end_without_a_word_waits_for_accounting() -> None:
    beats = (beat("n1", age_s=1),)
    assert not is_settled(seen(job=job("FAILED", ""), beats=beats))
    assert is_settled(seen(job=job("FAILED", "1:0"), beats=beats))


def test_a_kill_waits_for_accounting_which_may_know_of_an_overrun() -> None:
    killed = seen(an_exit(137, "rank 1 ended with SIGKILL"), job("FAILED", ""))
    assert not is_settled(killed)
    assert is_settled(replace(killed, job=job("FAILED", "137:0")))


def test_a_cancel_waits_for_accounting_which_knows_by_whom() -> None:
    unnamed = seen(an_exit(75, "told by SIGTERM"), job("CANCELLED", ""))
    assert not is_settled(unnamed)
    assert is_settled(replace(unnamed, job=job("CANCELLED by 0", "0:15")))


def test_a_peer_that_is_named_is_settled_at_once() -> None:
    assert is_settled(seen(LOST_N2, replace(job("RUNNING", ""), state=JobState.RUNNING)))


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.BAD_CONFIG, ExitCode.DIVERGED])
def test_a_clear_last_word_is_judged_at_once(code: ExitCode) -> None:
    assert is_settled(seen(an_exit(code, "clear"), job("FAILED", "")))


POLICY = (
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit "
    "limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account", Kind.CODE),
        ("sbatch: error: invalid partition specified: nowhere", Kind.CODE),
        ("sbatch: error: Requested time limit is invalid (exceeds some limit)", Kind.CODE),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", Kind.SITE),
        (f"sbatch: error: AssocMaxSubmitJobLimit\n{POLICY}", Kind.SITE),
        (f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{POLICY}", Kind.CODE),
        ("sbatch: error: Slurm temporarily unable to accept job", Kind.SITE),
        ("sbatch: error: Required node not available (down, drained or reserved)", Kind.SITE),
    ],
)
def test_a_refusal_is_the_specs_fault_unless_it_may_pass(words: str, kind: Kind) -> None:
    found = refusal(words)
    assert found.kind is kind
    assert any(words in line for line in found.evidence)


def test_a_limit_of_accounting_that_refuses_is_told_as_one_that_is_waited_for() -> None:
    told = refusal(f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{POLICY}").message
    assert "a single job may not ask for so much here" in told


def test_a_refusal_in_unknown_words_is_told_as_it_is() -> None:
    found = refusal("`sbatch job.sh` ended with 1: sbatch: error: the moon is full")
    assert found.message.endswith("sbatch: error: the moon is full")
    assert len(found.evidence) == 1


def test_the_root_of_a_traceback_is_its_last_error() -> None:
    chained = f"{TYPE_ERROR}\n\nThe above exception was the direct cause of:\n\n{ODD}"
    assert root_of(chained) == "RuntimeError: something strange at 0x7f00aa"
    assert root_of("plain words\nmore") == "plain words"
    assert root_of("") == ""


def test_the_root_of_a_logged_traceback_is_found_whatever_follows_it() -> None:
    logged = f"step 3\n{traceback('KeyError: 7')}\nheadrace: leaving with 1"
    assert logged_root(logged) == "KeyError: 7"
    labelled = "\n".join(f"[rank3]: {line}" for line in traceback("KeyError: 7").splitlines())
    assert logged_root(f"{labelled}\nafterwards") == "KeyError: 7"
    assert logged_root("no traceback") == logged_root(f"{TRACEBACK}:\n  cut off") == ""


def test_the_same_error_elsewhere_in_memory_is_the_same() -> None:
    again = an_exit(1, ODD.replace("0x7f00aa", "0x55beef"))
    assert same_root(an_exit(1, ODD), again)
    assert not same_root(an_exit(1, ODD), an_exit(1, TYPE_ERROR))
    assert not same_root(an_exit(1, ""), an_exit(1, ""))
