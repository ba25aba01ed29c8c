"""Submits the job that a file describes: run inside an allocation, as a pipeline may be."""

from __future__ import annotations

import sys
from pathlib import Path

from slurm.cluster import Resources
from slurm.spec import ClusterSpec
from slurm.submit import SlurmCluster
from storage.job import JobDescription

if __name__ == "__main__":
    spec = ClusterSpec.model_validate_json(Path(sys.argv[1]).read_bytes())
    job = JobDescription.read(Path(sys.argv[2]))
    asked = Resources(
        nodes=job.intent.nodes,
        ranks_per_node=job.intent.ranks_per_node,
        memory_per_node="300M",
        time_limit_min=2,
        signal_lead_s=30,
    )
    job.open_ledger().claim_intent(job.intent)
    Path(sys.argv[3]).write_text(SlurmCluster(spec).submit(job, asked), encoding="ascii")
