"""A range of nodes: a job takes what is left of it, at least the least, after a bounded wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.cluster import NodeState
from slurm.spec import RetrySpec
from storage.records import Action, Kind
from tasks.attempts import advance
from tasks.exclusions import Exclusion
from tasks.nodes_left import LEAVING_S
from tasks.situation import Allocate, GiveUp, Situation, Wait
from tests.tasks.test_attempts import NOW, ORDER, UNIT, end, nodes, only, situation, started

WAIT_S = 600.0
RANGE = replace(UNIT, nodes=2, most_nodes=4)
ELASTIC = replace(ORDER, units=(RANGE,), retry=RetrySpec(wait_for_nodes_s=WAIT_S))
NAMES = tuple(f"n{number}" for number in range(1, 9))
FOUR = NAMES[:4]


def failed(age_s: float, *, proven: bool = True) -> Exclusion:
    since = NOW - timedelta(seconds=age_s)
    return Exclusion(reason="hardware in train attempt 1", proven=proven, failed=True, since=since)


def left_of(excluded: Mapping[str, Exclusion], *names: str, now: datetime = NOW) -> Situation:
    return situation(nodes=nodes(*names or FOUR), excluded=excluded, now=now)


def asked(step: object) -> tuple[int | None, tuple[str, ...]]:
    assert isinstance(step, Allocate), step
    return step.most_nodes, step.excluded


def test_all_of_a_range_is_asked_for_where_it_is_there() -> None:
    assert asked(only(advance(ELASTIC, left_of({}, *NAMES)))) == (4, ())
    assert asked(only(advance(ELASTIC, left_of({}, *NAMES[:3])))) == (3, ())


def test_a_node_that_failed_is_waited_for_and_told_of_then_done_without() -> None:
    seen = left_of({"n3": failed(age_s=590)})
    step = only(advance(ELASTIC, seen))
    assert isinstance(step, Wait)
    assert step.seconds == pytest.approx(10)
    for word in ("u waits for nodes", "3 of 4", "n3: hardware", "12:00:10 UTC", "--force validate"):
        assert word in step.for_nodes
    later = replace(seen, now=NOW + timedelta(seconds=10))
    assert asked(only(advance(ELASTIC, later))) == (3, ("n3",))


def test_every_failure_begins_the_wait_anew_and_a_node_that_is_back_ends_it() -> None:
    long_ago = {"n2": failed(age_s=9_000)}
    assert asked(only(advance(ELASTIC, left_of(long_ago)))) == (3, ("n2",))
    assert isinstance(only(advance(ELASTIC, left_of(long_ago | {"n3": failed(age_s=1)}))), Wait)
    assert asked(only(advance(ELASTIC, left_of({})))) == (4, ())


def test_what_no_waiting_mends_is_not_waited_for() -> None:
    """Nodes that the spec or a validation keeps out, and as many others as are wanted."""
    out = {"n1": Exclusion(reason="cluster.exclude"), "n2": Exclusion(reason="unfit by validation")}
    assert asked(only(advance(ELASTIC, left_of(out)))) == (2, ("n1", "n2"))
    assert asked(only(advance(ELASTIC, left_of({"n9": failed(age_s=1)})))) == (4, ("n9",))
    spare = left_of({"n3": failed(age_s=1)}, *NAMES[:5])
    assert asked(only(advance(ELASTIC, spare))) == (4, ("n3",))


def test_a_suspicion_alone_makes_no_job_smaller_and_nobody_wait() -> None:
    suspected = {"n3": failed(age_s=1, proven=False)}
    assert asked(only(advance(ELASTIC, left_of(suspected)))) == (4, ())
    assert asked(only(advance(ELASTIC, left_of(suspected, *NAMES)))) == (4, ("n3",))


def test_fewer_than_the_least_are_refused_at_once() -> None:
    out = {name: failed(age_s=1) for name in ("n1", "n2", "n3")}
    order = replace(ELASTIC, retry=RetrySpec(max_excluded_ratio=1))
    step = only(advance(order, left_of(out)))
    assert isinstance(step, GiveUp)
    for word in ("needs at least 2 nodes", "1 of 4", "lower the least of cluster.nodes to 1"):
        assert word in step.reason


def test_one_number_of_nodes_is_never_waited_for_nor_asked_for_as_a_range() -> None:
    order = replace(ELASTIC, units=(UNIT,))
    seen = left_of({"n3": failed(age_s=1), "n4": failed(age_s=1)})
    assert asked(only(advance(order, seen))) == (None, ("n3", "n4"))


def test_nodes_that_the_last_job_is_leaving_are_waited_for() -> None:
    """Slurm would start a job that takes a range without them."""
    last = started(end=replace(end(Action.RESUME, Kind.TIME), at=NOW - timedelta(seconds=9)))
    idle, leaving = (
        nodes("n1", "n2", "n3"),
        NodeState(name="n4", raw_state="completing", responds=True, idle=False),
    )
    seen = situation(last, nodes=(*idle, leaving))
    step = only(advance(ELASTIC, seen))
    assert isinstance(step, Wait)
    assert "attempt 1 is leaving" in step.for_nodes
    late = replace(seen, now=NOW + timedelta(seconds=LEAVING_S))
    assert asked(only(advance(ELASTIC, late))) == (4, ())
    enough = replace(seen, nodes=(*nodes("n1", "n2", "n3", "n5"), leaving))
    assert asked(only(advance(ELASTIC, enough))) == (4, ())
    busy = replace(seen, nodes=(*idle, replace(leaving, raw_state="allocated")))
    assert asked(only(advance(ELASTIC, busy))) == (4, ())
    bad = replace(seen, nodes=(*idle, leaving), excluded={"n4": failed(age_s=9_000)})
    assert asked(only(advance(ELASTIC, bad))) == (3, ("n4",))
    suspect = replace(bad, excluded={"n4": failed(age_s=9, proven=False)})
    assert asked(only(advance(ELASTIC, suspect))) == (4, ())
    dead = replace(seen, nodes=(*idle, replace(leaving, responds=False)))
    assert asked(only(advance(ELASTIC, dead))) == (4, ())
    assert isinstance(only(advance(replace(ELASTIC, units=(UNIT,)), seen)), Allocate)


exclusions = st.dictionaries(
    st.sampled_from(NAMES),
    st.one_of(
        st.builds(failed, st.floats(0, 2 * WAIT_S), proven=st.booleans()),
        st.sampled_from([Exclusion(reason="cluster.exclude"), Exclusion(reason="unfit")]),
    ),
)


@given(exclusions, st.integers(1, 8), st.integers(1, 8), st.integers(0, 7))
def test_whatever_is_out_a_job_fits_or_is_waited_for_or_refused(
    out: dict[str, Exclusion], num_nodes: int, least: int, more: int
) -> None:
    there = NAMES[:num_nodes]
    unit = replace(UNIT, nodes=least, most_nodes=least + more)
    retry = RetrySpec(wait_for_nodes_s=WAIT_S, max_excluded_ratio=1)
    order = replace(ORDER, units=(unit,), retry=retry)
    proven = {name for name, one in out.items() if one.proven}
    num_left = len(set(there) - proven)
    seen = left_of(out, *there)
    step = only(advance(order, seen))
    if num_left < least:
        assert isinstance(step, GiveUp)
        return
    hoped_for = [out[name] for name in proven & set(there) if out[name].failed]
    if isinstance(step, Wait):
        assert num_left < unit.wanted_nodes
        newest = max(one.since for one in hoped_for if one.since is not None)
        assert newest > NOW - timedelta(seconds=WAIT_S), "nobody is waited for again and again"
        assert step.for_nodes
        step = only(advance(order, replace(seen, now=newest + timedelta(seconds=WAIT_S))))
    else:
        recent = [
            one for one in hoped_for if one.since and one.since > NOW - timedelta(seconds=WAIT_S)
        ]
        assert not recent or num_left >= unit.wanted_nodes
    most, excluded = asked(step)
    assert most == min(num_left, unit.wanted_nodes) >= least
    assert len(set(there) - set(excluded)) >= most, "what is asked for can be had"
    assert proven <= set(excluded)
