"""A bucket in memory, for histories of thousands of requests; the real one serves all other tests.

It keeps what the protocols rely on: one winner of a create, reads after writes, sorted listings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta

from storage.object_store import Created, DeleteFailure, ObjectInfo

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class MemoryStore:
    """`after_put` is called with the key of each put, so that others may act right then."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, datetime]] = {}
        self.after_put: Callable[[str], None] = lambda key: None
        self._requests = 0

    def now(self) -> datetime:
        self._requests += 1
        return EPOCH + timedelta(seconds=self._requests)

    def get_if_exists(self, key: str) -> bytes | None:
        return self.objects[key][0] if key in self.objects else None

    def head(self, key: str) -> ObjectInfo | None:
        return self._info(key) if key in self.objects else None

    def put(self, key: str, body: bytes) -> None:
        self.objects[key] = (bytes(body), self.now())
        self.after_put(key)

    def create(self, key: str, body: bytes) -> Created:
        won = key not in self.objects
        if won:
            self.put(key, body)
        stored = self.objects[key][0]
        return Created(won=stored == body, body=stored)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter([self._info(key) for key in sorted(self.objects) if key.startswith(prefix)])

    def delete(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        for key in list(keys):
            self.objects.pop(key, None)
        return ()

    def _info(self, key: str) -> ObjectInfo:
        body, at = self.objects[key]
        return ObjectInfo(key=key, size_bytes=len(body), etag="", last_modified=at)
