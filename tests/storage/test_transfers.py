"""Promises of large transfers: no copies, no stalls, and nothing half done is left."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from storage.errors import StoreError
from storage.object_store import ObjectStore
from storage.spec import StoreSpec
from storage.transfers import of_file
from tests.storage.meddler import Answered, Asked, Forward, Meddler

MIB = 2**20
PART = 5 * MIB


@pytest.mark.s3
def test_neither_way_holds_a_copy_of_the_data(store: ObjectStore) -> None:
    data = bytearray(48 * MIB)
    store.upload("warm", bytes(6 * MIB), part_bytes=PART)
    store.read_into("warm", memoryview(data)[:MIB], start=0)
    tracemalloc.start()
    try:
        store.upload("large", memoryview(data), part_bytes=16 * MIB)
        store.read_into("large", memoryview(data), start=0)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * MIB


def test_a_part_that_failed_once_is_sent_again_from_its_beginning(
    meddled: ObjectStore, meddler: Meddler
) -> None:
    def fail_once(asked: Asked, forward: Forward) -> Answered:
        seen = [one for one in meddler.seen if "partNumber=2" in one.path]
        return Answered(500) if "partNumber=2" in asked.path and len(seen) == 1 else forward(asked)

    meddler.rule = fail_once
    data = bytes(range(256)) * (11 * MIB // 256)
    with ThreadPoolExecutor(2) as pool:
        meddled.upload("large", data, part_bytes=PART, executor=pool)
    assert meddled.get("large") == data


def test_a_conflict_at_the_end_sends_all_parts_again_and_not_for_ever(
    meddled: ObjectStore, meddler: Meddler
) -> None:
    conflicts = 1

    def conflict(asked: Asked, forward: Forward) -> Answered:
        if len([one for one in meddler.seen if _completes(one)]) <= conflicts and _completes(asked):
            return Answered(409)
        return forward(asked)

    meddler.rule = conflict
    data = bytes(11 * MIB)
    meddled.upload("large", data, part_bytes=PART)
    assert meddled.get("large") == data
    assert len([one for one in meddler.seen if "partNumber=" in one.path]) == 6
    assert "Uploads" not in meddled.client.list_multipart_uploads(Bucket=meddled.bucket)

    conflicts = 1000
    with pytest.raises(StoreError, match=r"upload s3://.*/never"):
        meddled.upload("never", data, part_bytes=PART)
    assert "Uploads" not in meddled.client.list_multipart_uploads(Bucket=meddled.bucket)
    assert meddled.head("never") is None


def test_an_upload_whose_last_answer_was_lost_ends_well(
    meddled: ObjectStore, meddler: Meddler
) -> None:
    gone = b"<Error><Code>NoSuchUpload</Code><Message>gone</Message></Error>"

    def lose_once(asked: Asked, forward: Forward) -> Answered:
        count = len([one for one in meddler.seen if _completes(one)])
        if not _completes(asked) or count > 2:
            return forward(asked)
        # Most stores have forgotten the upload by the second time, which moto has not.
        if count == 2:
            return Answered(404, body=gone)
        forward(asked)
        return Answered(500)

    meddler.rule = lose_once
    data = bytes(11 * MIB)
    meddled.upload("large", data, part_bytes=PART)
    assert meddled.get("large") == data


def test_parts_that_could_not_be_aborted_are_told_of(
    meddled: ObjectStore, meddler: Meddler
) -> None:
    meddler.rule = lambda asked, forward: (
        Answered(403)
        if "partNumber=2" in asked.path or asked.method == "DELETE"
        else forward(asked)
    )
    with pytest.raises(StoreError) as raised:
        meddled.upload("large", bytes(11 * MIB), part_bytes=PART)
    assert raised.value.__cause__ is not None
    assert "its parts stay in the store" in raised.value.__cause__.__notes__[0]


def test_where_checksums_are_not_asked_for_the_body_is_signed(
    meddled: ObjectStore, meddler: Meddler
) -> None:
    plain = ObjectStore(meddled.spec.model_copy(update={"checksums": "when_required"}))
    for store, key in ((meddled, "checked"), (plain, "signed")):
        meddler.seen.clear()
        store.upload(key, bytes(11 * MIB), part_bytes=PART)
        store.upload(key, b"tiny")
        sent = [asked.headers for asked in meddler.seen if asked.method == "PUT"]
        assert len(sent) == 4
        unsigned = {headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD" for headers in sent}
        checked = {"x-amz-checksum-crc64nvme" in headers for headers in sent}
        assert unsigned == checked == {store is meddled}
    plain.close()


def test_nothing_at_all_is_an_object_too(meddled: ObjectStore, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    meddled.upload("memory", b"")
    meddled.upload("file", empty)
    assert meddled.get("memory") == meddled.get("file") == b""


def test_a_file_that_shrinks_is_an_error_and_no_shorter_object(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    with path.open("rb") as file:
        source = of_file(path, file.fileno())
        path.write_bytes(b"0123")
        with pytest.raises(StoreError, match=r"became shorter .* it ends at 4 bytes"):
            source.section(2, source.size_bytes)


@pytest.mark.usefixtures("any_credentials")
def test_a_store_that_stops_reading_is_given_up() -> None:
    def stop_reading(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    stalled = pytest.raises(StoreError, match=r"stopped reading.*store\.read_timeout_s")
    with _serving(stop_reading) as url, _impatient(url) as store, stalled:
        store.upload("key", bytes(32 * MIB))


@pytest.mark.usefixtures("any_credentials")
def test_a_store_that_trickles_is_given_up() -> None:
    def trickle(connection: socket.socket) -> None:
        connection.recv(10_000)
        connection.sendall(b"HTTP/1.1 206 Partial Content\r\nContent-Length: 100000\r\n\r\n")
        # Each byte comes in time for the socket, and the whole would take half an hour.
        while not over.wait(0.02):
            connection.sendall(b"x")

    over = threading.Event()
    buffer = memoryview(bytearray(100_000))
    reads: list[Callable[[ObjectStore], object]] = [
        lambda store: store.read_into("key", buffer, start=5),
        lambda store: store.get("key"),
    ]
    with _serving(trickle) as url, _impatient(url) as store:
        for read in reads:
            with pytest.raises(StoreError, match=r"store\.read_timeout_s"):
                read(store)
        over.set()


def _completes(asked: Asked) -> bool:
    return asked.method == "POST" and "uploadId=" in asked.path


@contextmanager
def _impatient(url: str) -> Iterator[ObjectStore]:
    spec = StoreSpec(endpoint_url=url, connect_timeout_s=0.2, read_timeout_s=0.2, max_attempts=2)
    store = ObjectStore(spec)
    yield store
    store.close()


@contextmanager
def _serving(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does this to every connection, and then lets it hang."""

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                threads.append(threading.Thread(target=handle, args=(connection,)))
                threads[-1].start()

    def handle(connection: socket.socket) -> None:
        with suppress(OSError):
            serve(connection)

    connections: list[socket.socket] = []
    threads: list[threading.Thread] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        accepting = threading.Thread(target=accept)
        accepting.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        # Wakes the thread, which a mere close would not.
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
        for connection in connections:
            connection.close()
        for thread in threads:
            thread.join()
