"""Which nodes are fit: pure, from the measures of all nodes and the registry's rows.

A critical finding excludes a node. But a check that fails on more than half of the nodes says more
about itself, or about something all nodes share, than about them: then nobody is excluded and the
check is named.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurm.health.registry import NODE_CHECKS, PROBE, Check, Measure, Rule, Status, Value
from slurm.spec import ClusterSpec, ValidateSpec

SUSPECT_FROM_NODES = 3
# A node may lack tools, so what could not be measured tells less than one check that is fine.
_WORST_FIRST = (Status.CRITICAL, Status.WARN, Status.OK, Status.UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class Probed:
    """A node and what its probe told; `failure` says why there was no probe."""

    node: str
    measures: Mapping[str, Measure] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check on one node."""

    check: str
    status: Status
    measured: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        expected = f" (expected: {self.expected})" if self.expected else ""
        return f"{self.check.replace('_', ' ')}: {self.measured}{expected}; {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class NodeVerdict:
    """A node with all its findings; a critical one makes it unfit, and so does knowing nothing."""

    node: str
    findings: tuple[Finding, ...]

    @property
    def status(self) -> Status:
        """The worst finding."""
        found = {finding.status for finding in self.findings}
        return next(one for one in _WORST_FIRST if one in found)

    @property
    def healthy(self) -> bool:
        return self.status in (Status.OK, Status.WARN)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What is wrong with the node, the worst first."""
        told = (
            (Status.UNKNOWN,) if self.status is Status.UNKNOWN else (Status.CRITICAL, Status.WARN)
        )
        return tuple(
            str(finding) for one in told for finding in self.findings if finding.status is one
        )


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """All verdicts, in the order of the nodes; `suspect` says which check is not to be believed."""

    verdicts: tuple[NodeVerdict, ...]
    suspect: str | None = None

    @property
    def healthy(self) -> tuple[str, ...]:
        return tuple(verdict.node for verdict in self.verdicts if verdict.healthy)

    @property
    def unfit(self) -> tuple[str, ...]:
        return tuple(verdict.node for verdict in self.verdicts if not verdict.healthy)


def judge(probed: Sequence[Probed], *, spec: ValidateSpec, cluster: ClusterSpec) -> Judgement:
    """The verdict on each node that was to be probed."""
    references = {
        check.name: _reference([node.measures.get(check.name) for node in probed], check)
        for check in NODE_CHECKS
        if check.rule is Rule.LIKE_MOST
    }
    verdicts = tuple(
        NodeVerdict(
            node=node.node,
            findings=_findings(node, references=references, spec=spec, cluster=cluster),
        )
        for node in probed
    )
    return Judgement(verdicts=verdicts, suspect=_suspect(verdicts))


def _findings(
    node: Probed,
    *,
    references: Mapping[str, Value | None],
    spec: ValidateSpec,
    cluster: ClusterSpec,
) -> tuple[Finding, ...]:
    if node.failure:
        return (judge_measure(PROBE, Measure(failure=node.failure)),)
    found = []
    for check in NODE_CHECKS:
        measure = node.measures.get(check.name, Measure(unknown="the probe did not tell"))
        limit = None if check.limit is None else check.limit(spec, cluster)
        found.append(
            judge_measure(check, measure, limit=limit, reference=references.get(check.name))
        )
    return tuple(found)


def judge_measure(
    check: Check,
    measure: Measure,
    *,
    limit: float | None = None,
    reference: Value | None = None,
) -> Finding:
    """One row applied to one measure. `reference` is what most nodes say, None if they differ."""
    value, expected = measure.value, _expected(check, limit=limit, reference=reference)
    if measure.failure:
        status, measured = check.severity, measure.failure
    elif value is None:
        status, measured = Status.UNKNOWN, measure.unknown
    else:
        fits = _fits(check, value, limit=limit, reference=reference)
        status, measured = Status.OK if fits else check.severity, _text(value, check.unit)
    return Finding(
        check=check.name,
        status=status,
        measured=measured,
        expected=expected,
        remedy=check.remedy,
    )


def _fits(check: Check, value: Value, *, limit: float | None, reference: Value | None) -> bool:
    match check.rule:
        case Rule.DONE | Rule.SHOWN:
            return True
        case Rule.LIKE_MOST:
            if isinstance(value, str) or isinstance(reference, str) or reference is None:
                return value == reference
            return abs(value - reference) <= check.tolerance * abs(reference)
        case Rule.AT_LEAST | Rule.AT_MOST:
            assert limit is not None
            if isinstance(value, str) or not math.isfinite(value):
                return False
            return value >= limit if check.rule is Rule.AT_LEAST else value <= limit


def _expected(check: Check, *, limit: float | None, reference: Value | None) -> str:
    match check.rule:
        case Rule.AT_LEAST | Rule.AT_MOST:
            assert limit is not None
            return f"{check.rule} {_text(limit, check.unit)}, {check.source}"
        case Rule.LIKE_MOST if reference is None:
            return "the same on all nodes, and no value is on most of them"
        case Rule.LIKE_MOST:
            assert reference is not None
            return f"{_text(reference, check.unit)}, as on most nodes"
        case Rule.DONE | Rule.SHOWN:
            return ""


def _reference(measures: Sequence[Measure | None], check: Check) -> Value | None:
    """What most nodes say: the median where a tolerance is allowed, else what over half share."""
    values = [one.value for one in measures if one is not None and one.value is not None]
    if not values:
        return None
    if check.tolerance:
        return statistics.median(value for value in values if not isinstance(value, str))
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else None


def _suspect(verdicts: Sequence[NodeVerdict]) -> str | None:
    if len(verdicts) < SUSPECT_FROM_NODES:
        return None
    failed: dict[str, list[tuple[str, Finding]]] = {}
    for verdict in verdicts:
        for finding in verdict.findings:
            if finding.status is Status.CRITICAL:
                failed.setdefault(finding.check, []).append((verdict.node, finding))
    for check, found in failed.items():
        if 2 * len(found) > len(verdicts):
            node, finding = found[0]
            return (
                f"{len(found)} of {len(verdicts)} nodes fail the check {check!r}: suspect the "
                f"check, its threshold or something all nodes share, not the nodes. {node} says "
                f"{finding}"
            )
    return None


def _text(value: Value, unit: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    figure = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{figure} {unit}".strip()
