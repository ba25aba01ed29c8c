"""One task of a shard job: some input files, as shards of both splits and a record of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from storage.errors import DataError
from storage.keys import DatasetKeys
from storage.object_store import ObjectStore
from storage.records import new_nonce
from storage.shards.inputs import (
    BadDocument,
    Document,
    EmptyDocument,
    InputFile,
    read_documents,
)
from storage.shards.manifest import Source, Split, TaskRecord, narrowest
from storage.shards.tokenizers import DocumentTokenizer
from storage.shards.writer import ShardWriter
from storage.spec import DataSpec

SPLITS: tuple[Split, ...] = ("train", "validation")
BATCH_CHARACTERS = 2**20
_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Documents taken, tokens and UTF-8 bytes, of a task or of all before it."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    bad: int = 0

    def plus(self, record: TaskRecord) -> Sums:
        return Sums(
            documents=self.documents + record.documents,
            tokens=self.tokens + sum(shard.tokens for shard in record.shards),
            text_bytes=self.text_bytes + record.text_bytes,
            bad=self.bad + len(record.bad),
        )


def split_of(text: str, *, validation_fraction: float) -> Split:
    """The split of a document, told by its text: equal documents never lie on both sides."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "big") < validation_fraction * 2**64 else "train"


def build_task(
    task: int,
    files: Sequence[InputFile],
    *,
    data: DataSpec,
    tokenizer: DocumentTokenizer,
    store: ObjectStore,
    keys: DatasetKeys,
    before: Sums,
    tell: Callable[[Sums], None],
) -> TaskRecord:
    """Reads the files and stores their shards; `before` is what the tasks before this one hold.

    Memory is bounded by one document and one batch of them, disk by one shard of each split.

    Raises:
        DataError: with these, more documents are unreadable than `data.max_bad_documents`.
        OSError: the file system failed.
    """
    nonce = new_nonce()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="headrace-shards-")))
        writers = {
            split: stack.enter_context(
                ShardWriter(
                    store,
                    keys=keys,
                    task=task,
                    split=split,
                    token_type=narrowest(tokenizer.vocab),
                    shard_tokens=data.shard_tokens,
                    folder=folder,
                    nonce=nonce,
                )
            )
            for split in SPLITS
        }
        build = _Task(data=data, tokenizer=tokenizer, writers=writers, before=before, tell=tell)
        for file in files:
            if build.has_enough:
                break
            build.read(file)
        build.encode()
        return TaskRecord(
            task=task,
            shards=tuple(shard for split in SPLITS for shard in writers[split].finish()),
            sources=tuple(build.sources),
            text_bytes=build.text_bytes,
            bad=tuple(build.bad),
            nonce=nonce,
        )


@dataclass(kw_only=True)
class _Task:
    """The state of a task being built, with the documents that wait to be encoded together."""

    data: DataSpec
    tokenizer: DocumentTokenizer
    writers: dict[Split, ShardWriter]
    before: Sums
    tell: Callable[[Sums], None]
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    bad: list[BadDocument] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    waiting_characters: int = 0

    @property
    def has_enough(self) -> bool:
        limit = self.data.max_documents
        return limit is not None and self.before.documents + self.documents >= limit

    def read(self, file: InputFile) -> None:
        """Takes a file's documents, up to `data.max_documents`, and accounts for each of them."""
        documents_before, bad_before, empty = self.documents, len(self.bad), 0
        for document in read_documents(file, self.data):
            match document:
                case Document(text=text):
                    self._take(text)
                case EmptyDocument():
                    empty += 1
                case BadDocument():
                    self._refuse(document)
            if self.has_enough:
                break
        self.sources.append(
            Source(
                path=str(file.path),
                size_bytes=file.size_bytes,
                documents=self.documents - documents_before,
                empty=empty,
                unreadable=len(self.bad) - bad_before,
            )
        )

    def encode(self) -> None:
        """Turns the waiting documents into tokens of their splits."""
        for text, tokens in zip(self.waiting, self.tokenizer.encode(self.waiting), strict=True):
            split = split_of(text, validation_fraction=self.data.validation_fraction)
            self.writers[split].add(tokens, end_of_document=self.tokenizer.end_of_document)
            self.tokens += len(tokens) + 1
        self.waiting, self.waiting_characters = [], 0
        self.tell(
            Sums(
                documents=self.before.documents + self.documents,
                tokens=self.before.tokens + self.tokens,
                text_bytes=self.before.text_bytes + self.text_bytes,
                bad=self.before.bad + len(self.bad),
            )
        )

    def _take(self, text: str) -> None:
        self.documents += 1
        self.text_bytes += len(text.encode())
        self.waiting.append(text)
        self.waiting_characters += len(text)
        if self.waiting_characters >= BATCH_CHARACTERS:
            self.encode()

    def _refuse(self, document: BadDocument) -> None:
        self.bad.append(document)
        count = self.before.bad + len(self.bad)
        if count > self.data.max_bad_documents:
            raise too_many_bad(self.bad, self.data, before=self.before.bad)


def too_many_bad(bad: Sequence[BadDocument], data: DataSpec, *, before: int = 0) -> DataError:
    """What to say of unreadable documents beyond the limit; `before` were counted elsewhere."""
    shown = "; ".join(str(one) for one in bad[-_SHOWN:])
    return DataError(
        f"{before + len(bad)} documents cannot be read, more than data.max_bad_documents "
        f"{data.max_bad_documents}: {shown}. Repair them, take them out of data.inputs, or raise "
        "the limit"
    )
