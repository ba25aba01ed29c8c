"""What a round is given, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from storage.embedded import EmbeddedStore
from storage.spec import StoreSpec
from tests.storage.checkpoints.kills.faults import Site
from tests.storage.checkpoints.kills.processes import UnusedStore


@dataclass(kw_only=True)
class Report:
    """What came of a round. `met` are the faults that really happened."""

    seed: int
    failure: str = ""
    story: str = ""
    attempts: int = 0
    resumes: int = 0
    has_disk: bool = False
    from_disk: int = 0
    """Of the resumes, those that loaded what the disk tier had."""
    commits: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    met: list[str] = field(default_factory=list)
    woken: int = 0
    server_kills: int = 0
    wall_s: float = 0.0
    sites: list[Site] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Parent:
    """What a round's process inherits: stores that nobody has used, and where to write."""

    spec: StoreSpec
    for_round: UnusedStore
    for_children: UnusedStore
    folder: Path
    server: EmbeddedStore
