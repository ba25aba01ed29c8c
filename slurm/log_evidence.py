"""Which of a job's many lines are evidence: a few ranks' last ones, the most telling first.

Hundreds of nodes write; what ended the job is on one of them, and often nobody could say on which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm.job_logs import SEARCH_BYTES, RankTail, batch_log, node_logs, node_tails, srun_log
from slurm.launchers import first_failure
from slurm.log_patterns import PEER_SIGNS, find_sign
from slurm.log_tails import tail
from slurm.tracebacks import TRACEBACK
from storage.attempts import Attempt

TAIL_BYTES = 6000
SCANNED_CHARACTERS = 2000
"""How much of a rank's end is searched to see whether it has something to say."""
MAX_RANKS = 8
MAX_NODES = 64
NODE_BYTES = 64 * 1024
"""How much is read of a node that nobody suspects: 4 MiB of a job of any size."""


@dataclass(frozen=True, kw_only=True)
class LogPart:
    """The end of one log: of a rank, or of the job itself, which has neither rank nor node."""

    name: str
    text: str
    rank: int | None = None
    node: str | None = None


def read_logs(folder: Path, attempt: Attempt) -> tuple[LogPart, ...]:
    """The ends of the attempt's logs in `folder`: the batch step's, srun's, and some ranks'."""
    batch = tail(batch_log(folder), size_bytes=TAIL_BYTES)
    srun = tail(srun_log(folder), size_bytes=TAIL_BYTES)
    word, failed = attempt.exit, first_failure(srun)
    suspects: list[str] = []
    if word is not None:
        suspects += [word.node, *word.blamed_nodes]
    if failed is not None and failed.node is not None:
        suspects.append(failed.node)
    rank = word.rank if word is not None else failed.rank if failed is not None else None
    own = (LogPart(name="batch.log", text=batch), LogPart(name="srun.log", text=srun))
    ranks = (
        LogPart(name=f"rank {one.rank} on {one.node}", text=one.text, rank=one.rank, node=one.node)
        for one in most_telling(_tails(folder, suspects), rank=rank)
    )
    return tuple(part for part in (*own, *ranks) if part.text)


def most_telling(tails: Iterable[RankTail], *, rank: int | None) -> list[RankTail]:
    """`MAX_RANKS` tails: that of `rank`, then those with an error of their own, then those that
    complain of others, then the rest; among equals as they come."""
    return sorted(tails, key=lambda one: (one.rank != rank, _silence(one.text)))[:MAX_RANKS]


def _silence(text: str) -> int:
    end = text[-SCANNED_CHARACTERS:]
    found = find_sign(end)
    if found is None:
        return 0 if TRACEBACK in end else 2
    return 1 if found.sign in PEER_SIGNS else 0


def _tails(folder: Path, suspects: Sequence[str]) -> Iterator[RankTail]:
    """Those of suspect nodes, then of the nodes that fell silent first."""
    logs = node_logs(folder)
    # A site may name the files by the nodes' short names.
    named = [one if one in logs else one.partition(".")[0] for one in suspects]
    first = list(dict.fromkeys(name for name in named if name in logs))
    others = sorted(logs.keys() - {*first}, key=lambda node: logs[node].stat().st_mtime)
    for node in [*first, *others][:MAX_NODES]:
        search_bytes = SEARCH_BYTES if node in first else NODE_BYTES
        yield from node_tails(folder, node, size_bytes=TAIL_BYTES, search_bytes=search_bytes)
