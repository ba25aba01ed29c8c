"""The place of a rank in its job, for tests that start none under srun."""

from __future__ import annotations

from storage.job import RankIdentity

ALONE = RankIdentity(
    rank=0,
    world_size=1,
    local_rank=0,
    node="n1",
    nodes=("n1",),
    master_addr="127.0.0.1",
    master_port=1,
)
"""The only rank of a job of one node. No port is opened there until a process group starts."""
