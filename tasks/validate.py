"""The validate stage: probe jobs on single nodes, then one all-reduce over the fit ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurm.cluster import NodeState
from slurm.health.candidates import Candidates, choose
from slurm.health.registry import ALLREDUCE, CHECKS, AllreduceJob, Measure, ProbeJob, Status
from slurm.health.verdict import Judgement, Probed, judge, judge_measure
from slurm.spec import ValidateSpec
from storage.records import Kind, Stage, StageRecord
from tasks.context import RunContext, Unit
from tasks.gates import Gate, run_gate
from tasks.runner import UnitResult, carry_out

_CarryOut = Callable[[Sequence[Unit]], Mapping[str, UnitResult]]


def validate(context: RunContext, spec: ValidateSpec) -> StageRecord:
    """The record of which nodes are fit: `healthy` and `unfit`, and every node's findings.

    Raises:
        StageFailed: too few are fit, a check is not to be believed, or the network is too slow.
        SpecError: a node is named that does not exist.
        SlurmError: the cluster does not tell which nodes it has.
    """
    nodes = context.cluster.nodes()
    chosen = candidates(context, spec, nodes)

    def body(fingerprint: str) -> Gate:
        ours = _taken(context, nodes, fingerprint)

        def carry(units: Sequence[Unit]) -> Mapping[str, UnitResult]:
            return carry_out(
                context,
                Stage.VALIDATE,
                units,
                fingerprint=fingerprint,
                tolerate=True,
                max_age_h=spec.expires_h,
            )

        found, reason = _examine(context, spec, candidates(context, spec, ours), carry)
        for node, why in sorted(found.unfit.items()):
            context.eyes.say(f"{node} is unfit: {why}")
        return Gate(
            passed=reason is None,
            reason=reason or f"{len(found.healthy)} nodes are fit",
            outputs=found.outputs(),
        )

    return run_gate(
        context,
        Stage.VALIDATE,
        inputs=inputs(context, spec, nodes),
        body=body,
        expires_h=spec.expires_h,
        units=[unit.name for unit in units(context, chosen, spec)],
    )


def inputs(
    context: RunContext, spec: ValidateSpec, nodes: Sequence[NodeState]
) -> Mapping[str, Any]:
    """What the verdicts depend on: which nodes there are, not what they happen to do now."""
    return {
        "validation": spec,
        "nodes": sorted(node.name for node in nodes),
        "exclude": sorted(context.cluster_spec.exclude),
        "needed": _needed(context, spec),
        "gpus_per_node": context.cluster_spec.gpus_per_node,
    }


def candidates(context: RunContext, spec: ValidateSpec, nodes: Sequence[NodeState]) -> Candidates:
    """The nodes to probe now."""
    verdicts = context.ledger.stage_records(Stage.VALIDATE)
    return choose(
        nodes,
        named=spec.nodes,
        excluded=context.cluster_spec.exclude,
        last_healthy=frozenset(verdicts[-1].outputs["healthy"] if verdicts else ()),
        needed=_needed(context, spec),
    )


def _taken(
    context: RunContext, nodes: Sequence[NodeState], fingerprint: str
) -> tuple[NodeState, ...]:
    """The nodes, where those that this very validation has probes of count as idle.

    It may be carried on by another engine than began it, and the jobs that keep a node busy, or a
    probe under which it died, are its own.
    """
    probed: set[str] = set()
    number = 1
    while (intent := context.ledger.intent(Stage.VALIDATE, number)) is not None:
        if intent.fingerprint == fingerprint:
            probed.update(intent.node_list)
        number += 1
    return tuple(replace(node, idle=True) if node.name in probed else node for node in nodes)


def units(context: RunContext, chosen: Candidates, spec: ValidateSpec) -> tuple[Unit, ...]:
    """A probe for each node; the all-reduce follows when it is known which ones are fit."""
    job = ProbeJob(scratch=spec.scratch)
    return tuple(
        Unit(
            name=f"probe-{node}",
            entry="slurm.health.probe",
            payload=job.model_dump(mode="json"),
            node_list=(node,),
            time_limit_min=_minutes(context, spec.timeout_s),
            tries=1,
        )
        for node in chosen.probe
    )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """All that is known of the nodes so far. `blamed` are those that failed the all-reduce."""

    chosen: Candidates
    judgement: Judgement
    blamed: Mapping[str, str] = field(default_factory=dict)
    network: Measure | None = None

    @property
    def unfit(self) -> Mapping[str, str]:
        """The nodes that no later job may use. A check that is suspect itself excludes nobody."""
        judged = {
            verdict.node: "; ".join(verdict.reasons)
            for verdict in self.judgement.verdicts
            if not verdict.healthy and self.judgement.suspect is None
        }
        return {**self.chosen.out, **judged, **self.blamed}

    @property
    def fit(self) -> tuple[str, ...]:
        """The nodes that passed all there was, in their order."""
        return tuple(node for node in self.judgement.healthy if node not in self.unfit)

    @property
    def healthy(self) -> tuple[str, ...]:
        return tuple(sorted((*self.fit, *self.chosen.kept)))

    def outputs(self) -> Mapping[str, Any]:
        """The stage's outputs; a row of `nodes` for every node that was looked at."""
        rows = {
            node: {"verdict": Status.CRITICAL, "findings": [why], "measures": {}}
            for node, why in self.chosen.out.items()
        }
        rows |= {
            node: {"verdict": Status.OK, "findings": ["busy, keeps its verdict"], "measures": {}}
            for node in self.chosen.kept
        }
        for verdict in self.judgement.verdicts:
            blame = self.blamed.get(verdict.node)
            rows[verdict.node] = {
                "verdict": verdict.status if blame is None else Status.CRITICAL,
                "findings": [*([] if blame is None else [blame]), *verdict.reasons],
                "measures": {
                    finding.check: finding.measured
                    for finding in verdict.findings
                    if finding.check in CHECKS and CHECKS[finding.check].in_table
                },
            }
        return {
            "healthy": self.healthy,
            "unfit": sorted(self.unfit),
            "nodes": [{"node": node, **rows[node]} for node in sorted(rows)],
            "allreduce_gb_per_s": None if self.network is None else self.network.value,
        }


def _examine(
    context: RunContext, spec: ValidateSpec, chosen: Candidates, carry: _CarryOut
) -> tuple[_Found, str | None]:
    """What was found, and why it does not do; None when it does."""
    probes = units(context, chosen, spec)
    results = carry(probes)
    judgement = judge(
        [_probed(unit.node_list[0], results[unit.name]) for unit in probes],
        spec=spec,
        cluster=context.cluster_spec,
    )
    if (refusal := _refusal_of_all(results.values())) is not None:
        judgement = replace(judgement, suspect=refusal)
    found = _Found(chosen=chosen, judgement=judgement)
    if judgement.suspect is not None:
        return found, judgement.suspect
    while (shortage := _shortage(context, spec, found)) is None and len(found.fit) > 1:
        unit = _allreduce(context, found.fit, spec)
        result = carry([unit])[unit.name]
        if result.done:
            network = Measure(value=result.outputs["bus_gb_per_s"])
            finding = judge_measure(ALLREDUCE, network, limit=spec.min_allreduce_gb_per_s)
            found = replace(found, network=network)
            return found, None if finding.status is Status.OK else str(finding)
        diagnosis = result.end.diagnosis
        culprits = set(diagnosis.culprit_nodes) & set(found.fit)
        if not culprits:
            failed = f"the all-reduce over {', '.join(found.fit)} failed: {diagnosis.message}"
            # A mistake in the spec is no matter of the network.
            return found, failed if diagnosis.kind is Kind.CODE else f"{failed}; {ALLREDUCE.remedy}"
        # Whoever is blamed leaves, and the others try again.
        blame = dict.fromkeys(culprits, f"failed the all-reduce: {diagnosis.message}")
        found = replace(found, blamed={**found.blamed, **blame})
    return found, shortage


def _refusal_of_all(results: Collection[UnitResult]) -> str | None:
    """What sbatch said, where it took no probe at all: then no node has been looked at."""
    is_refused = [
        not one.done and one.attempt.start is None and one.end.diagnosis.kind is Kind.CODE
        for one in results
    ]
    if not results or not all(is_refused):
        return None
    said = next(iter(results)).end.diagnosis.message
    return f"no probe could be submitted, so no node was looked at: {said}; correct `cluster`"


def _probed(node: str, result: UnitResult) -> Probed:
    if not result.done:
        return Probed(node=node, failure=result.end.diagnosis.message)
    measures = result.outputs["measures"]
    return Probed(
        node=node, measures={name: Measure(**fields) for name, fields in measures.items()}
    )


def _allreduce(context: RunContext, nodes: tuple[str, ...], spec: ValidateSpec) -> Unit:
    return Unit(
        name="all-reduce",
        entry="slurm.health.allreduce",
        payload=AllreduceJob(timeout_s=spec.timeout_s).model_dump(mode="json"),
        nodes=len(nodes),
        node_list=nodes,
        time_limit_min=_minutes(context, 2 * spec.timeout_s),
        tries=1,
    )


def _shortage(context: RunContext, spec: ValidateSpec, found: _Found) -> str | None:
    needed = _needed(context, spec)
    if len(found.healthy) >= needed:
        return None
    source = "cluster.nodes" if spec.min_healthy is None else "validation.min_healthy"
    told = "".join(f"\n  {node}: {why}" for node, why in sorted(found.unfit.items()))
    return (
        f"{len(found.healthy)} nodes are fit and {source} asks for {needed}; repair the others and "
        f"run the same command again, or lower {source}{told}"
    )


def _needed(context: RunContext, spec: ValidateSpec) -> int:
    return context.cluster_spec.least_nodes if spec.min_healthy is None else spec.min_healthy


def _minutes(context: RunContext, seconds: float) -> int:
    """A partition that takes no longer jobs than the spec's takes no longer probes either."""
    return min(math.ceil(seconds / 60), context.cluster_spec.time_limit_min)
