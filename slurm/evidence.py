"""What is known of an attempt that is over: gathered once, at the edge, then only looked at.

Observation, cause and action are kept apart: here is what was seen, `slurm.diagnose` says why,
`slurm.policy` what follows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from slurm.cluster import JobObservation, NodeState
from slurm.job_logs import batch_log, element_folder
from slurm.log_evidence import LogPart, read_logs
from storage.attempts import Attempt, Element


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
    """Evidence of one attempt, with the ends of its logs in `folder`.

    Of an array it is that of the one element which says most: one cause is looked for.
    """
    if attempt.is_array:
        element = telling_element(attempt)
        attempt = as_of_element(attempt, element)
        folder = element_folder(folder, _first_logged(folder) if element is None else element)
    return Evidence(
        attempt=attempt,
        job=observation,
        node_states={node.name: node for node in nodes},
        logs=read_logs(folder, attempt),
        now=now,
        heartbeat_s=heartbeat_s,
        uid=os.getuid(),
    )


def telling_element(attempt: Attempt) -> int | None:
    """The element whose end is the attempt's: the one that said so, else the one that was silent
    first without a word. None where none ever came."""
    if attempt.exit is not None:
        return attempt.exit.element
    wordless = [one for one in attempt.elements if one.exit is None]
    if not wordless:
        return None
    return min(wordless, key=lambda one: _last_sign(attempt, one)).number


def as_of_element(attempt: Attempt, element: int | None) -> Attempt:
    """The attempt as if that element were all of it; others say nothing about its end.

    Elements come and go at times of their own: that one is behind, or silent, accuses nobody.
    """
    if element is None:
        return attempt
    own = next((one for one in attempt.elements if one.number == element), Element(number=element))
    return replace(
        attempt,
        start=own.start or attempt.start,
        heartbeats=tuple(beat for beat in attempt.heartbeats if beat.element == element),
    )


def _last_sign(attempt: Attempt, element: Element) -> datetime:
    beats = [beat.at for beat in attempt.heartbeats if beat.element == element.number]
    begun = attempt.intent.created_at if element.start is None else element.start.at
    return max(beats, default=begun)


def _first_logged(folder: Path) -> int | None:
    """An element that failed before it could say anything elsewhere."""
    folders = folder.glob(element_folder(Path(), "[0-9]*").name)
    numbers = sorted(int(path.suffix[1:]) for path in folders if batch_log(path).exists())
    return numbers[0] if numbers else None
