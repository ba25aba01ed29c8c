"""The disk tier of a round: what stands there, as anybody can see who reads names of files alone.

So that the judge trusts nothing of the product but the order in which it writes and removes: a
part's record comes last and goes first.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from storage.checkpoint_records import CommitRef
from storage.checkpoints.disk import KEPT
from tests.storage.checkpoints.kills.jobs import JobProcesses
from tests.storage.checkpoints.kills.plans import DiskPlan, Loss

_FILE = re.compile(r"(data|done)\.(\d+)\..+")


@dataclass(frozen=True, kw_only=True)
class NearSave:
    """A save of which all parts stand. On disks of the nodes' own it serves `world` ranks only."""

    ref: CommitRef
    world: int
    is_shared: bool

    def serves(self, world: int) -> bool:
        return self.is_shared or self.world == world


class Disks:
    """One folder for all nodes, or one for each, in which the run has its keys."""

    def __init__(self, root: Path, plan: DiskPlan, *, run: str) -> None:
        self._root = root
        self._plan = plan
        self._run = run
        self._lost = 0
        for node in ("n1", "n2"):
            self.of_node(node).mkdir(parents=True, exist_ok=True)

    @property
    def is_shared(self) -> bool:
        return self._plan.is_shared

    def of_node(self, node: str) -> Path:
        return self._root / ("shared" if self._plan.is_shared else node)

    def lose(self, node: str) -> None:
        """What a node has of its own is lost with it, as the plan says; at once, whoever writes."""
        if self._plan.is_shared or self._plan.loss is Loss.NONE:
            return
        folder = self.of_node(node)
        if folder.exists():
            self._lost += 1
            folder.rename(self._root / f"lost{self._lost}")
        if self._plan.loss is Loss.EMPTIED:
            folder.mkdir()

    def whole(self, world_of: Callable[[int], int]) -> list[NearSave]:
        """Saves of which every rank's record stands; `world_of` gives an attempt's ranks."""
        seen: dict[CommitRef, set[int]] = defaultdict(set)
        for folder in self._folders():
            for ref, parts in _parts(folder / self._run).items():
                seen[ref] |= {rank for rank, files in parts.items() if "done" in files}
        return [
            NearSave(ref=ref, world=world_of(ref.attempt), is_shared=self._plan.is_shared)
            for ref, ranks in seen.items()
            if ranks >= set(range(world_of(ref.attempt)))
        ]

    def judge(self, jobs: Sequence[JobProcesses]) -> None:
        """Raises AssertionError where more lies there than an orderly job's last save leaves.

        What zombies have written after it stays until the next save, and so does what died with
        the attempts after that job's.
        """
        orderly = {job.number: job for job in jobs if not (job.node_died or job.abandoned)}
        zombies = {job.number for job in jobs if job.abandoned}
        for folder in self._folders():
            found = _parts(folder / self._run)
            newest = max(
                (
                    (ref, rank)
                    for ref, parts in found.items()
                    for rank, files in parts.items()
                    if "done" in files and ref.attempt in orderly
                ),
                key=lambda one: (one[0].attempt, one[0].step),
                default=None,
            )
            if newest is None:
                continue
            attempt = newest[0].attempt
            world = orderly[attempt].world
            held: dict[int, list[CommitRef]] = defaultdict(list)
            for ref, parts in found.items():
                for rank in parts if ref.attempt <= attempt and ref.attempt not in zombies else ():
                    held[rank].append(ref)
            own = {rank for ref, parts in found.items() if ref.attempt == attempt for rank in parts}
            for rank, refs in held.items():
                most = KEPT + 1 if rank in own else KEPT if rank >= world else len(refs)
                assert len(refs) <= most, f"{folder.name} still has of rank {rank}: {sorted(refs)}"

    def _folders(self) -> Iterator[Path]:
        yield from (one for one in {self.of_node("n1"), self.of_node("n2")} if one.exists())


def _parts(run: Path) -> Mapping[CommitRef, Mapping[int, set[str]]]:
    """By save and rank, which kinds of files stand under their names: `data`, `done`, or `torn`."""
    found: dict[CommitRef, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in _files(run):
        named = _FILE.fullmatch(path.name)
        assert named is not None, path
        step, save = path.parent.name.split(".")
        ref = CommitRef(step=int(step), attempt=int(path.parent.parent.name), save=save)
        kind = "torn" if path.name.endswith(".tmp") else named[1]
        found[ref][int(named[2])].add(kind)
    return found


def _files(run: Path) -> Iterator[Path]:
    for save in run.glob("checkpoints/data/*/*.*"):
        # Whoever makes room may be at it.
        with suppress(FileNotFoundError):
            yield from list(save.iterdir())
