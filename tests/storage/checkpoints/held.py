"""An object store in a dict, where a test has to load thousands of times; others use a server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from datetime import UTC, datetime
from pathlib import Path

from storage.errors import ObjectMissing, StoreError
from storage.object_store import Bytes, Created, DeleteFailure, ObjectInfo, ObjectStore
from storage.spec import StoreSpec
from storage.transfers import fill


class HeldStore(ObjectStore):
    """What saving and loading need of a bucket."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.spec = StoreSpec(endpoint_url="http://127.0.0.1:9")
        self.objects = objects

    def get(self, key: str) -> bytes:
        try:
            return self.objects[key]
        except KeyError:
            raise ObjectMissing(key) from None

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        body = self.get(key)[start : start + length]
        if len(body) != length:
            raise StoreError(f"{key!r} is shorter than {start + length} bytes")
        return body

    def read_into(self, key: str, *into: memoryview, start: int) -> None:
        fill(into, [self.get_range(key, start=start, length=sum(map(len, into)))])

    def head(self, key: str) -> ObjectInfo | None:
        if key not in self.objects:
            return None
        return ObjectInfo(key, len(self.objects[key]), "", datetime.now(UTC))

    def put(self, key: str, body: Bytes) -> None:
        self.objects[key] = bytes(body)

    def upload(
        self,
        key: str,
        data: Path | Bytes,
        *,
        part_bytes: int = 0,
        threads: int = 0,
        executor: Executor | None = None,
    ) -> None:
        assert not isinstance(data, Path)
        self.put(key, data)

    def create(self, key: str, body: bytes) -> Created:
        stored = self.objects.setdefault(key, body)
        return Created(won=stored == body, body=stored)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        for key in sorted(key for key in self.objects if key.startswith(prefix)):
            yield ObjectInfo(key, len(self.objects[key]), "", datetime.now(UTC))

    def delete(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        for key in keys:
            self.objects.pop(key, None)
        return ()
