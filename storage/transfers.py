"""Bodies of large objects to and from the store: no copy that can be saved, and none that stalls.

A transfer costs little more than what the kernel does. Uploads hand the caller's memory to the
socket, and reads put into the caller's memory what the socket gives. boto3's own transfer manager
copies each part twice and signs it with SHA-256, which costs five times as much.

botocore's time-outs bound one wait at a socket. Here a transfer also has to move, a little in each
`patience_s`: a store that takes or sends a byte now and then would hold up a job for ever.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

from storage.errors import StoreError
from storage.objects import Bytes
from storage.store_failures import error_code

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")

READ_BYTES = 256 * 2**10
# A socket has to take this much within its time-out: few enough for a slow line to manage, and many
# enough that the interpreter's part in it costs nothing.
SEND_BYTES = 2**20
# What has to come within the patience of a read, or else it counts as stalled.
PROGRESS_BYTES = 256 * 2**10
MIN_PART_BYTES = 5 * 2**20
MAX_PARTS = 10_000
UPLOAD_TRIES = 3
READ_TRIES = 3


def transfers_at_once(most: int) -> int:
    """How many are worth it: more than two for a core only get into each other's way."""
    return min(most, 2 * len(os.sched_getaffinity(0)))


class _BrokenBodyError(Exception):
    """The body of an answer broke off after its headers had come; `cause` tells how."""

    def __init__(self, cause: BotoCoreError) -> None:
        super().__init__(cause)
        self.cause = cause


def read_answer(
    ask: Callable[[], Mapping[str, Any]],
    take: Callable[[Iterator[bytes]], T],
    *,
    patience_s: float,
) -> T:
    """What `take` makes of the body of the answer that `ask` gets; both again when it breaks off.

    botocore retries until the headers are there, not when the body breaks off after them.
    """

    def once() -> T:
        answer = ask()
        try:
            return take(_pieces(answer, patience_s))
        except BotoCoreError as error:
            raise _BrokenBodyError(error) from error

    retrying = Retrying(
        retry=retry_if_exception_type(_BrokenBodyError),
        stop=stop_after_attempt(READ_TRIES),
        wait=wait_random_exponential(multiplier=0.1, max=5.0),
        reraise=True,
    )
    try:
        return retrying(once)
    except _BrokenBodyError as error:
        raise error.cause from error


def _pieces(answer: Mapping[str, Any], patience_s: float) -> Iterator[bytes]:
    """The body of a `get_object`, piece by piece, each as it comes.

    To wait for whole blocks would hide from the clock that they trickle. The last piece has been
    given out before a checksum in the answer is looked at.

    Raises:
        botocore.exceptions.BotoCoreError: the body ends early, breaks off, stalls, or is not what
            the checksum says.
    """
    import urllib3.exceptions

    size_bytes = answer.get("ContentLength")
    algorithm = answer["ResponseMetadata"].get("ChecksumAlgorithm")
    body = answer["Body"]
    got = moved = 0
    until = time.monotonic() + patience_s
    with body as raw:
        while True:
            try:
                piece = raw.read1(READ_BYTES)
            except urllib3.exceptions.ReadTimeoutError as error:
                raise ReadTimeoutError(endpoint_url="of the body", error=error) from error
            except urllib3.exceptions.HTTPError as error:
                raise ResponseStreamingError(error=error) from error
            if not piece:
                break
            if algorithm is not None:
                body.checksum.update(piece)
            got += len(piece)
            yield piece
            if got - moved >= PROGRESS_BYTES:
                moved, until = got, time.monotonic() + patience_s
            elif time.monotonic() > until:
                raise ReadTimeoutError(endpoint_url="of the body")
    if size_bytes is not None and got != size_bytes:
        raise IncompleteReadError(actual_bytes=got, expected_bytes=size_bytes)
    if algorithm is not None:
        expected = answer["ResponseMetadata"]["HTTPHeaders"][f"x-amz-checksum-{algorithm.lower()}"]
        if body.checksum.digest() != base64.b64decode(expected):
            raise FlexibleChecksumError(
                error_msg=f"{algorithm} {body.checksum.b64digest()}, expected {expected}"
            )


def fill(views: Sequence[memoryview], pieces: Iterable[bytes]) -> None:
    """Puts a body into memory that is there, one view after the other; it is as long as they."""
    places = iter(views)
    place = memoryview(b"")
    for piece in pieces:
        left = memoryview(piece)
        while left:
            while not place:
                place = next(places)
            count = min(len(left), len(place))
            place[:count] = left[:count]
            left, place = left[count:], place[count:]


@dataclass(frozen=True)
class Source:
    """What is uploaded: `section(start, end)` gives a part of it, copied only if it must be."""

    size_bytes: int
    section: Callable[[int, int], memoryview]


def of_memory(data: Bytes) -> Source:
    """Parts are views of `data`, which must not change until the upload is over."""
    view = memoryview(data).cast("B")
    return Source(size_bytes=len(view), section=lambda start, end: view[start:end])


def of_file(path: Path, descriptor: int) -> Source:
    """Parts are read when their turn comes.

    They are not mapped: a file that another host cuts short would then end the process.
    """

    def section(start: int, end: int) -> memoryview:
        part = memoryview(bytearray(end - start))
        filled = 0
        while filled < len(part):
            count = os.preadv(descriptor, [part[filled:]], start + filled)
            if count == 0:
                raise StoreError(
                    f"{str(path)!r} became shorter while it was uploaded: it ends at "
                    f"{start + filled} bytes; leave a file alone until it has been stored"
                )
            filled += count
        return part

    return Source(size_bytes=os.fstat(descriptor).st_size, section=section)


@dataclass(frozen=True, kw_only=True)
class Uploader:
    """Stores large objects; what botocore raises goes on to the caller, who knows the words."""

    client: S3Client
    bucket: str
    checksums: bool

    def upload(self, key: str, source: Source, *, part_bytes: int, executor: Executor) -> None:
        """Sends parts through the executor, or, when there would be only one, the whole in one put.

        Raises:
            botocore.exceptions.BotoCoreError, ClientError: a part failed for good, or the store
                would not put the parts together; they are gone from it then.
        """
        if source.size_bytes <= part_bytes:
            view = source.section(0, source.size_bytes)
            self.client.put_object(
                Bucket=self.bucket, Key=key, Body=self._body(view), **self._checksum(view)
            )
            return
        smallest = max(MIN_PART_BYTES, -(-source.size_bytes // MAX_PARTS))
        for tries_left in reversed(range(UPLOAD_TRIES)):
            try:
                self._send_parts(key, source, max(part_bytes, smallest), executor)
            except ClientError as error:
                if tries_left == 0 or not _asks_for_all_parts_again(error):
                    raise
            else:
                return

    def _send_parts(self, key: str, source: Source, part_bytes: int, executor: Executor) -> None:
        algorithm: Any = {"ChecksumAlgorithm": "CRC64NVME"} if self.checksums else {}
        upload_id = self.client.create_multipart_upload(Bucket=self.bucket, Key=key, **algorithm)[
            "UploadId"
        ]

        def send(start: int) -> dict[str, Any]:
            view = source.section(start, min(start + part_bytes, source.size_bytes))
            number = start // part_bytes + 1
            checksum = self._checksum(view)
            sent = self.client.upload_part(
                Bucket=self.bucket,
                Key=key,
                UploadId=upload_id,
                PartNumber=number,
                Body=self._body(view),
                **checksum,
            )
            return {"PartNumber": number, "ETag": sent["ETag"], **checksum}

        sending: list[Future[dict[str, Any]]] = []
        try:
            sending.extend(
                executor.submit(send, start) for start in range(0, source.size_bytes, part_bytes)
            )
            wait(sending, return_when=FIRST_EXCEPTION)
            failed = [part for part in sending if part.done() and part.exception() is not None]
            parts: Any = [part.result() for part in failed or sending]
            self.client.complete_multipart_upload(
                Bucket=self.bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts}
            )
        except BaseException as error:
            for part in sending:
                part.cancel()
            # A part that is still being sent would outlive the abort.
            wait(sending)
            self._abort(key, upload_id, error)
            raise

    def _abort(self, key: str, upload_id: str, reason: BaseException) -> None:
        try:
            self.client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload_id)
        except (BotoCoreError, ClientError) as error:
            if not (isinstance(error, ClientError) and error_code(error) == "NoSuchUpload"):
                reason.add_note(f"its parts stay in the store until a sweep, since {error}")

    def _body(self, view: memoryview) -> Any:
        return _ViewFile(view, least_bytes=SEND_BYTES if self.checksums else 0)

    def _checksum(self, view: memoryview) -> Any:
        if not self.checksums:
            return {}
        from awscrt.checksums import crc64nvme

        return {"ChecksumCRC64NVME": base64.b64encode(crc64nvme(view).to_bytes(8)).decode()}


def _asks_for_all_parts_again(error: ClientError) -> bool:
    """409 says so; an unknown upload may be one that was completed, whose first answer was lost."""
    status = error.response["ResponseMetadata"].get("HTTPStatusCode")
    return error.operation_name == "CompleteMultipartUpload" and (
        status == 409 or error_code(error) == "NoSuchUpload"
    )


class _ViewFile:
    """A view as the file that botocore wants, whose `read` copies nothing.

    `read` gives `least_bytes` even when less is asked for, as urllib3 does. Of two that read a body
    only urllib3 takes what it is given: who signs does not.
    """

    def __init__(self, view: memoryview, *, least_bytes: int) -> None:
        self._view = view
        self._least_bytes = least_bytes
        self._position = 0

    def __len__(self) -> int:
        return len(self._view)

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._view)}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> memoryview | bytes:
        begin = self._position
        everything = size is None or size < 0
        end = None if everything else begin + max(cast("int", size), self._least_bytes)
        taken = self._view[begin:end]
        self._position += len(taken)
        # Whoever asks again at the end compares with this.
        return taken or b""
