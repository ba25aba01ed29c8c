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
from slurm.log_evidence import LogPart, read_logs
from storage.records import Attempt


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that a diagnosis may look at. `uid` is the user whose jobs these are.

    `logs` begin with the job's own; after them come those that are likeliest to say why.
    """

    attempt: Attempt
    job: JobObservation | None
    node_states: Mapping[str, NodeState] = field(default_factory=dict)
    logs: tuple[LogPart, ...] = ()
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
    def log_text(self) -> str:
        """All logs' ends, one after the other."""
        return "\n".join(part.text for part in self.logs)

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
        logs=read_logs(folder, attempt),
        now=now,
        heartbeat_s=heartbeat_s,
        uid=os.getuid(),
    )
