"""The records of checkpoints: what was saved, what was committed, what is read, swept or doubted.

Apart from the ledger's other records (`storage.records`), which name checkpoints and know no more
of them. `encode` and `decode` there turn these into JSON, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True, order=True)
class CommitRef:
    """Names one committed checkpoint."""

    step: int
    attempt: int
    save: str


@dataclass(frozen=True, kw_only=True)
class Resume:
    """`<n>.resume.json`: what all ranks loaded and verified, before the first step.

    `passed` are the newer checkpoints that were stepped back from, each with the reason.
    """

    source: CommitRef | None
    from_disk: bool = False
    passed: tuple[str, ...] = ()
    world_size: int
    nonce: str
    at: datetime


@dataclass(frozen=True, kw_only=True)
class Loading:
    """`<n>.loading.json`: a reader's marker, put before it reads the sweep journals."""

    candidates: tuple[CommitRef, ...]
    at: datetime


@dataclass(frozen=True, kw_only=True)
class Reading:
    """`checkpoints/readers/<id>.json`: the marker of a reader that is no attempt.

    Nothing ends such a reader on record, so it holds for `valid_s` seconds after it was last put,
    by the store's clock.
    """

    refs: tuple[CommitRef, ...]
    who: str
    valid_s: float
    at: datetime


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One object of a save: its key, size and CRC64-NVME (base64, as S3 writes it)."""

    key: str
    size_bytes: int
    crc64nvme: str


@dataclass(frozen=True, kw_only=True)
class SaveFacts:
    """What the trainer knows of a save before a byte of it is sent; the same on all ranks.

    `save` is drawn by rank 0 and is part of every path and record of the save, in every tier.
    """

    step: int
    save: str
    world_size: int
    mesh: Mapping[str, int]
    samples_consumed: int
    samples_hash: str
    dataset_id: str
    model_hash: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RankDone:
    """`done.<rank>.json`: this rank's part of the save is in the store, with these checksums.

    It carries the facts, too, so that whoever finds those of all ranks knows all of the save.
    """

    facts: SaveFacts
    rank: int
    files: tuple[FileRecord, ...]


@dataclass(frozen=True, kw_only=True)
class Commit(SaveFacts):
    """THE commit: the one small object whose existence makes a checkpoint real."""

    run: str
    attempt: int
    metadata: FileRecord
    files: tuple[FileRecord, ...]
    nonce: str
    at: datetime

    @property
    def ref(self) -> CommitRef:
        return CommitRef(step=self.step, attempt=self.attempt, save=self.save)

    @property
    def size_bytes(self) -> int:
        return self.metadata.size_bytes + sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, kw_only=True)
class SweepJournal:
    """`sweeps/<id>.json`: what a sweeper means to delete. A save named here never counts again."""

    sweep: str
    refs: tuple[CommitRef, ...]
    at: datetime


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """`quarantine/<step>.<attempt>.<save>/<host>.json`: a host that could not read a checkpoint.

    `attempt` is the reader's, None for a verify by a person, which alone is believed at once: of
    failed loads it takes those of two hosts, for one bad host must not condemn good checkpoints.
    """

    ref: CommitRef
    host: str
    attempt: int | None
    fault: str
    at: datetime
