"""From a manifest to batches: memory-mapped shards in a local cache, read in the proven order."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np
from awscrt.checksums import crc64nvme
from numpy.typing import NDArray

from storage.checkpoint_records import FileRecord
from storage.errors import DataError, StoreError
from storage.file_locks import holding
from storage.object_store import ObjectStore
from storage.records import new_nonce
from storage.shards.manifest import Manifest, Shard, Split
from storage.shards.order import rank_positions, sample_index
from storage.shards.writer import crc_text

READ_BYTES = 16 * 2**20
FETCH_TIMEOUT_S = 600.0


class ShardLoader:
    """Samples of one split: windows of `sequence + 1` tokens, each beginning where the last ended.

    Sample i is the tokens `i·sequence … i·sequence + sequence` (both included) of the split's
    shards, joined in the manifest's order: every token but the first is predicted once an epoch,
    and documents are packed without padding.
    """

    def __init__(
        self,
        store: ObjectStore,
        manifest: Manifest,
        *,
        split: Split,
        sequence: int,
        seed: int,
        cache: Path,
    ) -> None:
        """Reads nothing yet; shards come when their first sample does.

        `cache` is a folder of this host that its processes share.
        """
        self._store = store
        self._dtype = manifest.dtype
        self._shards = manifest.of_split(split)
        self._sequence = sequence
        self._seed = seed
        self._folder = cache / manifest.dataset_id
        self._ends = list(accumulate(shard.tokens for shard in self._shards))
        self._open: dict[int, NDArray[np.unsignedinteger]] = {}
        self._tokens_in_all = self._ends[-1] if self._ends else 0
        self._name = f"{split} split of data set {manifest.dataset_id}"

    @property
    def num_samples(self) -> int:
        """Samples an epoch; 0 where the split holds fewer tokens than one sample needs."""
        return max(0, (self._tokens_in_all - 1) // self._sequence)

    def batch(
        self, start: int, count: int, *, rank: int = 0, world_size: int = 1
    ) -> NDArray[np.int64]:
        """This rank's samples of the global positions `start … start + count`, its end excluded.

        Row k is the sample at position `start + rank + k·world_size`, so the ranks' rows together
        are the same samples whatever the world size. Positions beyond `num_samples` go on in the
        next epoch, in another order.

        Returns:
            Token ids of shape [count / world_size, sequence + 1], rounded up for the first ranks
            and down for the others.

        Raises:
            ValueError: `count` is less than `world_size`.
            DataError: the split holds no sample.
            StoreError: a shard cannot be had, or is not what the manifest says.
        """
        positions = rank_positions(start, count, rank=rank, world_size=world_size)
        if self.num_samples == 0:
            raise DataError(
                f"the {self._name} holds {self._tokens_in_all} tokens, fewer than one sample of "
                f"train.sequence + 1 = {self._sequence + 1}; add documents, raise the split's part "
                "(data.validation_fraction) or lower train.sequence"
            )
        rows = np.empty((len(positions), self._sequence + 1), dtype=np.int64)
        for row, position in zip(rows, positions, strict=True):
            index = sample_index(position, num_samples=self.num_samples, seed=self._seed)
            self._read(row, first=index * self._sequence)
        return rows

    def _read(self, row: NDArray[np.int64], *, first: int) -> None:
        """Fills a row with the tokens from `first` on, over as many shards as it takes."""
        done = 0
        while done < len(row):
            number = bisect_right(self._ends, first + done)
            offset = first + done - (self._ends[number - 1] if number else 0)
            tokens = self._tokens(number)[offset : offset + len(row) - done]
            row[done : done + len(tokens)] = tokens
            done += len(tokens)

    def _tokens(self, number: int) -> NDArray[np.unsignedinteger]:
        tokens = self._open.get(number)
        if tokens is None:
            path = self._cached(self._shards[number])
            tokens = self._open[number] = np.memmap(path, dtype=self._dtype, mode="r")
        return tokens

    def _cached(self, shard: Shard) -> Path:
        path = self._folder / shard.name
        if _is_whole(path, shard.data):
            return path
        self._folder.mkdir(parents=True, exist_ok=True)
        with holding(path.with_suffix(".lock"), timeout_s=FETCH_TIMEOUT_S):
            if not _is_whole(path, shard.data):
                fetch(self._store, shard.data, path)
        return path


def fetch(store: ObjectStore, file: FileRecord, path: Path) -> None:
    """Brings an object to a local path, checked; the path appears whole or not at all.

    Raises:
        StoreError: the object is missing, or its bytes are not those that were written.
        OSError: the local disk failed or is full.
    """
    staged = path.with_name(f"{path.name}.{new_nonce()}.tmp")
    crc = 0
    try:
        with staged.open("wb") as target:
            for start in range(0, file.size_bytes, READ_BYTES):
                length = min(READ_BYTES, file.size_bytes - start)
                content = store.get_range(file.key, start=start, length=length)
                crc = crc64nvme(content, crc)
                target.write(content)
        if crc_text(crc) != file.crc64nvme:
            raise StoreError(
                f"{file.key!r} has the CRC64-NVME {crc_text(crc)}, not {file.crc64nvme} as in the "
                "manifest: it was changed or damaged; run the shard stage again (--force shard)"
            )
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def _is_whole(path: Path, file: FileRecord) -> bool:
    """Files are renamed into place when whole; the size tells when a disk lost its tail."""
    try:
        return path.stat().st_size == file.size_bytes
    except FileNotFoundError:
        return False
