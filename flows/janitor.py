"""`headrace janitor`: ends jobs that nobody waits for, in all runs that this user knows of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from flows.home import Home
from flows.opening import open_ledger
from flows.spec import PipelineSpec
from slurm.cluster import Cluster, JobObservation, open_cluster
from storage.errors import HeadraceError
from tasks.janitor import end_orphans, named_by


def remembered_specs(home: Home) -> Iterator[PipelineSpec]:
    """The specs of the runs that this user has started; not what another version wrote."""
    for path in sorted(home.runs.glob("*.json")):
        try:
            yield PipelineSpec.model_validate_json(path.read_text())
        except (OSError, ValidationError):
            continue


def tidy(specs: Iterable[PipelineSpec]) -> Iterator[str]:
    """End the orphans of each run; tells what was done, and which runs could not be looked at.

    Where the queue holds no job of a run, its store is not even asked.
    """
    queues: dict[Path | None, Mapping[str, JobObservation]] = {}
    for spec in specs:
        # Where jobs stay on this host, each workdir has a queue of its own.
        site = spec.cluster.slurm_conf if spec.cluster.spans_hosts else spec.workdir
        cluster = open_cluster(spec.cluster, workdir=spec.workdir)
        try:
            if site not in queues:
                queues[site] = cluster.queue()
            yield from _tidy_run(spec, cluster, queues[site])
        except HeadraceError as error:
            yield f"run {spec.run} was not looked at: {error}"


def _tidy_run(
    spec: PipelineSpec, cluster: Cluster, queue: Mapping[str, JobObservation]
) -> Iterator[str]:
    jobs = {token: job for token, job in queue.items() if named_by(token, run=spec.run)}
    if not jobs:
        return
    with open_ledger(spec) as (_, ledger):
        yield from end_orphans(ledger, cluster, jobs)
