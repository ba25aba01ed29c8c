"""A store is probed, not believed: some answer 200 to conditions and checksums that they ignore.

Everything that must happen only once (an attempt's number, its start, a commit) rests on
conditional writes, so a run finds out what its store really does before it relies on it.
"""

from __future__ import annotations

import secrets
import threading
from base64 import b64encode
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from botocore.exceptions import ClientError
from pydantic import TypeAdapter, ValidationError

from storage.claims import Claims
from storage.errors import StoreError
from storage.ledger import Ledger
from storage.object_store import Created, ObjectStore
from storage.records import Intent
from storage.store_failures import error_code

WRITERS = 8
# They run side by side: SeaweedFS takes a second and more when the writers of one key collide.
ROUNDS = 3
# What stores answer to a header that they do not know.
_UNSUPPORTED = frozenset({400, 405, 501})


@dataclass(frozen=True, kw_only=True)
class StoreProbe:
    """What a store was seen to do; `evidence` says in words how each answer was found.

    `claims` is the shared folder in which the run makes its claims instead, where the store has no
    conditional writes.
    """

    conditional_writes: bool
    checksums_enforced: bool
    if_match: bool
    evidence: tuple[str, ...]
    claims: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """As it goes into the run's record."""
        found: dict[str, Any] = TypeAdapter(StoreProbe).dump_python(self, mode="json")
        return found

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> StoreProbe:
        """Raises StoreError when `found` is no probe's record."""
        try:
            return TypeAdapter(StoreProbe).validate_python(dict(found))
        except ValidationError as error:
            raise StoreError(f"not the record of a store probe: {error}") from None


def probe(store: ObjectStore, *, prefix: str) -> StoreProbe:
    """Tries the store out below a prefix (without a slash at its end) and removes what it wrote.

    Raises StoreError when a request fails for another reason than the one under test, or when the
    store serves something else than was put.
    """
    store = ObjectStore(store.spec.model_copy(update={"claims": None}))
    folder = f"{prefix}/{secrets.token_hex(8)}"
    try:
        _require_faithful(store, f"{folder}/plain")
        conditional, race_evidence = _conditional_writes(store, folder)
        enforced, checksum_evidence = _checksums_enforced(store, f"{folder}/checksum")
        if_match, match_evidence = _if_match(store, f"{folder}/match")
    finally:
        left = store.delete(info.key for info in store.list(f"{folder}/"))
    if left:
        raise StoreError(
            f"the store at {store.endpoint} would not delete {left[0].key!r}: {left[0].code} "
            f"{left[0].message}; give these credentials the right to delete below {prefix!r}"
        )
    return StoreProbe(
        conditional_writes=conditional,
        checksums_enforced=enforced,
        if_match=if_match,
        evidence=(race_evidence, checksum_evidence, match_evidence),
    )


def check_from_job(ledger: Ledger, intent: Intent) -> None:
    """See from inside a job that the store is the run's, and does what it did when the run began.

    A node may reach another endpoint than the host on which the run was begun, or see another file
    system where that one had the claims. The first attempt of a stage looks at all of it, any other
    only whether its own intent is there.

    Raises:
        StoreError: it is another store, or another folder of claims, or a cache lies in between.
    """
    store = ledger.store
    found = ledger.intent(intent.stage, intent.attempt)
    if found is None or found.nonce != intent.nonce:
        seen = "no such attempt" if found is None else "another attempt of this number"
        raise StoreError(
            f"the store at {store.endpoint} as seen from this node is not the one of the run: it "
            f"holds {seen} ({ledger.keys.intent(intent.stage, intent.attempt)!r} in bucket "
            f"{store.bucket}); every node must reach the store that the run was begun with"
        )
    if intent.attempt > 1:
        return
    folder = store.spec.claims
    if folder is not None:
        claims = Claims(folder, bucket=store.bucket)
        key = ledger.keys.run_record
        if claims.holder(key) != store.get_if_exists(key):
            raise StoreError(
                f"{folder} on this node holds no claim on {key!r}, so it is not the folder where "
                "the run makes its claims; it must lie on a file system that all nodes share"
            )
        return
    key = f"{ledger.keys.probes}/job-{secrets.token_hex(8)}"
    outcomes = [store.create(key, body).won for body in (b"first", b"second")]
    store.delete([key])
    if outcomes != [True, False]:
        raise StoreError(
            f"the store at {store.endpoint} ignores `If-None-Match` as seen from this node, and "
            "honoured it when the run began; every node must reach the same endpoint, with no "
            "cache or proxy in between"
        )


def _require_faithful(store: ObjectStore, key: str) -> None:
    """Without read-after-write, or with listings that lag, no other answer means anything."""
    body = secrets.token_bytes(64)
    store.put(key, body)
    if store.get(key) != body or [info.key for info in store.list(key)] != [key]:
        raise StoreError(
            f"the store at {store.endpoint} does not give back what was just put at {key!r}; "
            "Headrace needs read-after-write consistency: use no cache or mirror in between"
        )


def _conditional_writes(store: ObjectStore, folder: str) -> tuple[bool, str]:
    try:
        store.create(f"{folder}/create", b"first")
    except StoreError as error:
        if not isinstance(error.__cause__, ClientError) or _status(error.__cause__) not in (
            _UNSUPPORTED
        ):
            raise
        return False, f"If-None-Match: the store does not know it ({error.__cause__})"
    if store.create(f"{folder}/create", b"second").won:
        return False, "If-None-Match: a second writer overwrote the first"
    with ThreadPoolExecutor(ROUNDS) as pool:
        races = list(pool.map(lambda n: _race(store, f"{folder}/race-{n}"), range(ROUNDS)))
    for winners, views in races:
        if winners != 1 or views != 1:
            return False, (
                f"If-None-Match: {winners} of {WRITERS} racing writers won, and they saw {views} "
                "different bodies"
            )
    return True, f"If-None-Match: one winner of {WRITERS} racing writers in each of {ROUNDS} rounds"


def _race(store: ObjectStore, key: str) -> tuple[int, int]:
    """How many of the writers won, and how many different bodies they and a last reader saw."""
    barrier = threading.Barrier(WRITERS)

    def write(writer: int) -> Created:
        barrier.wait()
        return store.create(key, f"writer {writer}".encode())

    with ThreadPoolExecutor(WRITERS) as pool:
        outcomes = list(pool.map(write, range(WRITERS)))
    seen = {outcome.body for outcome in outcomes} | {store.get(key)}
    return sum(outcome.won for outcome in outcomes), len(seen)


def _checksums_enforced(store: ObjectStore, key: str) -> tuple[bool, str]:
    body = b"these bytes"
    wrong = _refusal_of_put(store, key, body, ChecksumCRC32=_crc32(b"others"))
    if wrong is None:
        return False, "checksums: a put with a wrong CRC32 was accepted"
    right = _refusal_of_put(store, key, body, ChecksumCRC32=_crc32(body))
    if right is not None:
        return False, f"checksums: a put with a right CRC32 was refused ({right})"
    return True, f"checksums: a put with a wrong CRC32 was refused ({wrong})"


def _if_match(store: ObjectStore, key: str) -> tuple[bool, str]:
    store.put(key, b"first")
    current = store.head(key)
    if current is None:
        raise StoreError(f"the store at {store.endpoint} lost {key!r} right after it was put")
    wrong = _refusal_of_put(store, key, b"second", IfMatch='"0123456789abcdef0123456789abcdef"')
    if wrong is None:
        return False, "If-Match: a put with a wrong ETag was accepted"
    right = _refusal_of_put(store, key, b"second", IfMatch=f'"{current.etag}"')
    if right is not None:
        return False, f"If-Match: a put with the right ETag was refused ({right})"
    return True, f"If-Match: the right ETag was accepted, a wrong one refused ({wrong})"


def _refusal_of_put(store: ObjectStore, key: str, body: bytes, **how: Any) -> str | None:
    """How the store refused what this put demands; None when it accepted it."""
    with store.explained("probe with a put", key):
        try:
            store.client.put_object(Bucket=store.bucket, Key=key, Body=body, **how)
        except ClientError as error:
            if _status(error) != 412 and _status(error) not in _UNSUPPORTED:
                raise
            return f"{_status(error)} {error_code(error)}"
    return None


def _status(error: ClientError) -> int:
    return int(error.response["ResponseMetadata"].get("HTTPStatusCode", 0))


def _crc32(body: bytes) -> str:
    return b64encode(crc32(body).to_bytes(4, "big")).decode()
