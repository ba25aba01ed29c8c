"""The scaling gate: from what the rungs measured to a verdict."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.scaling import Rung, judge, to_text
from tasks.spec import SmokeSpec

SPEC = SmokeSpec(min_ratio=1.6, min_efficiency=0.8)


def rung(nodes: int, tokens_per_s: float, **split_s: float) -> Rung:
    return Rung(
        nodes=nodes,
        world_size=2 * nodes,
        tokens_per_s=tokens_per_s,
        step_s=0.5,
        split_s=split_s,
        slowest_rank=2 * nodes - 1,
        slowest_node=f"n{nodes}",
    )


def test_a_rung_is_read_from_its_jobs_outputs() -> None:
    outputs = {
        "nodes": 2,
        "world_size": 4,
        "tokens_per_s": 100.0,
        "step_s": [0.3, 0.1, 0.2],
        "split_s": {"comm_s": 0.1},
        "slowest_rank": None,
        "slowest_node": None,
    }
    read = Rung.from_outputs(outputs)
    assert (read.step_s, read.split_s, read.slowest_rank) == (0.2, {"comm_s": 0.1}, None)


def test_a_ladder_that_scales_passes_with_its_figures() -> None:
    verdict = judge(
        [rung(1, 1000), rung(2, 1900), rung(4, 3600)], top_nodes=4, spec=SPEC, gates=True
    )
    assert not verdict.refused
    assert [row.ratio for row in verdict.rows] == [None, 1.9, pytest.approx(3600 / 1900)]
    assert [row.efficiency for row in verdict.rows] == [1.0, 0.95, 0.9]
    assert verdict.reason == "scales to 4 nodes with efficiency 0.90"


def test_a_doubling_below_the_ratio_is_refused_with_figure_threshold_and_cause() -> None:
    below = rung(1, 1000, compute_s=0.40, comm_s=0.02)
    above = rung(2, 1500, compute_s=0.41, comm_s=0.30)
    verdict = judge([below, above], top_nodes=4, spec=SPEC, gates=True)
    assert verdict.refused
    for told in ("2 nodes do 1.50 times", "1.60", "communication grew from 0.02 to 0.3 s"):
        assert told in verdict.reason
    assert "rank 3 on n2" in verdict.reason
    assert "look at the links" in verdict.reason


def test_good_doublings_may_still_add_up_to_too_little() -> None:
    ladder = [rung(1, 1000), rung(2, 1650), rung(4, 2722), rung(8, 4492)]
    verdict = judge(ladder, top_nodes=8, spec=SPEC, gates=True)
    assert all(row.scales for row in verdict.rows)
    assert verdict.refused
    assert "efficiency at 8 nodes is 0.56, less than smoke.min_efficiency 0.8" in verdict.reason
    on_the_way = judge(ladder[:3], top_nodes=8, spec=SPEC, gates=True)
    assert not on_the_way.refused


def test_where_ranks_share_cores_the_verdict_is_told_and_stops_nothing() -> None:
    verdict = judge([rung(1, 1000), rung(2, 1000)], top_nodes=2, spec=SPEC, gates=False)
    assert not verdict.refused
    assert len(verdict.shortcomings) == 2
    assert "reported only" in verdict.reason


def test_a_step_that_is_no_doubling_is_held_to_the_same_gain_a_doubling() -> None:
    (_, row) = judge([rung(2, 1000), rung(3, 1400)], top_nodes=9, spec=SPEC, gates=True).rows
    assert row.min_ratio == pytest.approx(1.6 ** math.log2(1.5))
    assert row.scales


@pytest.mark.parametrize("tokens_per_s", [0.0, math.nan, -1.0])
@pytest.mark.parametrize("place", [0, 1])
def test_a_figure_that_is_none_never_passes(tokens_per_s: float, place: int) -> None:
    ladder = [rung(1, 1000), rung(2, 2000)]
    ladder[place] = rung(place + 1, tokens_per_s)
    assert judge(ladder, top_nodes=4, spec=SPEC, gates=True).refused


def test_the_table_shows_every_rung_and_the_verdict() -> None:
    verdict = judge([rung(1, 1000), rung(2, 1900)], top_nodes=2, spec=SPEC, gates=True)
    lines = to_text(verdict).splitlines()
    assert lines[1].split() == ["1", "2", "1000", "-", "1.00", "0.500"]
    assert lines[2].split() == ["2", "4", "1900", "1.90", "0.95", "0.500"]
    assert lines[-1] == verdict.reason


speeds = st.lists(st.floats(1.0, 1e9), min_size=1, max_size=6)


@given(speeds=speeds, ratio=st.floats(1.01, 2.0), efficiency=st.floats(0.01, 1.0))
def test_the_gate_lets_through_exactly_what_keeps_both_bounds(
    speeds: list[float], ratio: float, efficiency: float
) -> None:
    ladder = [rung(2**k, speed) for k, speed in enumerate(speeds)]
    spec = SmokeSpec(min_ratio=ratio, min_efficiency=efficiency)
    verdict = judge(ladder, top_nodes=ladder[-1].nodes, spec=spec, gates=True)
    gains = [after / before for before, after in pairwise(speeds)]
    kept = all(gain >= ratio for gain in gains)
    top = speeds[-1] * 1 / (ladder[-1].nodes * speeds[0])
    assert verdict.refused == (not (kept and top >= efficiency))


@given(speeds=speeds, factor=st.sampled_from([0.25, 0.5, 2.0, 1024.0]))
def test_a_faster_machine_changes_no_verdict(speeds: list[float], factor: float) -> None:
    def refused(scale: float) -> bool:
        ladder = [rung(2**k, speed * scale) for k, speed in enumerate(speeds)]
        return judge(ladder, top_nodes=ladder[-1].nodes, spec=SPEC, gates=True).refused

    assert refused(1.0) == refused(factor)


@given(speeds=speeds)
def test_the_verdict_on_a_ladder_never_forgives_what_a_lower_rung_was_refused_for(
    speeds: list[float],
) -> None:
    ladder = [rung(2**k, speed) for k, speed in enumerate(speeds)]
    refused = [
        judge(ladder[:count], top_nodes=10**6, spec=SPEC, gates=True).refused
        for count in range(1, len(ladder) + 1)
    ]
    assert refused == sorted(refused)
