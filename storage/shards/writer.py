"""Token streams into shards: filled to the brim on local disk, then stored under unique keys."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import IO, Self

import numpy as np
from awscrt.checksums import crc64nvme
from numpy.typing import NDArray

from storage.checkpoint_records import FileRecord
from storage.keys import DatasetKeys
from storage.object_store import ObjectStore
from storage.shards.manifest import ENDS_DTYPE, Shard, Split, TokenType, token_dtype


def crc_text(crc: int) -> str:
    """A CRC64-NVME as S3 writes it: base64 of its eight bytes, the highest first."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


class ShardWriter:
    """Writes one split of one task. All shards but the last hold exactly `shard_tokens` tokens.

    A document longer than what is left of a shard goes on in the next one, so that shards are of
    one size whatever the documents are. At most one shard lies on the local disk.
    As a context manager it leaves no file open behind a failure.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        keys: DatasetKeys,
        task: int,
        split: Split,
        token_type: TokenType,
        shard_tokens: int,
        folder: Path,
        nonce: str,
    ) -> None:
        self._store = store
        self._keys = keys
        self._stem = f"{split}-{task:06d}"
        self._split = split
        self._dtype = token_dtype(token_type)
        self._shard_tokens = shard_tokens
        self._folder = folder
        self._nonce = nonce
        self._shards: list[Shard] = []
        self._file: IO[bytes] | None = None
        self._tokens = 0
        self._crc = 0
        self._ends: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, document: NDArray[np.int64], *, end_of_document: int) -> None:
        """Appends the tokens of one document, and the token that ends it."""
        tokens = np.append(document, end_of_document).astype(self._dtype)
        while len(tokens):
            # Closed only when more is to come: a document's end belongs to the shard of its token.
            if self._tokens == self._shard_tokens:
                self._close_shard()
            taken = tokens[: self._shard_tokens - self._tokens]
            self._write(taken.tobytes())
            self._tokens += len(taken)
            tokens = tokens[len(taken) :]
        self._ends.append(self._tokens)

    def finish(self) -> tuple[Shard, ...]:
        """Stores what is left and returns all shards, in order."""
        if self._tokens:
            self._close_shard()
        return tuple(self._shards)

    def _write(self, content: bytes) -> None:
        if self._file is None:
            self._file = (self._folder / self._stem).open("wb")
        self._file.write(content)
        self._crc = crc64nvme(content, self._crc)

    def _close_shard(self) -> None:
        assert self._file is not None
        self._file.close()
        path = Path(self._file.name)
        name = f"{self._stem}-{len(self._shards):06d}.{self._nonce}"
        data = FileRecord(
            key=self._keys.shard(f"{name}.tokens"),
            size_bytes=path.stat().st_size,
            crc64nvme=crc_text(self._crc),
        )
        self._store.upload(data.key, path)
        content = np.asarray(self._ends, dtype=ENDS_DTYPE).tobytes()
        ends = FileRecord(
            key=self._keys.shard(f"{name}.ends"),
            size_bytes=len(content),
            crc64nvme=crc_text(crc64nvme(content)),
        )
        self._store.upload(ends.key, content)
        self._shards.append(
            Shard(
                split=self._split,
                tokens=self._tokens,
                documents=len(self._ends),
                data=data,
                ends=ends,
            )
        )
        self._file, self._tokens, self._crc, self._ends = None, 0, 0, []
