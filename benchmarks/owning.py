"""Headrace's loop around one command on a cluster, as the benchmarks start it in their processes.

HEADRACE_BENCH_STORE holds the store's spec as JSON, SLURM_CONF names the cluster.
"""

from __future__ import annotations

import os
from pathlib import Path

from slurm.cluster import open_cluster
from slurm.snapshot import take_snapshot
from slurm.spec import ClusterSpec, RetrySpec
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.spec import StoreSpec
from tasks.command import run_command
from tasks.context import RunContext
from tasks.eyes import Eyes
from trainer.spec import CommandSpec


class Printing(Eyes):
    """Prints what the loop says, for a log that is read when a benchmark fails."""

    def say(self, message: str) -> None:
        print(message, flush=True)

    def cancel_requested(self) -> bool:
        return False


def own(command: CommandSpec, *, folder: Path, cluster: ClusterSpec) -> None:
    """Carry `command` out to its end, with the spec's defaults for everything else."""
    store = StoreSpec.model_validate_json(os.environ["HEADRACE_BENCH_STORE"])
    spec = cluster.model_copy(update={"slurm_conf": Path(os.environ["SLURM_CONF"])})
    context = RunContext(
        run=folder.name,
        workdir=folder,
        cluster=open_cluster(spec, workdir=folder),
        cluster_spec=spec,
        retry=RetrySpec(),
        store=store,
        ledger=Ledger(ObjectStore(store), RunKeys(prefix=store.prefix, run=folder.name)),
        snapshot=take_snapshot(folder),
        eyes=Printing(),
    )
    run_command(context, command)
