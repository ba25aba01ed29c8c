"""Exclusion never empties a partition in silence: there is a job that fits, or words with names."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from slurm.cluster import JobState
from slurm.evidence import Evidence
from slurm.spec import RetrySpec
from storage.attempts import Attempt
from storage.records import Action, ExitCode, Kind
from tasks.attempts import advance
from tasks.exclusions import exclusions
from tasks.situation import Allocate, Close, GiveUp
from tests.tasks.test_attempts import (
    BEAT,
    NOW,
    ORDER,
    UNIT,
    end,
    job,
    left,
    nodes,
    only,
    situation,
    started,
)

NAMES = tuple(f"n{number}" for number in range(1, 9))
BLAMING = (Kind.HARDWARE, Kind.NETWORK, Kind.HANG, Kind.OUTPUT)

blames = st.lists(
    st.tuples(
        st.sampled_from(BLAMING),
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).map(tuple),
        st.integers(0, 47),
    ),
    max_size=8,
)


def closed(found: list[tuple[Kind, tuple[str, ...], int]]) -> tuple[Attempt, ...]:
    """Attempts that blamed these nodes so many hours ago."""
    return tuple(
        started(
            number,
            end=replace(
                end(Action.RETRY_ELSEWHERE, kind, exclude_nodes=blamed),
                at=NOW - timedelta(hours=age_h),
            ),
        )
        for number, (kind, blamed, age_h) in enumerate(found, start=1)
    )


@given(
    blames,
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
)
def test_a_job_has_nodes_left_or_the_refusal_names_those_that_are_gone(
    found: list[tuple[Kind, tuple[str, ...], int]],
    num_nodes: int,
    wanted: int,
    ratio: float,
    by_spec: list[str],
) -> None:
    attempts = closed(found)
    there = NAMES[:num_nodes]
    out = exclusions(
        by_spec=by_spec, unfit=(), closed=attempts, passed_at={}, now=NOW, exclude_h=24
    )
    order = replace(
        ORDER,
        units=(replace(UNIT, nodes=wanted),),
        retry=RetrySpec(max_excluded_ratio=ratio),
        past=frozenset(one.number for one in attempts),
    )
    step = only(advance(order, situation(*attempts, nodes=nodes(*there), excluded=out)))
    proven = {name for name, one in out.items() if one.proven} & set(there)
    if isinstance(step, Allocate):
        assert len(set(there) - set(step.excluded)) >= wanted
        assert proven <= set(step.excluded)
        failed = {name for name in proven if out[name].failed}
        assert len(failed) <= ratio * len(there)
        return
    assert isinstance(step, GiveUp)
    told = {name for name in proven if f"{name}: {out[name]}" in step.reason}
    blamed = {name for name in proven if out[name].failed}
    assert told >= blamed
    assert told == proven or "max_excluded_ratio" in step.reason
    assert "--force validate" in step.reason or "cluster.nodes" in step.reason


@given(blames)
def test_nobody_is_excluded_beyond_the_term(found: list[tuple[Kind, tuple[str, ...], int]]) -> None:
    recent = {name for _, blamed, age_h in found if age_h < 24 for name in blamed}
    out = exclusions(
        by_spec=(), unfit=(), closed=closed(found), passed_at={}, now=NOW, exclude_h=24
    )
    assert out.keys() == recent
    assert all(one.until is not None and one.until > NOW for one in out.values())


@given(
    st.sampled_from([ExitCode.CRASHED, ExitCode.HANG, ExitCode.PEER_LOST, ExitCode.STORAGE]),
    st.lists(st.sampled_from(["n1", "n2"]), max_size=2, unique=True).map(tuple),
    st.sampled_from(["", "ConnectionError: odd", "Connection reset by peer"]),
    st.integers(0, 3600),
)
def test_two_engines_that_look_at_different_times_close_an_attempt_alike(
    code: ExitCode, blamed: tuple[str, ...], error: str, later_s: int
) -> None:
    word = replace(left(code, error=error), blamed_nodes=blamed)
    attempt = started(exit=word, heartbeats=(BEAT,))
    seen = job(JobState.ENDED, exit_code="1:0", raw_state="FAILED")[attempt.intent.token]
    closings = []
    for who, now in (("ann", NOW), ("bob", NOW + timedelta(seconds=later_s))):
        late = now + timedelta(minutes=2)
        evidence = Evidence(attempt=attempt, job=seen, now=late)
        looked = situation(
            attempt, observations={seen.token: seen}, evidence={1: evidence}, now=late
        )
        step = only(advance(replace(ORDER, who=who), looked))
        assert isinstance(step, Close)
        closings.append((step.diagnosis, step.decision))
    assert closings[0] == closings[1]
