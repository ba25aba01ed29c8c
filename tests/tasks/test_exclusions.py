"""Which nodes are kept out of jobs, for how long, and what happens when there are too many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from slurm.spec import RetrySpec
from storage.attempts import Attempt
from storage.records import Action, Kind, Stage, StageRecord
from tasks.attempts import advance
from tasks.exclusions import Exclusion, exclusions, passed_nodes
from tasks.situation import Allocate, GiveUp
from tests.tasks.test_attempts import NOW, ORDER, UNIT, end, nodes, only, situation, started

ENDED = NOW - timedelta(seconds=1)


def blaming(number: int, kind: Kind, *names: str) -> Attempt:
    return started(number, end=end(Action.RETRY_ELSEWHERE, kind, exclude_nodes=names))


def found(*closed: Attempt, age_h: float = 0.0, **changes: object) -> Mapping[str, Exclusion]:
    values: dict[str, object] = {"by_spec": (), "unfit": (), "passed_at": {}, "exclude_h": 24}
    now = ENDED + timedelta(hours=age_h)
    return exclusions(closed=closed, now=now, **(values | changes))  # type: ignore[arg-type]


def test_a_validation_that_passes_a_node_is_a_newer_word_than_an_earlier_blame() -> None:
    blamed = blaming(1, Kind.HARDWARE, "n2", "n3")

    def told(**changes: object) -> Mapping[str, str]:
        seen = found(blamed, by_spec=["n9"], unfit=["n4"], **changes)
        return {name: one.reason for name, one in seen.items()}

    reason = "hardware in train attempt 1"
    before = {"n9": "cluster.exclude", "n4": "unfit by validation", "n2": reason, "n3": reason}
    assert told() == before
    assert told(passed_at={"n2": NOW - timedelta(hours=1)}) == before
    assert told(passed_at={"n2": NOW, "n1": NOW}) == {
        name: why for name, why in before.items() if name != "n2"
    }


def test_only_a_node_that_was_probed_and_found_fit_was_passed() -> None:
    def node(name: str, **measures: float) -> Mapping[str, object]:
        return {"node": name, "verdict": "ok", "findings": [], "measures": measures}

    def validation(age_h: float, *nodes: Mapping[str, object]) -> StageRecord:
        return StageRecord(
            stage=Stage.VALIDATE,
            fingerprint="f",
            generation=0,
            outputs={"healthy": ["n1", "n2"], "unfit": ["n3"], "nodes": nodes},
            attempts=(),
            nonce="0",
            at=NOW - timedelta(hours=age_h),
        )

    old = validation(9, node("n1", matmul=40.0), node("n2", matmul=41.0), node("n3", matmul=0.1))
    new = validation(1, node("n1", matmul=40.0), node("n2"))
    assert passed_nodes([new, old]) == {"n1": new.at, "n2": old.at}


def test_a_node_comes_back_after_its_term() -> None:
    blamed = blaming(1, Kind.HARDWARE, "n2")
    assert str(found(blamed, age_h=23.9)["n2"]).endswith("until 2026-07-02 11:59 UTC")
    assert found(blamed, age_h=24) == {}
    assert found(blamed, age_h=2, exclude_h=1) == {}


def test_a_suspicion_is_proven_by_the_second_attempt_that_has_it() -> None:
    for kind in (Kind.NETWORK, Kind.HANG, Kind.CASCADE):
        first, second = blaming(1, kind, "n2"), blaming(2, kind, "n2", "n3")
        assert not found(first)["n2"].proven
        seen = found(first, second, first)
        assert (seen["n2"].proven, seen["n3"].proven) == (True, False)
        assert "attempt 1" in seen["n2"].reason
        assert "attempt 2" in seen["n2"].reason


def test_a_node_is_out_since_it_was_proven_bad_and_not_since_it_was_suspected() -> None:
    ends = []
    for number in (1, 2, 3):
        one = blaming(number, Kind.NETWORK, "n2")
        assert one.end is not None
        at = one.end.at - timedelta(hours=4 - number)
        ends.append(replace(one, end=replace(one.end, at=at)))
    proven_at = ends[1].end
    assert proven_at is not None
    assert [found(*ends[:count])["n2"].since for count in (2, 3)] == [proven_at.at] * 2


def test_an_attempt_that_is_read_twice_has_one_suspicion() -> None:
    suspected = blaming(1, Kind.NETWORK, "n2")
    assert not found(suspected, suspected)["n2"].proven


SUSPECTED = Exclusion(reason="network in train attempt 1", proven=False, failed=True)
PROVEN = Exclusion(reason="hardware in train attempt 1", failed=True)


def test_a_suspected_node_is_avoided_while_there_are_others_and_used_when_there_are_none() -> None:
    seen = situation(nodes=nodes("n1", "n2", "n3"), excluded={"n2": SUSPECTED})
    assert _allocated(seen).excluded == ("n2",)
    tight = replace(seen, nodes=nodes("n1", "n2"), excluded={"n2": SUSPECTED, "n9": PROVEN})
    assert _allocated(tight).excluded == ("n9",)


def _allocated(seen: object) -> Allocate:
    step = only(advance(ORDER, seen))  # type: ignore[arg-type]
    assert isinstance(step, Allocate)
    return step


def test_more_failed_nodes_than_the_spec_allows_stop_the_stage_and_are_named() -> None:
    order = replace(ORDER, retry=RetrySpec(max_excluded_ratio=0.25))
    many = nodes(*(f"n{number}" for number in range(1, 9)))
    out = {"n1": PROVEN, "n2": PROVEN}
    assert isinstance(only(advance(order, situation(nodes=many, excluded=out))), Allocate)
    step = only(advance(order, situation(nodes=many, excluded={**out, "n3": PROVEN})))
    assert isinstance(step, GiveUp)
    for word in ("3 of 8", "n3: hardware in train attempt 1", "max_excluded_ratio allows 0.25"):
        assert word in step.reason
    assert "--force validate" in step.reason


def test_neither_suspects_nor_what_the_spec_excludes_count_as_failed_nodes() -> None:
    order = replace(ORDER, retry=RetrySpec(max_excluded_ratio=0))
    by_spec = Exclusion(reason="cluster.exclude")
    seen = situation(nodes=nodes("n1", "n2", "n3", "n4"), excluded={"n1": by_spec, "n2": SUSPECTED})
    assert isinstance(only(advance(order, seen)), Allocate)


def test_a_place_that_always_has_another_node_is_never_out_of_nodes() -> None:
    order = replace(ORDER, replaces_nodes=True, retry=RetrySpec(max_excluded_ratio=0))
    seen = situation(nodes=nodes("n1", "n2"), excluded={"n1": PROVEN, "n2": SUSPECTED})
    step = only(advance(order, seen))
    assert isinstance(step, Allocate)
    assert step.excluded == ("n1", "n2")
    assert step.unit is UNIT
