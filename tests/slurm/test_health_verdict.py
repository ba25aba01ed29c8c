"""Which nodes are fit, from recorded measures: no node is needed to judge."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm.health.registry import CHECKS, NODE_CHECKS, Measure, Rule, Status, Value
from slurm.health.verdict import Judgement, NodeVerdict, Probed, judge, judge_measure
from slurm.spec import ClusterSpec, ValidateSpec
from tests.slurm.measures import GOOD


def node(name: str, **changes: Value | Measure) -> Probed:
    values = {**GOOD, **changes}
    return Probed(
        node=name,
        measures={
            check: value if isinstance(value, Measure) else Measure(value=value)
            for check, value in values.items()
        },
    )


def judged(*nodes: Probed, cluster: dict[str, Any] | None = None, **spec: Any) -> Judgement:
    return judge(
        nodes,
        spec=ValidateSpec.model_validate(spec),
        cluster=ClusterSpec.model_validate(cluster or {}),
    )


def status(verdict: NodeVerdict, check: str) -> Status:
    return next(finding.status for finding in verdict.findings if finding.check == check)


def test_every_row_is_measured_and_every_measure_has_a_row() -> None:
    assert set(GOOD) == {check.name for check in NODE_CHECKS}
    for check in CHECKS.values():
        assert check.remedy
        assert (check.limit is None) == (check.rule not in (Rule.AT_LEAST, Rule.AT_MOST))
        assert check.source or check.rule in (Rule.DONE, Rule.SHOWN)


def test_good_nodes_are_healthy_without_a_reason() -> None:
    judgement = judged(*(node(f"n{k}") for k in range(4)))
    assert judgement.healthy == ("n0", "n1", "n2", "n3")
    assert {verdict.status for verdict in judgement.verdicts} == {Status.OK}
    assert all(verdict.reasons == () for verdict in judgement.verdicts)


@pytest.mark.parametrize(
    ("check", "value", "told"),
    [
        ("memory_copy", 0.49, "0.49 GB/s (expected: at least 0.5 GB/s"),
        ("matmul", 0.4, "validation.min_matmul_gflop_per_s"),
        ("disk_write", 1.0, "at least 10 MB/s"),
        ("matmul", math.nan, "nan GFLOP/s"),
        ("matmul_correct", Measure(failure="a product is off"), "a product is off"),
        ("store", Measure(failure="StoreError: refused"), "StoreError: refused"),
        ("torch", "2.9.0", "2.9.0 (expected: 2.13.0, as on most nodes)"),
    ],
)
def test_a_critical_finding_excludes_the_node_and_says_why(
    check: str, value: Value | Measure, told: str
) -> None:
    judgement = judged(node("n1"), node("n2", **{check: value}), node("n3"))
    assert judgement.unfit == ("n2",)
    assert judgement.suspect is None
    (reason,) = judgement.verdicts[1].reasons
    assert told in reason
    assert CHECKS[check].remedy in reason


@pytest.mark.parametrize(
    ("check", "value"),
    [("cores", 4), ("memory", 61.9), ("kernel", "5.10"), ("clock", 7.0), ("scratch_free", 0.5)],
)
def test_a_warning_names_the_node_but_keeps_it(check: str, value: Value) -> None:
    judgement = judged(node("n1"), node("n2", **{check: value}), node("n3"))
    assert judgement.unfit == ()
    assert [verdict.status for verdict in judgement.verdicts] == ["ok", "warn", "ok"]
    assert judgement.verdicts[1].reasons[0].startswith(check.replace("_", " "))


def test_memory_within_three_percent_is_the_same_memory() -> None:
    judgement = judged(node("n1"), node("n2", memory=62.2), node("n3"))
    assert status(judgement.verdicts[1], "memory") is Status.OK


def test_nodes_that_all_differ_are_all_named() -> None:
    judgement = judged(node("n1", kernel="a"), node("n2", kernel="b"))
    assert [status(verdict, "kernel") for verdict in judgement.verdicts] == ["warn", "warn"]


def test_a_missing_tool_is_unknown_and_excludes_nobody() -> None:
    missing = Measure(unknown="nvidia-smi is not installed")
    judgement = judged(node("n1", gpus=missing), node("n2", gpus=missing))
    assert [status(verdict, "gpus") for verdict in judgement.verdicts] == ["unknown"] * 2
    assert judgement.healthy == ("n1", "n2")


def test_fewer_gpus_than_the_spec_asks_for_are_critical() -> None:
    judgement = judged(node("n1", gpus=8), node("n2", gpus=7), cluster={"gpus_per_node": 8})
    assert judgement.unfit == ("n2",)


def test_a_node_of_which_nothing_is_known_is_not_fit() -> None:
    judgement = judged(Probed(node="n1"), node("n2"))
    assert judgement.unfit == ("n1",)
    assert judgement.verdicts[0].status is Status.UNKNOWN
    assert judgement.verdicts[0].reasons


def test_a_node_without_a_probe_is_a_finding() -> None:
    judgement = judged(node("n1"), Probed(node="n2", failure="hardware on n2: NODE_FAIL"))
    assert judgement.unfit == ("n2",)
    assert "hardware on n2: NODE_FAIL" in judgement.verdicts[1].reasons[0]


def test_a_check_that_most_nodes_fail_is_suspected_itself() -> None:
    slow = [node(f"n{k}", disk_write=1.0) for k in range(3)]
    judgement = judged(*slow, node("n3"), node("n4"))
    assert judgement.suspect is not None
    assert "3 of 5 nodes fail the check 'disk_write': suspect the check" in judgement.suspect
    assert judged(*slow[:2], node("n3"), node("n4")).suspect is None


def test_so_is_the_probe_itself() -> None:
    failed = [Probed(node=f"n{k}", failure="ModuleNotFoundError") for k in range(3)]
    suspect = judged(*failed, node("n3")).suspect
    assert suspect is not None
    assert "'probe'" in suspect
    assert "ModuleNotFoundError" in suspect


def test_two_nodes_that_fail_are_no_evidence_against_a_check() -> None:
    judgement = judged(node("n1", matmul=0.1), node("n2", matmul=0.1))
    assert judgement.suspect is None
    assert judgement.healthy == ()


@example(value=math.inf, limit=1.0)
@example(value=math.nan, limit=1.0)
@given(value=st.floats(allow_nan=True, allow_infinity=True), limit=st.floats(0.1, 1e6))
def test_a_figure_passes_exactly_when_it_keeps_its_limit(value: float, limit: float) -> None:
    finding = judge_measure(CHECKS["matmul"], Measure(value=value), limit=limit)
    is_fine = math.isfinite(value) and value >= limit
    assert finding.status is (Status.OK if is_fine else Status.CRITICAL)
