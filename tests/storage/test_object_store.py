"""Promises of the store's client, against a real S3 server and, for its faults, a meddling one."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from storage.errors import ObjectMissing, StoreError
from storage.object_store import Created, DeleteFailure, ObjectStore
from storage.spec import StoreSpec
from tests.storage.meddler import Answered, Asked, Forward, Meddler

MIB = 2**20


@pytest.mark.s3
def test_of_racing_creators_one_wins_and_all_see_its_body(store: ObjectStore) -> None:
    barrier = threading.Barrier(8)

    def create(writer: int) -> Created:
        barrier.wait()
        return store.create("claims/one", f"writer {writer}".encode())

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(create, range(8)))
    (winner,) = [writer for writer, outcome in enumerate(outcomes) if outcome.won]
    assert {outcome.body for outcome in outcomes} == {f"writer {winner}".encode()}
    assert store.get("claims/one") == f"writer {winner}".encode()


@pytest.mark.s3
def test_creating_again_wins_with_the_same_body_and_loses_with_another(store: ObjectStore) -> None:
    assert store.create("claim", b"mine") == Created(won=True, body=b"mine")
    assert store.create("claim", b"mine") == Created(won=True, body=b"mine")
    assert store.create("claim", b"other") == Created(won=False, body=b"mine")


def test_a_creator_whose_answer_was_lost_finds_that_it_has_won(
    meddled: ObjectStore, meddler: Meddler
) -> None:
    def lose_first_answer(asked: Asked, forward: Forward) -> Answered:
        answer = forward(asked)
        lost = len([one for one in meddler.seen if one.method == "PUT"]) == 1
        return Answered(500) if lost else answer

    meddler.rule = lose_first_answer
    assert meddled.create("claim", b"mine") == Created(won=True, body=b"mine")
    assert [asked.body for asked in meddler.seen] == [b"mine", b"mine", b""]


def test_a_conflict_is_tried_again_with_the_same_body(
    meddled: ObjectStore, meddler: Meddler
) -> None:
    def conflict_once(asked: Asked, forward: Forward) -> Answered:
        return Answered(409) if len(meddler.seen) == 1 else forward(asked)

    meddler.rule = conflict_once
    assert meddled.create("claim", b"mine") == Created(won=True, body=b"mine")
    assert [asked.body for asked in meddler.seen] == [b"mine", b"mine"]


def test_a_conflict_without_end_is_an_error(meddled: ObjectStore, meddler: Meddler) -> None:
    meddler.rule = lambda asked, forward: Answered(409)
    with pytest.raises(StoreError, match="still in conflict after 3 tries"):
        meddled.create("claim", b"mine")


@pytest.mark.s3
def test_more_than_a_page_is_listed_and_deleted(store: ObjectStore) -> None:
    keys = [f"many/{number:05d}" for number in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b"x"), keys))
    store.put("other/x", b"x")
    assert [info.key for info in store.list("many/")] == keys
    assert [info.key for info in store.list("many/", start_after=keys[1049])] == keys[1050:]
    assert list(store.list_prefixes("")) == ["many/", "other/"]
    assert store.delete([*keys, "never/there"]) == ()
    assert [info.key for info in store.list("")] == ["other/x"]


def test_keys_that_would_not_go_are_reported_one_by_one(
    meddled: ObjectStore, meddler: Meddler
) -> None:
    def refuse_two(asked: Asked, forward: Forward) -> Answered:
        refused = "".join(
            f"<Error><Key>{key}</Key><Code>AccessDenied</Code><Message>locked</Message></Error>"
            for key in ("b", "zz")
            if f"<Key>{key}</Key>".encode() in asked.body
        )
        return Answered(200, body=f"<DeleteResult>{refused}</DeleteResult>".encode())

    meddler.rule = refuse_two
    keys = ["a", "b", *(f"k{number}" for number in range(998)), "zz"]
    assert meddled.delete(keys) == (
        DeleteFailure(key="b", code="AccessDenied", message="locked"),
        DeleteFailure(key="zz", code="AccessDenied", message="locked"),
    )
    assert [asked.body.count(b"<Key>") for asked in meddler.seen] == [1000, 1]


@pytest.mark.s3
def test_a_large_upload_comes_back_whole_and_in_ranges(store: ObjectStore) -> None:
    data = secrets.token_bytes(80 * MIB + 17)
    store.upload("large", memoryview(data))
    info = store.head("large")
    assert info is not None
    assert info.size_bytes == len(data)
    assert info.etag.endswith("-3"), "not a multipart upload"
    assert store.get("large") == data
    for start, length in ((0, 1), (32 * MIB - 5, 10), (len(data) - 7, 7), (5, 0)):
        assert store.get_range("large", start=start, length=length) == data[start : start + length]


@pytest.mark.s3
def test_a_file_is_uploaded_from_its_path_and_small_data_in_one_put(
    store: ObjectStore, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(secrets.token_bytes(11 * MIB))
    store.upload("file", path, part_bytes=5 * MIB, threads=2)
    assert store.get("file") == path.read_bytes()
    store.upload("small", bytearray(b"tiny"))
    info = store.head("small")
    assert info is not None
    assert "-" not in info.etag
    assert store.get("small") == b"tiny"


@pytest.mark.s3
def test_each_part_carries_a_checksum_that_the_store_holds_it_to(
    store: ObjectStore, store_server: StoreSpec
) -> None:
    def spoil_second_part(asked: Asked, forward: Forward) -> Answered:
        if "partNumber=2" in asked.path:
            asked = Asked(asked.method, asked.path, asked.headers, b"?" + asked.body[1:])
        return forward(asked)

    with Meddler(store_server.endpoint_url).serving() as meddler:
        # The signature covers the host's name, which the proxy passes on as it came.
        meddled = ObjectStore(
            store.spec.model_copy(update={"endpoint_url": meddler.endpoint_url, "max_attempts": 1})
        )
        meddled.upload("sound", bytes(11 * MIB), part_bytes=5 * MIB)
        parts = [asked for asked in meddler.seen if "partNumber=" in asked.path]
        assert len(parts) == 3
        assert all("x-amz-checksum-crc64nvme" in part.headers for part in parts)
        meddler.rule = spoil_second_part
        with pytest.raises(StoreError, match=r"upload s3://.*/spoilt"):
            meddled.upload("spoilt", bytes(11 * MIB), part_bytes=5 * MIB)
        meddled.close()
    assert [info.key for info in store.list("")] == ["sound"]


def test_an_upload_that_fails_is_aborted(meddled: ObjectStore, meddler: Meddler) -> None:
    meddler.rule = lambda asked, forward: (
        Answered(403) if "partNumber=2" in asked.path else forward(asked)
    )
    with pytest.raises(StoreError, match=r"upload s3://.*/large"):
        meddled.upload("large", bytes(11 * MIB), part_bytes=5 * MIB)
    assert "Uploads" not in meddled.client.list_multipart_uploads(Bucket=meddled.bucket)
    assert meddled.head("large") is None


@pytest.mark.s3
def test_what_is_not_there_is_told_apart_from_a_missing_bucket(
    store: ObjectStore, store_server: StoreSpec
) -> None:
    with pytest.raises(ObjectMissing, match="'no/such'"):
        store.get("no/such")
    with pytest.raises(ObjectMissing):
        store.get_range("no/such", start=0, length=1)
    assert store.get_if_exists("no/such") is None
    assert store.head("no/such") is None
    assert list(store.list("no/such")) == []

    nowhere = ObjectStore(store_server.model_copy(update={"bucket": "no-such-bucket"}))
    assert not nowhere.bucket_exists()
    calls: list[Callable[[], object]] = [
        lambda: nowhere.get_if_exists("key"),
        lambda: nowhere.head("key"),
        lambda: nowhere.put("key", b""),
        lambda: nowhere.create("key", b""),
        lambda: list(nowhere.list("")),
    ]
    for call in calls:
        with pytest.raises(StoreError, match=r"create the bucket, or correct `store\.bucket`"):
            call()
    nowhere.close()


@pytest.mark.s3
def test_a_range_past_the_end_is_an_error_not_fewer_bytes(store: ObjectStore) -> None:
    store.put("short", b"0123456789")
    with pytest.raises(StoreError, match="asked for 8 bytes from 5, got 5"):
        store.get_range("short", start=5, length=8)
    with pytest.raises(StoreError, match="InvalidRange"):
        store.get_range("short", start=50, length=1)


def test_a_body_that_breaks_off_is_read_again(meddled: ObjectStore, meddler: Meddler) -> None:
    meddled.put("key", b"0123456789")
    meddler.seen.clear()

    def break_off_once(asked: Asked, forward: Forward) -> Answered:
        answer = forward(asked)
        if len(meddler.seen) > 1:
            return answer
        return Answered(answer.status, answer.headers, answer.body[:4], promised_bytes=10)

    meddler.rule = break_off_once
    assert meddled.get("key") == b"0123456789"
    meddler.rule = lambda asked, forward: Answered(200, body=b"0123", promised_bytes=10)
    with pytest.raises(StoreError, match="get s3://"):
        meddled.get("key")


@pytest.mark.s3
def test_a_range_is_read_into_memory_that_is_there(store: ObjectStore) -> None:
    data = secrets.token_bytes(3 * MIB + 5)
    store.upload("key", data)
    buffer = bytearray(len(data) + 2)
    for start, length in ((0, len(data)), (MIB - 1, MIB), (len(data) - 1, 1), (7, 0)):
        store.read_into("key", memoryview(buffer)[1 : 1 + length], start=start)
        assert buffer[1 : 1 + length] == data[start : start + length]
        assert buffer[0] == buffer[-1] == 0, "more was written than the view"
    with pytest.raises(StoreError, match=f"asked for 9 bytes from {len(data) - 4}, got 4"):
        store.read_into("key", memoryview(buffer)[:9], start=len(data) - 4)
    with pytest.raises(StoreError, match="InvalidRange"):
        store.read_into("key", memoryview(buffer)[:1], start=len(data))
    with pytest.raises(ObjectMissing):
        store.read_into("no/such", memoryview(buffer), start=0)
    with pytest.raises(ValueError, match="writable"):
        store.read_into("key", memoryview(data), start=0)


def test_a_range_that_breaks_off_is_read_into_memory_again(
    meddled: ObjectStore, meddler: Meddler
) -> None:
    meddled.put("key", b"0123456789")
    meddler.seen.clear()

    def break_off_once(asked: Asked, forward: Forward) -> Answered:
        answer = forward(asked)
        if len(meddler.seen) > 1:
            return answer
        return Answered(answer.status, answer.headers, answer.body[:4], promised_bytes=6)

    meddler.rule = break_off_once
    buffer = bytearray(6)
    meddled.read_into("key", memoryview(buffer), start=3)
    assert buffer == b"345678"
    meddler.rule = lambda asked, forward: Answered(206, body=b"0123", promised_bytes=6)
    with pytest.raises(StoreError, match="get range of s3://"):
        meddled.read_into("key", memoryview(buffer), start=3)
    meddler.rule = lambda asked, forward: Answered(200, body=b"012345")
    with pytest.raises(StoreError, match="ignores Range"):
        meddled.read_into("key", memoryview(buffer), start=3)


@pytest.mark.usefixtures("any_credentials")
def test_a_store_that_stays_silent_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        store = ObjectStore(StoreSpec(endpoint_url=url, read_timeout_s=0.2, max_attempts=2))
        with pytest.raises(StoreError, match=r"fell silent.*store\.read_timeout_s"):
            store.get("key")
        store.close()


def test_ages_are_told_by_the_clock_of_the_store(meddled: ObjectStore, meddler: Meddler) -> None:
    meddler.rule = lambda asked, forward: Answered(200, {"Date": "Wed, 02 Jan 2030 03:04:05 GMT"})
    assert meddled.now() == datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    meddler.rule = lambda asked, forward: Answered(200)
    with pytest.raises(StoreError, match="no Date header"):
        meddled.now()


@pytest.mark.s3
def test_last_modified_and_now_are_of_one_clock(store: ObjectStore) -> None:
    before = store.now()
    store.put("key", b"")
    (listed,) = store.list("")
    assert listed == store.head("key")
    assert before <= listed.last_modified <= store.now()


@pytest.mark.s3
def test_wrong_credentials_are_named_with_their_remedy(
    store_server: StoreSpec, any_credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = store_server.model_copy(update={"credentials_file": None, "profile": None})
    stranger = ObjectStore(bare)
    with pytest.raises(StoreError, match=r"InvalidAccessKeyId.*check AWS_ACCESS_KEY_ID"):
        stranger.get("key")
    stranger.close()

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(StoreError, match=r"set AWS_ACCESS_KEY_ID.*every node"):
        ObjectStore(bare)
    with pytest.raises(StoreError, match=r"nobody.*correct `store\.profile`"):
        ObjectStore(bare.model_copy(update={"profile": "nobody"}))
    gone = Path("/nonexistent/credentials")
    with pytest.raises(StoreError, match=r"store\.credentials_file .* cannot be read"):
        ObjectStore(bare.model_copy(update={"credentials_file": gone}))


@pytest.mark.usefixtures("any_credentials")
def test_a_store_that_is_not_there_is_named_with_its_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        store = ObjectStore(StoreSpec(endpoint_url=url, max_attempts=1))
        with pytest.raises(StoreError, match=rf"at {url} failed: .*connection refused"):
            store.put("key", b"")
        store.close()


def test_a_spec_that_nobody_resolved_is_refused() -> None:
    with pytest.raises(StoreError, match=r"store\.endpoint_url is not set.*resolve"):
        ObjectStore(StoreSpec())


@pytest.mark.usefixtures("any_credentials")
def test_keys_that_not_every_store_takes_are_refused_before_any_request() -> None:
    store = ObjectStore(StoreSpec(endpoint_url="http://127.0.0.1:9"))
    for key in ("", "/a", "a/", "a//b", "a/../b", "./a", "k" * 1025):
        for call in (store.put, store.create, store.upload):
            with pytest.raises(StoreError, match="not fit for every store"):
                call(key, b"")
    store.close()


@pytest.mark.s3
def test_a_proxy_of_the_site_is_not_asked_for_private_addresses(
    store_server: StoreSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    store = ObjectStore(store_server)
    assert store.bucket_exists()
    store.close()


@pytest.mark.s3
def test_use_after_a_fork_is_an_error_not_a_corrupt_connection(store: ObjectStore) -> None:
    script = """
import os, sys
from storage.object_store import ObjectStore
from storage.spec import StoreSpec
store = ObjectStore(StoreSpec.model_validate_json(sys.argv[1]))
assert store.bucket_exists()
if os.fork() == 0:
    try:
        store.get("key")
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.wait()
assert store.bucket_exists()
"""
    told = _python(script, store.spec.model_dump_json())
    assert told.startswith("StoreError this ObjectStore was made by process")
    assert "after a fork" in told


def test_planning_a_run_does_not_pay_for_boto3() -> None:
    assert _python("import sys, storage.object_store; print('boto3' in sys.modules)") == "False"


def _python(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    return done.stdout.strip()
