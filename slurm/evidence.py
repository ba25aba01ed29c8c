"""What is known of an attempt that is over: gathered once, at the edge, then only looked at.

Observation, cause and action are kept apart: here is what was seen, `slurm.diagnose` says why,
`slurm.policy` what follows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from slurm.cluster import JobObservation, NodeState
from slurm.launchers import rank_log, srun_log
from slurm.log_tails import tail
from storage.records import Attempt

_TAIL_BYTES = 6000
_MAX_RANK_LOGS = 8


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that a diagnosis may look at. `uid` is the user whose jobs these are."""

    attempt: Attempt
    job: JobObservation | None
    node_states: Mapping[str, NodeState] = field(default_factory=dict)
    log_tail: str = ""
    now: datetime
    heartbeat_s: float = 5.0
    uid: int | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that the attempt had, as its own start says, else as Slurm does."""
        if self.attempt.start is not None and self.attempt.start.nodes:
            return self.attempt.start.nodes
        return self.job.nodes if self.job is not None else ()

    @property
    def ended_at(self) -> datetime:
        """About when it ended: the exit record, else the last sign of life."""
        attempt = self.attempt
        if attempt.exit is not None:
            return attempt.exit.at
        signs = [beat.at for beat in attempt.heartbeats]
        if attempt.start is not None:
            signs.append(attempt.start.at)
        return max(signs, default=attempt.intent.created_at)


def gather(
    attempt: Attempt,
    observation: JobObservation | None,
    *,
    nodes: Sequence[NodeState],
    folder: Path,
    now: datetime,
    heartbeat_s: float = 5.0,
) -> Evidence:
    """Evidence of one attempt, with the ends of its logs in `folder`."""
    return Evidence(
        attempt=attempt,
        job=observation,
        node_states={node.name: node for node in nodes},
        log_tail=read_logs(folder, first_rank=attempt.exit.rank if attempt.exit else None),
        now=now,
        heartbeat_s=heartbeat_s,
        uid=os.getuid(),
    )


def read_logs(folder: Path, *, first_rank: int | None = None) -> str:
    """The ends of the job's logs: the batch step's, srun's, and those of a few ranks."""
    ranks = [] if first_rank is None else [first_rank]
    ranks += [rank for rank in range(_MAX_RANK_LOGS) if rank != first_rank]
    paths = [folder / "batch.log", srun_log(folder), *(rank_log(folder, rank) for rank in ranks)]
    tails = ((path.name, tail(path, size_bytes=_TAIL_BYTES)) for path in paths)
    return "\n".join(f"==> {name}\n{text}" for name, text in tails if text)
