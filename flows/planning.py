"""What a run would do: found out by reading alone, and without Prefect.

Where store or cluster cannot be asked, that is said, and nothing counts as finished.
"""

from __future__ import annotations

import getpass
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flows.opening import open_ledger, told_changes
from flows.spec import PipelineSpec
from flows.steps import sums_of
from flows.watchers import AllEyes
from headrace import application_folder
from slurm.cluster import Cluster, NodeState, open_cluster
from slurm.snapshot import Snapshot, digest_of
from storage import embedded
from storage.errors import SlurmError, StoreError
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.records import Intent, Stage, StageRecord, Why
from storage.shards.build import plan_shards
from tasks import command, prune, shard, smoke, train, validate
from tasks.context import RunContext, Unit
from tasks.jobs import describe, resources
from tasks.last_word import is_passed
from tasks.report import summary
from tasks.stage import find_completed
from tasks.survey import Surveyed
from trainer.plan.arithmetic import RunSums

LATER = "(known after the shard stage)"
PADDING_TOLD = 0.1
"""More of a step than this should not be spent on padding without being told."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What would happen to one stage. `script` is that of its largest job."""

    stage: Stage
    skipped: bool
    because: str
    units: tuple[Unit, ...] = ()
    script: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is known before anything is submitted. `notes` say what could not be asked.

    `sums` are those of the least and of the most nodes where the spec gives a range; there are none
    where the training script is somebody's own.
    """

    stages: tuple[StagePlan, ...]
    sums: tuple[RunSums, ...]
    notes: tuple[str, ...]


def plan_run(spec: PipelineSpec) -> Plan:
    """The plan of the run that `spec` names.

    Raises:
        SpecError: no file matches an input, a tokenizer or a model does not fit, or the run was
            begun with another spec and cannot go on with this one.
    """
    sums = sums_of(spec) if spec.command is None else ()
    notes = [*padding_told(spec)] if spec.command is None else []
    with ExitStack() as stack:
        ledger = _ledger(spec, stack, notes)
        notes += _changed(ledger, spec)
        cluster = open_cluster(spec.cluster, workdir=spec.workdir)
        nodes = _nodes(cluster, notes)
        planner = _Planner(spec=spec, context=_context(spec, cluster, ledger), nodes=nodes)
        stages = tuple(planner.plans())
    return Plan(stages=stages, sums=sums, notes=tuple(notes))


def padding_told(spec: PipelineSpec) -> Iterator[str]:
    """That a number of nodes which the training may have wastes much of each step."""
    cluster, train = spec.cluster, spec.train
    worst = max(
        range(cluster.least_nodes, cluster.most_nodes + 1),
        key=lambda nodes: train.padding(nodes * cluster.ranks_per_node),
    )
    ranks = worst * cluster.ranks_per_node
    if (padding := train.padding(ranks)) > PADDING_TOLD:
        above = -(-train.global_batch // ranks) * ranks
        yield (
            f"On {worst} nodes {padding:.0%} of each step is padding: {ranks} ranks cannot share "
            f"train.global_batch {train.global_batch} evenly. Of {above} there would be none."
        )


class _BlankLedger(Ledger):
    """The ledger of a store that cannot be read."""

    def __init__(self, keys: RunKeys) -> None:
        self.keys = keys

    def stage_records(self, stage: Stage) -> tuple[StageRecord, ...]:
        del stage
        return ()


@dataclass(frozen=True, kw_only=True)
class _Planner:
    spec: PipelineSpec
    context: RunContext
    nodes: tuple[NodeState, ...]

    def plans(self) -> Iterator[StagePlan]:
        """The stages in their order; what one needs of another that would run is not known yet."""
        context, spec, nodes = self.context, self.spec, self.nodes
        validated = self._find(
            Stage.VALIDATE,
            lambda: validate.inputs(context, spec.validation, nodes),
            expires_h=spec.validation.expires_h,
        )
        chosen = validate.candidates(context, spec.validation, nodes) if nodes else None
        probes = () if chosen is None else validate.units(context, chosen, spec.validation)
        yield self._plan(Stage.VALIDATE, probes, validated)
        if spec.command is None:
            yield from self._own_trainer()
            return
        asked = command.inputs(context, spec.command)
        ended = self._find(Stage.TRAIN, lambda: asked)
        yield self._plan(Stage.TRAIN, command.units(context, spec.command), ended)

    def _own_trainer(self) -> Iterator[StagePlan]:
        context, spec = self.context, self.spec
        job = plan_shards(spec.documents)
        shards = self._find(Stage.SHARD, lambda: shard.inputs(job))
        yield self._plan(Stage.SHARD, shard.units(job, jobs=spec.documents.jobs), shards)
        key = LATER if shards is None else str(shards.outputs["manifest_key"])
        rungs = smoke.units(
            context, spec.smoke, train=spec.train, manifest_key=key, top=self._nodes_there()
        )
        climbed = shards and self._find(
            Stage.SMOKE,
            lambda: smoke.inputs(context, spec.smoke, train=spec.train, manifest_key=key),
        )
        yield self._plan(Stage.SMOKE, rungs, climbed)
        trained = shards and self._find(
            Stage.TRAIN, lambda: train.inputs(context, spec.train, manifest_key=key)
        )
        units = train.units(context, spec.train, manifest_key=key)
        yield self._plan(Stage.TRAIN, units, trained)
        pruned = trained and self._find(
            Stage.PRUNE, lambda: prune.inputs(context.ledger, spec.retention)
        )
        yield self._plan(Stage.PRUNE, prune.units(spec.retention), pruned)

    def _nodes_there(self) -> int:
        """How many nodes the training could have by what the cluster says, where it says so."""
        cluster, there = self.spec.cluster, Surveyed(nodes=self.nodes).num_usable
        if not self.nodes:
            return cluster.most_nodes
        return max(cluster.least_nodes, min(cluster.most_nodes, there))

    def _find(
        self,
        stage: Stage,
        inputs: Callable[[], Mapping[str, Any]],
        *,
        expires_h: float | None = None,
    ) -> StageRecord | None:
        if isinstance(self.context.ledger, _BlankLedger):
            return None
        return find_completed(self.context, stage, inputs=inputs(), expires_h=expires_h)

    def _plan(self, stage: Stage, units: tuple[Unit, ...], found: StageRecord | None) -> StagePlan:
        skipped = found is not None and is_passed(found)
        if found is None:
            because = "nothing finished of this spec, these inputs and this code"
        elif skipped:
            because = f"finished {found.at:%Y-%m-%d %H:%M} UTC: {summary(found)}"
        else:
            because = f"measured anew, since it was {summary(found)}"
        return StagePlan(
            stage=stage,
            skipped=skipped,
            because=because,
            units=units,
            script=self._largest_script(stage, units) if units else "",
        )

    def _largest_script(self, stage: Stage, units: tuple[Unit, ...]) -> str:
        unit = max(units, key=lambda unit: unit.wanted_nodes)
        context = self.context
        elements = self._elements(unit)
        intent = Intent(
            run=context.run,
            stage=stage,
            unit=unit.name,
            attempt=1,
            token=f"{context.run}-{stage}-0001-{'0' * 16}",
            nonce="0" * 16,
            cluster="",
            user=getpass.getuser(),
            why=Why.FIRST,
            after=None,
            nodes=unit.nodes,
            most_nodes=unit.most_nodes,
            ranks_per_node=unit.ranks_per_node,
            elements=elements,
            node_list=unit.node_list,
            fingerprint="",
            created_at=datetime.now(UTC),
        )
        excluded = tuple(context.cluster_spec.exclude)
        asked = resources(
            context, unit, elements=elements, excluded=excluded, most_nodes=unit.most_nodes
        )
        job = describe(context, intent, unit)
        # submitit makes a job's folder when it is asked for the script.
        with TemporaryDirectory(prefix="headrace-plan-") as scratch:
            script = context.cluster.script(replace(job, folder=Path(scratch)), asked)
        return script.replace(scratch, str(job.folder))

    def _elements(self, unit: Unit) -> int:
        """Of how many the array would be; where no cluster answers, of as many as are asked for."""
        try:
            return min(unit.elements, self.context.cluster.max_elements)
        except SlurmError:
            return unit.elements


def _ledger(spec: PipelineSpec, stack: ExitStack, notes: list[str]) -> Ledger:
    blank = _BlankLedger(RunKeys(prefix=spec.store.prefix, run=spec.run))
    server = embedded.store_of(spec.store, workdir=spec.workdir)
    if server is not None and not server.status().running:
        notes.append("The embedded store is not running, so nothing counts as finished here.")
        return blank
    try:
        _, ledger = stack.enter_context(open_ledger(spec))
        ledger.run_record()
    except StoreError as error:
        notes.append(f"The store cannot be read, so nothing counts as finished here: {error}")
        return blank
    return ledger


def _changed(ledger: Ledger, spec: PipelineSpec) -> tuple[str, ...]:
    """What is not as it was when the run began, where it has begun and can be read."""
    record = None if isinstance(ledger, _BlankLedger) else ledger.run_record()
    return () if record is None else told_changes(ledger, record, spec)


def _nodes(cluster: Cluster, notes: list[str]) -> tuple[NodeState, ...]:
    try:
        return cluster.nodes()
    except SlurmError as error:
        notes.append(f"The cluster does not say which nodes it has: {error}")
        return ()


def _context(spec: PipelineSpec, cluster: Cluster, ledger: Ledger) -> RunContext:
    digest = digest_of(application_folder())
    snapshot = Snapshot(
        path=spec.workdir / "code" / digest, digest=digest, git_commit=None, git_dirty=None
    )
    return RunContext(
        run=spec.run,
        workdir=spec.workdir,
        cluster=cluster,
        cluster_spec=spec.cluster,
        retry=spec.retry,
        store=spec.store,
        ledger=ledger,
        snapshot=snapshot,
        eyes=AllEyes(),
    )
