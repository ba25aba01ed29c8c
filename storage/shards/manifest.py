"""The manifest: the list of shards with their checksums, whose hash is the data set's id.

It is written last, so its existence means that all of the data set is there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from storage.checkpoint_records import FileRecord
from storage.errors import DataError, LedgerError, ObjectMissing
from storage.object_store import ObjectStore
from storage.records import decode
from storage.shards.inputs import BadDocument

Split = Literal["train", "validation"]
TokenType = Literal["uint16", "uint32"]
ENDS_DTYPE = np.dtype("<u8")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Tokens of one split, in order. `documents` counts the documents that end in this shard.

    `ends` holds, as little-endian uint64, the offset behind the last token of each of them.
    """

    split: Split
    tokens: int
    documents: int
    data: FileRecord
    ends: FileRecord

    @property
    def name(self) -> str:
        return self.data.key.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input file: what was read of it, and what became of its documents."""

    path: str
    size_bytes: int
    documents: int
    empty: int
    unreadable: int


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """`tasks/<t>.json`: the shards of one part of the inputs; the first writer wins.

    `bad` names the unreadable documents; `text_bytes` counts the UTF-8 bytes of those taken.
    """

    task: int
    shards: tuple[Shard, ...]
    sources: tuple[Source, ...]
    text_bytes: int
    bad: tuple[BadDocument, ...]
    nonce: str

    @property
    def documents(self) -> int:
        return sum(source.documents for source in self.sources)


@dataclass(frozen=True, kw_only=True)
class TokenizerRecord:
    """Which tokenizer made the shards."""

    name: str
    digest: str
    vocab: int
    end_of_document: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`manifest.json`: a whole data set."""

    dataset_id: str
    token_type: TokenType
    tokenizer: TokenizerRecord
    shards: tuple[Shard, ...]
    sources: tuple[Source, ...]
    text_bytes: int
    bad: tuple[BadDocument, ...]

    @property
    def dtype(self) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
        return token_dtype(self.token_type)

    @property
    def vocab(self) -> int:
        """One more than the largest token id."""
        return self.tokenizer.vocab

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(source.documents for source in self.sources)

    @property
    def empty(self) -> int:
        return sum(source.empty for source in self.sources)

    @property
    def unreadable(self) -> int:
        return sum(source.unreadable for source in self.sources)

    def of_split(self, split: Split) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards if shard.split == split)


def token_dtype(token_type: TokenType) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    return np.dtype("<u2") if token_type == "uint16" else np.dtype("<u4")


def narrowest(vocab: int) -> TokenType:
    """The smallest type that holds every id below `vocab`."""
    if vocab > 2**32:
        raise DataError(f"a vocabulary of {vocab} ids does not fit uint32, the widest token type")
    return "uint16" if vocab <= 2**16 else "uint32"


def assemble(tasks: Sequence[TaskRecord], *, tokenizer: TokenizerRecord) -> Manifest:
    """The manifest of the tasks 0 … N-1. Pure, so that two writers of it write the same bytes.

    Raises:
        LedgerError: a task is missing, or there twice.
    """
    numbers = [record.task for record in tasks]
    if numbers != list(range(len(tasks))):
        raise LedgerError(f"task records {numbers} are not the tasks 0 … {len(tasks) - 1}")
    manifest = Manifest(
        dataset_id="",
        token_type=narrowest(tokenizer.vocab),
        tokenizer=tokenizer,
        shards=tuple(shard for record in tasks for shard in record.shards),
        sources=tuple(source for record in tasks for source in record.sources),
        text_bytes=sum(record.text_bytes for record in tasks),
        bad=tuple(document for record in tasks for document in record.bad),
    )
    return replace(manifest, dataset_id=dataset_id(manifest))


def dataset_id(manifest: Manifest) -> str:
    """The id of what the trainer sees: token bytes, in order, and what the ids mean.

    Keys are left out, being unique to each writer, and so are the paths of the sources: a corpus
    that was moved is the same data set.
    """
    content = {
        "token_type": manifest.token_type,
        "tokenizer": manifest.tokenizer.digest,
        "vocab": manifest.tokenizer.vocab,
        "end_of_document": manifest.tokenizer.end_of_document,
        "shards": [
            [
                shard.split,
                shard.tokens,
                shard.documents,
                shard.data.crc64nvme,
                shard.ends.crc64nvme,
            ]
            for shard in manifest.shards
        ],
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def load_manifest(store: ObjectStore, key: str) -> Manifest:
    """The manifest at a key, checked against its own id.

    Raises:
        DataError: there is none, or it is not the one that its id names.
    """
    try:
        manifest = decode(Manifest, store.get(key))
    except ObjectMissing as error:
        raise DataError(
            f"no manifest at {key!r}: the data set was never finished or was deleted; run the "
            "shard stage again (--force shard)"
        ) from error
    actual = dataset_id(manifest)
    if actual != manifest.dataset_id:
        raise DataError(
            f"the manifest at {key!r} says data set {manifest.dataset_id} but its shards are those "
            f"of {actual}: it was changed by hand; run the shard stage again (--force shard)"
        )
    return manifest
