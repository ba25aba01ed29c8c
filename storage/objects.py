"""What is said of objects and of what became of them; of the values alone, without the client."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing or a HEAD says of an object; `last_modified` is by the store's clock."""

    key: str
    size_bytes: int
    etag: str
    last_modified: datetime


@dataclass(frozen=True)
class Created:
    """The outcome of a put-if-absent: whether our body is the one stored, and what is stored."""

    won: bool
    body: bytes


@dataclass(frozen=True)
class DeleteFailure:
    """One key of a batched delete that the store would not delete, in the store's own words."""

    key: str
    code: str
    message: str
