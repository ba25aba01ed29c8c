"""Sealed records: no byte of them changes unseen, and no record is taken for another."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.checkpoint_records import Commit, FileRecord
from storage.checkpoints.commits import read_commit
from storage.checkpoints.layout import Chunk, Layout, RankPart, TensorLayout
from storage.checkpoints.sealing import DamagedRecordError, decode_sealed, encode_sealed
from storage.ledger import Ledger
from storage.records import decode, encode
from tests.storage.checkpoints.facts import make_commit, make_facts

FILE = FileRecord(key="a/b.bin", size_bytes=12, crc64nvme="AAAAAAAAAAA=")
COMMIT = make_commit(10, metadata=FILE, files=(FILE,))
CHUNK = Chunk(offsets=(0,), lengths=(3,), file="b.bin", start=0, size_bytes=12, crc64nvme="")
TENSOR = TensorLayout(dtype="float32", shape=(3,), path=("w",), chunks=(CHUNK,))
PART = RankPart(facts=make_facts(10), rank=0, files=(FILE,), layout=Layout(tensors={"w": TENSOR}))


@pytest.mark.parametrize("record", [COMMIT, PART], ids=["commit", "done"])
def test_every_change_of_one_byte_and_every_cut_is_seen(record: Commit | RankPart) -> None:
    """Of each byte all eight bits one by one, and some other values; cuts at every length."""
    kind, body = type(record), encode_sealed(record)
    assert decode_sealed(kind, body) == record
    for place, byte in enumerate(body):
        for other in {*(byte ^ (1 << bit) for bit in range(8)), 0x20, 0x30, 0x41} - {byte}:
            with pytest.raises(DamagedRecordError):
                decode_sealed(kind, body[:place] + bytes([other]) + body[place + 1 :])
        with pytest.raises(DamagedRecordError):
            decode_sealed(kind, body[:place])


@given(data=st.data())
def test_what_is_put_in_taken_out_or_swapped_is_seen(data: st.DataObject) -> None:
    body = encode_sealed(COMMIT)
    start = data.draw(st.integers(0, len(body)))
    end = data.draw(st.integers(start, min(len(body), start + 8)))
    other = data.draw(st.binary(max_size=8))
    changed = body[:start] + other + body[end:]
    if changed != body:
        with pytest.raises(DamagedRecordError):
            decode_sealed(Commit, changed)


def test_a_record_without_a_seal_is_not_believed() -> None:
    with pytest.raises(DamagedRecordError, match="has no seal"):
        decode_sealed(Commit, encode(COMMIT))


def test_a_sealed_record_of_another_kind_is_damage_and_no_crash() -> None:
    with pytest.raises(DamagedRecordError, match="not a Commit record"):
        decode_sealed(Commit, encode_sealed(FILE))


def test_a_later_version_that_knows_more_fields_is_still_read() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Later(FileRecord):
        colour: str = "red"

    later = Later(key="k", size_bytes=1, crc64nvme="x")
    assert decode_sealed(FileRecord, encode_sealed(later)).key == "k"
    assert decode_sealed(Later, encode_sealed(FILE)).colour == "red"


def test_a_sealed_record_is_one_json_object_for_any_reader() -> None:
    assert decode(Commit, encode_sealed(COMMIT)) == COMMIT


@pytest.mark.s3
def test_a_commit_counts_only_at_its_own_place_and_in_its_own_run(ledger: Ledger) -> None:
    ledger.store.put(ledger.keys.commit(1, step=10), encode_sealed(COMMIT))
    assert read_commit(ledger, attempt=1, step=10) == COMMIT
    assert read_commit(ledger, attempt=1, step=20) is None
    for attempt, step in ((1, 20), (2, 10)):
        ledger.store.put(ledger.keys.commit(attempt, step=step), encode_sealed(COMMIT))
        with pytest.raises(DamagedRecordError, match="is that of run 'demo', attempt 1, step 10"):
            read_commit(ledger, attempt=attempt, step=step)
    other = Ledger(ledger.store, type(ledger.keys)(prefix="", run="other"))
    other.store.put(other.keys.commit(1, step=10), encode_sealed(COMMIT))
    with pytest.raises(DamagedRecordError, match="run 'demo'"):
        read_commit(other, attempt=1, step=10)
