"""Which nodes there are now and which of them are kept out: asked of the cluster and the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from slurm.cluster import NodeState
from slurm.health.candidates import Standing, standing
from storage.attempts import Attempt
from storage.ledger import Ledger
from storage.records import Stage
from tasks.context import RunContext
from tasks.engine import Engine
from tasks.exclusions import Exclusion, exclusions, passed_nodes


@dataclass(frozen=True, kw_only=True)
class Surveyed:
    """The partition's nodes, and why some of them may not be used."""

    nodes: tuple[NodeState, ...]
    excluded: Mapping[str, Exclusion] = field(default_factory=dict)

    @property
    def num_usable(self) -> int:
        """How many a job could have, were nothing else running."""
        return sum(
            standing(node) is not Standing.OUT
            and not (node.name in self.excluded and self.excluded[node.name].proven)
            for node in self.nodes
        )


def survey(context: RunContext, *, closed: Iterable[Attempt], now: datetime) -> Surveyed:
    """What there is now, by the ends of the attempts `closed` and by the validations so far.

    These are read anew, since a node that passes one comes back while an engine waits for it.
    """
    validations = context.ledger.stage_records(Stage.VALIDATE)
    newest = max(validations, key=lambda record: record.at, default=None)
    mended = frozenset() if newest is None else frozenset(newest.outputs["healthy"])
    excluded = exclusions(
        by_spec=context.cluster_spec.exclude,
        unfit=context.unfit_nodes - mended,
        closed=closed,
        passed_at=passed_nodes(validations),
        now=now,
        exclude_h=context.retry.exclude_h,
    )
    return Surveyed(nodes=context.cluster.nodes(), excluded=excluded)


def all_ends(ledger: Ledger) -> tuple[Attempt, ...]:
    """The closed attempts of every stage, with what each decided about nodes."""
    return tuple(one for stage in Stage for one in ledger.ends(stage))


def nodes_there(context: RunContext) -> int:
    """How many nodes the training could have now, within what the spec asks for.

    Raises:
        SlurmError: the cluster does not tell which nodes it has, where that matters.
    """
    spec = context.cluster_spec
    if spec.least_nodes == spec.most_nodes or context.cluster.replaces_nodes:
        return spec.most_nodes
    now = (context.engine or Engine()).clock.now()
    found = survey(context, closed=all_ends(context.ledger), now=now)
    return max(spec.least_nodes, min(spec.most_nodes, found.num_usable))
