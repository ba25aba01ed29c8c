"""What the ranks see of the nearer tier when they resume, put together. Collective.

On a disk that nodes share every rank sees all parts; on disks of their own each sees those of its
node. A save there is whole when all its parts are seen by somebody and each rank sees those that it
needs, which only the ranks together can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from awscrt.checksums import crc64nvme

from storage.checkpoint_records import Commit, CommitRef, FileRecord
from storage.checkpoints.disk import Disk
from storage.checkpoints.layout import METADATA_NAME, RankPart, compact, crc_text, merge
from storage.checkpoints.ranks import Ranks
from storage.errors import CheckpointError, StoreError
from storage.keys import RunKeys
from storage.object_store import ObjectInfo

LOOKED_AT = 4
"""More saves that count than a disk keeps; older ones are in the store, if anywhere."""


@dataclass(frozen=True, kw_only=True)
class NearSave:
    """A save of the nearer tier as if it were committed, and its metadata, which lies nowhere."""

    commit: Commit
    metadata: bytes


class NearStore:
    """The disk, with the one object that is not on it."""

    def __init__(self, disk: Disk, save: NearSave) -> None:
        self._disk = disk
        self._save = save

    def get(self, key: str) -> bytes:
        return self._save.metadata if key == self._save.commit.metadata.key else self._disk.get(key)

    def head(self, key: str) -> ObjectInfo | None:
        return self._disk.head(key)

    def read_into(self, key: str, *into: memoryview, start: int) -> None:
        self._disk.read_into(key, *into, start=start)


def seen_refs(
    ranks: Ranks,
    disk: Disk,
    keys: RunKeys,
    *,
    looks: bool,
    eligible: Callable[[Sequence[CommitRef]], Sequence[CommitRef]],
) -> dict[CommitRef, dict[int, int]]:
    """Saves of which parts are seen, newest first: for each part the lowest rank that sees it.

    One rank of each node `looks`. Only what rank 0 holds for `eligible` is gone into, and of that
    the newest few: zombies may have left any number of saves.
    """
    here: list[tuple[CommitRef, int]] = []

    def look() -> set[CommitRef]:
        try:
            here.extend(disk.parts(keys) if looks else ())
        except StoreError as error:
            print(f"headrace: nothing is resumed from disk: {error}", flush=True)
        return {ref for ref, _ in here}

    refs = sorted(set().union(*ranks.from_all(look)), reverse=True)
    chosen = ranks.from_first(lambda: eligible(refs)[:LOOKED_AT])
    seen: dict[CommitRef, dict[int, int]] = {ref: {} for ref in chosen}
    told = ranks.from_all(lambda: [(ref, rank) for ref, rank in here if ref in seen])
    for seer, parts in enumerate(told):
        for ref, rank in parts:
            seen[ref].setdefault(rank, seer)
    return seen


def gather(
    ranks: Ranks, disk: Disk, keys: RunKeys, ref: CommitRef, *, seers: Mapping[int, int]
) -> NearSave | None:
    """The save with all its parts' layouts, or None where they do not make a whole.

    Each part's record travels once, from the rank that `seers` names for it.
    """
    mine = [part for part, seer in seers.items() if seer == ranks.rank]
    told = ranks.from_all(lambda: [disk.read_part(keys, ref, part) for part in mine])
    parts = {part.rank: part for group in told for part in group if part is not None}
    if not parts:
        return None
    facts = next(iter(parts.values())).facts
    if sorted(parts) != list(range(facts.world_size)):
        return None
    ordered = [parts[rank] for rank in sorted(parts)]
    try:
        body = compact(merge(part.layout for part in ordered))
    except CheckpointError:
        return None
    return NearSave(commit=_as_commit(keys, ref, ordered, body), metadata=body)


def _as_commit(keys: RunKeys, ref: CommitRef, parts: list[RankPart], body: bytes) -> Commit:
    folder = keys.save(ref.attempt, step=ref.step, save=ref.save)
    return Commit(
        **vars(parts[0].facts),
        run=keys.run,
        attempt=ref.attempt,
        metadata=FileRecord(
            key=folder + METADATA_NAME, size_bytes=len(body), crc64nvme=crc_text(crc64nvme(body))
        ),
        files=tuple(file for part in parts for file in part.files),
        nonce="never committed",
        at=datetime.now(UTC),
    )
