"""Every byte that outlives a job goes through here: one small client for any S3-compatible store.

Keys are full keys within the bucket; `storage.keys` builds them. The class is the only place that
talks to boto3, so that deadlines, retries, put-if-absent and the wording of errors have one home.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError
from tenacity import RetryError, Retrying, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

from storage.claims import Claims
from storage.errors import ObjectMissing, StoreError
from storage.objects import Bytes, Created, DeleteFailure, ObjectInfo
from storage.s3_client import make_client
from storage.spec import StoreSpec
from storage.store_failures import Request, error_code, explain, is_missing
from storage.transfers import Uploader, fill, of_file, of_memory, read_answer

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = ["Bytes", "Created", "DeleteFailure", "ObjectInfo", "ObjectStore"]

DELETE_BATCH = 1000
PART_BYTES = 32 * 2**20
MAX_KEY_BYTES = 1024


class _ConflictError(Exception):
    """The store could not decide a conditional write now and asks for another try."""


class ObjectStore:
    """A bucket. Safe to share between threads, never across a fork: make another in the child."""

    def __init__(self, spec: StoreSpec) -> None:
        """Makes the client at once, so that no two threads ever race to make it.

        Raises StoreError when the spec is not resolved or no credentials are found.
        """
        if spec.is_embedded:
            raise StoreError(
                "store.endpoint_url is not set and store.aws is false: start the embedded server "
                "with storage.embedded.resolve() first, or name an endpoint"
            )
        self.spec = spec
        self.bucket = spec.bucket
        self.endpoint = spec.endpoint_url or f"AWS S3 in {spec.region}"
        self._pid = os.getpid()
        self._bucket_seen = False
        self._claims = None if spec.claims is None else Claims(spec.claims, bucket=spec.bucket)
        self._bulk_made: S3Client | None = None
        self._making_bulk = threading.Lock()
        with self.explained("open"):
            self._s3 = make_client(spec)

    @property
    def client(self) -> S3Client:
        """The boto3 client, for what the methods below do not cover (the probe).

        Raises StoreError in a forked child: sockets and locks shared with the parent corrupt both.
        """
        if os.getpid() != self._pid:
            raise StoreError(
                f"this ObjectStore was made by process {self._pid} and is used in process "
                f"{os.getpid()}; make a new ObjectStore(spec) after a fork"
            )
        return self._s3

    @property
    def _bulk(self) -> S3Client:
        """The client for much data, which few processes need: made when it is."""
        assert self.client
        with self._making_bulk:
            if self._bulk_made is None:
                self._bulk_made = make_client(self.spec, bulk=True)
            return self._bulk_made

    def close(self) -> None:
        """Closes idle connections; the store is of no use afterwards."""
        self.client.close()
        if self._bulk_made is not None:
            self._bulk_made.close()

    def get(self, key: str) -> bytes:
        """The whole object. Raises ObjectMissing."""
        return self._read("get", key)

    def get_if_exists(self, key: str) -> bytes | None:
        """The whole object, or None where there is none."""
        try:
            return self.get(key)
        except ObjectMissing:
            return None

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`. Raises StoreError when the object is shorter."""
        if start < 0 or length < 0:
            raise ValueError(f"start {start} and length {length} must not be negative")
        if length == 0:
            return b""
        body = self._read("get range of", key, Range=f"bytes={start}-{start + length - 1}")
        if len(body) != length:
            raise self._too_short(key, start=start, length=length, found=len(body))
        return body

    def read_into(self, key: str, *into: memoryview, start: int) -> None:
        """Fills the views, one after the other, with exactly the bytes from `start`: the cheap way
        to read much.

        What was written before an error is of no use. The bytes are checked against no checksum;
        that is for the caller, who knows it.

        Raises:
            ObjectMissing: there is no such object.
            StoreError: the object is shorter, or the store failed.
        """
        if start < 0 or any(view.readonly for view in into):
            raise ValueError(f"start {start} must not be negative, and `into` must be writable")
        views = [view.cast("B") for view in into]
        length = sum(map(len, views))
        if not length:
            return
        span = f"bytes={start}-{start + length - 1}"

        def ask() -> Mapping[str, Any]:
            answer = self._bulk.get_object(Bucket=self.bucket, Key=key, Range=span)
            found = answer["ContentLength"]
            is_range = answer["ResponseMetadata"]["HTTPStatusCode"] == 206 or start == 0
            if found != length or not is_range:
                answer["Body"].close()
                raise self._too_short(key, start=start, length=length, found=found)
            return answer

        with self.explained("get range of", key):
            read_answer(ask, partial(fill, views), patience_s=self.spec.read_timeout_s)

    def head(self, key: str) -> ObjectInfo | None:
        """Size, ETag and time of an object, or None where there is none."""
        with self.explained("head", key):
            try:
                found = self.client.head_object(Bucket=self.bucket, Key=key)
            except ClientError as error:
                if not is_missing(error):
                    raise
            else:
                self._bucket_seen = True
                return ObjectInfo(
                    key=key,
                    size_bytes=found["ContentLength"],
                    etag=found["ETag"].strip('"'),
                    last_modified=found["LastModified"].astimezone(UTC),
                )
        self._require_bucket()
        return None

    def put(self, key: str, body: Bytes) -> None:
        """Stores the object, over whatever was there."""
        _require_portable(key)
        with self.explained("put", key):
            self.client.put_object(Bucket=self.bucket, Key=key, Body=bytes(body))

    def create(self, key: str, body: bytes) -> Created:
        """Stores the object unless there is one already: THE put-if-absent of Headrace.

        Of all callers with different bodies exactly one gets `won`. A caller whose first answer was
        lost finds its own body stored and has won too: so bodies that claim something carry a
        nonce, and are the same on every retry. After a StoreError the outcome is unknown; calling
        again with the same body settles it.
        """
        _require_portable(key)
        if self._claims is not None:
            return self._create_claimed(self._claims, key, body)
        retrying = Retrying(
            retry=retry_if_exception_type(_ConflictError),
            stop=stop_after_attempt(self.spec.max_attempts),
            wait=wait_random_exponential(multiplier=0.1, max=5.0),
        )
        try:
            return retrying(self._create_once, key, body)
        except RetryError as error:
            raise StoreError(
                f"{self._request('create', key)} failed: still in conflict after "
                f"{self.spec.max_attempts} tries ({error.last_attempt.exception()}); other writers "
                "hold the key, try again later"
            ) from error

    def upload(
        self,
        key: str,
        data: Path | Bytes,
        *,
        part_bytes: int = PART_BYTES,
        threads: int = 4,
        executor: Executor | None = None,
    ) -> None:
        """Stores large data: parts in parallel, each with a checksum; small data in one put.

        The object appears whole or not at all; when a part fails for good the upload is aborted.
        Memory is sent from where it lies; of a file, a part for each thread is held in memory.
        With an `executor`, whose thread this must not be, its threads are used.
        """
        _require_portable(key)
        uploader = Uploader(
            client=self._bulk,
            bucket=self.bucket,
            checksums=self.spec.checksums == "when_supported",
        )
        with ExitStack() as stack:
            stack.enter_context(self.explained("upload", key))
            if isinstance(data, Path):
                source = of_file(data, stack.enter_context(data.open("rb")).fileno())
            else:
                source = of_memory(data)
            if executor is None:
                executor = stack.enter_context(ThreadPoolExecutor(threads))
            uploader.upload(key, source, part_bytes=part_bytes, executor=executor)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """All objects below a prefix, in the order of their keys, a page at a time."""
        for page in self._pages(prefix, StartAfter=start_after or ""):
            for entry in page.get("Contents", ()):
                yield ObjectInfo(
                    key=entry["Key"],
                    size_bytes=entry["Size"],
                    etag=entry["ETag"].strip('"'),
                    last_modified=entry["LastModified"].astimezone(UTC),
                )

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        """The "folders" right below a prefix: full prefixes, each with its trailing slash."""
        for page in self._pages(prefix, Delimiter="/"):
            for entry in page.get("CommonPrefixes", ()):
                yield entry["Prefix"]

    def delete(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """Deletes in batches of 1,000; a key that is not there counts as deleted.

        Returns what the store refused, key by key; raises StoreError when a whole request fails.
        """
        failures: list[DeleteFailure] = []
        remaining = iter(dict.fromkeys(keys))
        while batch := list(islice(remaining, DELETE_BATCH)):
            if self._claims is not None:
                for key in batch:
                    self._claims.drop(key)
            with self.explained(f"delete of {len(batch)} keys, the first being", batch[0]):
                answer = self.client.delete_objects(
                    Bucket=self.bucket,
                    Delete={"Objects": [{"Key": key} for key in batch], "Quiet": True},
                )
            failures.extend(
                DeleteFailure(
                    key=error.get("Key", ""),
                    code=error.get("Code", "unknown"),
                    message=error.get("Message", ""),
                )
                for error in answer.get("Errors", ())
            )
        return tuple(failures)

    def now(self) -> datetime:
        """The store's own clock, in whole seconds: ages are never told by the clock of a node."""
        with self.explained("read the clock of"):
            answer = self.client.head_bucket(Bucket=self.bucket)
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        if date is None:
            raise StoreError(
                f"{self._request('read the clock of')} failed: the answer has no Date header; "
                "a proxy in between must not remove it"
            )
        return parsedate_to_datetime(date)

    def bucket_exists(self) -> bool:
        """Whether the bucket is there. Raises StoreError when it is but may not be used."""
        with self.explained("look for"):
            try:
                self.client.head_bucket(Bucket=self.bucket)
            except ClientError as error:
                if not is_missing(error):
                    raise
                return False
        self._bucket_seen = True
        return True

    def ensure_bucket(self) -> None:
        """Creates the bucket where it is missing; another process may do so at the same time."""
        if self.bucket_exists():
            return
        # us-east-1 is the region that may not be named as a location.
        place: Any = (
            {"CreateBucketConfiguration": {"LocationConstraint": self.spec.region}}
            if self.spec.aws and self.spec.region != "us-east-1"
            else {}
        )
        with self.explained("create"):
            try:
                self.client.create_bucket(Bucket=self.bucket, **place)
            except ClientError as error:
                if error_code(error) != "BucketAlreadyOwnedByYou" and not self.bucket_exists():
                    raise

    def _create_claimed(self, claims: Claims, key: str, body: bytes) -> Created:
        """As `create`, in a store that would overwrite: the claim decides, the object follows."""
        stored = self.get_if_exists(key)
        if stored is None:
            stored = claims.take(key, body)
            if self.get_if_exists(key) is None:
                self.put(key, stored)
        return Created(won=stored == body, body=stored)

    def _create_once(self, key: str, body: bytes) -> Created:
        with self.explained("create", key):
            try:
                self.client.put_object(Bucket=self.bucket, Key=key, Body=body, IfNoneMatch="*")
            except ClientError as error:
                status = error.response["ResponseMetadata"].get("HTTPStatusCode")
                if status == 409:
                    raise _ConflictError(error_code(error)) from error
                if status != 412:
                    raise
            else:
                return Created(won=True, body=body)
        stored = self.get_if_exists(key)
        if stored is None:
            raise _ConflictError("it was there and is gone: somebody deletes it")
        return Created(won=stored == body, body=stored)

    def _read(self, operation: str, key: str, **how: Any) -> bytes:
        def ask() -> Mapping[str, Any]:
            return self.client.get_object(Bucket=self.bucket, Key=key, **how)

        with self.explained(operation, key):
            return read_answer(ask, b"".join, patience_s=self.spec.read_timeout_s)

    def _pages(self, prefix: str, **how: Any) -> Iterator[Any]:
        pages = iter(
            self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=prefix, **how
            )
        )
        while True:
            with self.explained("list", prefix):
                page = next(pages, None)
            if page is None:
                return
            yield page

    def _require_bucket(self) -> None:
        """A HEAD answers 404 for a missing bucket as well, which must not read as "no object"."""
        if not self._bucket_seen and not self.bucket_exists():
            raise StoreError(
                f"{self._request('look for')} failed: there is no such bucket; create the bucket, "
                "or correct `store.bucket`"
            )

    def _too_short(self, key: str, *, start: int, length: int, found: int) -> StoreError:
        return StoreError(
            f"{self._request('get range of', key)} failed: asked for {length} bytes from {start}, "
            f"got {found}; the object is shorter, or the store ignores Range"
        )

    def _request(self, operation: str, key: str | None = None) -> Request:
        return Request(operation=operation, bucket=self.bucket, endpoint=self.endpoint, key=key)

    @contextmanager
    def explained(self, operation: str, key: str | None = None) -> Iterator[None]:
        """Turns what botocore raises into a StoreError that says what to do."""
        try:
            yield
        except (BotoCoreError, ClientError) as error:
            raise explain(error, self._request(operation, key)) from error


def _require_portable(key: str) -> None:
    """Refuses keys that some stores take for a folder, or file under another name."""
    parts = key.split("/")
    if not {"", ".", ".."}.isdisjoint(parts) or len(key.encode()) > MAX_KEY_BYTES:
        raise StoreError(
            f"the key {key!r} is not fit for every store: it must not begin or end with '/', hold "
            f"'//', '.' or '..' as a part, nor exceed {MAX_KEY_BYTES} bytes"
        )
