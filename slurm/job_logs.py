"""Where a job's logs are, and which lines of them are whose.

A node has one file for all its ranks, whose lines carry their rank, as in `3: text`: a file for
each rank would be tens of thousands in a large run, and their growth more than the metadata server
of a shared file system bears. Everybody who reads a log reads it through here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm.log_tails import tail

NODE_PATTERN = "node.{}.log"
"""The file's name for a node, or for Slurm's `%N`."""

SIDECAR_PATTERN = "sidecar.{}.log"
"""Where a node's sidecar writes. It is no rank: nothing of it is evidence of why a job ended."""

SEARCH_BYTES = 512 * 1024
"""How far back one rank's lines are looked for among those of its node."""

_LABELLED = re.compile(r" *(\d+): ?(.*)", re.DOTALL)


def element_folder(folder: Path, element: int | str | None) -> Path:
    """Where the logs of an array's element are, for Slurm's `%a`, too; those of a job alone are in
    the attempt's own folder."""
    return folder if element is None else folder / f"element.{element}"


def batch_log(folder: Path) -> Path:
    """The batch step's words."""
    return folder / "batch.log"


def srun_log(folder: Path) -> Path:
    """srun's own words, apart from the ranks'."""
    return folder / "srun.log"


def sidecars_log(folder: Path) -> Path:
    """What srun and the batch step say of the sidecars."""
    return folder / "sidecars.log"


def node_log(folder: Path, node: str) -> Path:
    """The output of the node's ranks. Slurm names the file by the node's short name at some sites,
    so a file of that name is taken where there is none of the whole."""
    path = folder / NODE_PATTERN.format(node)
    short = folder / NODE_PATTERN.format(node.partition(".")[0])
    return short if not path.exists() and short.exists() else path


def node_logs(folder: Path) -> dict[str, Path]:
    """All nodes' logs that are there, by the name in them."""
    prefix, suffix = NODE_PATTERN.split("{}")
    found = sorted(folder.glob(NODE_PATTERN.format("*")))
    return {path.name.removeprefix(prefix).removesuffix(suffix): path for path in found}


def label(rank: int) -> bytes:
    """What a line of the rank begins with, as `srun --label` writes it."""
    return b"%d: " % rank


def split_label(line: str) -> tuple[int | None, str]:
    """The rank that wrote a line, and what it wrote; None where nobody signed."""
    found = _LABELLED.fullmatch(line)
    return (None, line) if found is None else (int(found[1]), found[2])


def lines_by_rank(text: str) -> dict[int, list[str]]:
    """The lines of each rank, without their labels. What nobody signed is left out."""
    lines: dict[int, list[str]] = {}
    for line in text.split("\n"):
        rank, words = split_label(line)
        if rank is not None:
            lines.setdefault(rank, []).append(words)
    return lines


@dataclass(frozen=True, kw_only=True)
class RankTail:
    """The last lines of one rank, without their labels."""

    rank: int
    node: str
    text: str


def node_tails(
    folder: Path, node: str, *, size_bytes: int, search_bytes: int = SEARCH_BYTES
) -> tuple[RankTail, ...]:
    """The last `size_bytes` or so of each rank on a node that wrote within `search_bytes`."""
    lines = lines_by_rank(tail(node_log(folder, node), size_bytes=search_bytes))
    return tuple(
        RankTail(rank=rank, node=node, text=_end_of(said, size=size_bytes))
        for rank, said in sorted(lines.items())
    )


def rank_tail(folder: Path, *, rank: int, nodes: Sequence[str], size_bytes: int) -> str:
    """The last lines of a rank that runs on one of `nodes`, likeliest first; "" without any."""
    tails = (one for node in nodes for one in node_tails(folder, node, size_bytes=size_bytes))
    return next((one.text for one in tails if one.rank == rank), "")


def _end_of(lines: Sequence[str], *, size: int) -> str:
    return "\n".join(reversed(list(_within(reversed(lines), size=size)))).strip()


def _within(lines: Iterator[str], *, size: int) -> Iterator[str]:
    left = size
    for line in lines:
        if len(line) > left:
            if left == size:
                yield line[-size:]
            return
        left -= len(line) + 1
        yield line
