"""A verify reads every byte: whatever was changed, cut, moved or taken away is found and named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.checkpoint_records import Commit
from storage.checkpoints import verify as verifying
from storage.checkpoints.contents import Fault, layout_faults, read_layout
from storage.checkpoints.layout import Chunk, Layout, TensorLayout, ValueLayout
from storage.checkpoints.verify import verify
from storage.errors import CheckpointError, StoreError
from storage.object_store import ObjectStore
from tests.storage.checkpoints.facts import make_commit
from tests.storage.checkpoints.handmade import (
    FOLDER,
    Box,
    commit_of,
    example,
    file_record,
    put_tensors,
)


@pytest.fixture
def stored(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> tuple[Commit, Layout]:
    """The example, read in pieces of a size that neither chunks nor blocks are a multiple of."""
    monkeypatch.setattr(verifying, "PIECE_BYTES", 10_007)
    return put_tensors(store, example())


def faults(store: ObjectStore, commit: Commit) -> tuple[Fault, ...]:
    return verify(store, commit, told=lambda _: None).faults


@pytest.mark.s3
def test_all_is_read_once_where_all_is_well(
    store: ObjectStore, stored: tuple[Commit, Layout]
) -> None:
    commit, _ = stored
    read: list[int] = []
    assert verify(store, commit, told=read.append) == verifying.Verdict()
    assert sum(read) == commit.size_bytes


@pytest.mark.s3
def test_any_changed_byte_is_found_and_its_tensor_named(
    store: ObjectStore, stored: tuple[Commit, Layout]
) -> None:
    commit, layout = stored
    bodies = {file.key: store.get(file.key) for file in commit.files}

    @settings(max_examples=15, deadline=None, database=None)
    @given(st.data())
    def flipped(data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(commit.files))
        at = data.draw(st.integers(0, file.size_bytes - 1))
        body = bytearray(bodies[file.key])
        body[at] ^= 1 << data.draw(st.integers(0, 7))
        store.put(file.key, bytes(body))
        found = faults(store, commit)
        store.put(file.key, bodies[file.key])
        owner = [
            name
            for name, tensor in layout.tensors.items()
            for chunk in tensor.chunks
            if FOLDER + chunk.file == file.key
            and chunk.start <= at < chunk.start + chunk.size_bytes
        ]
        assert [fault.tensor for fault in found] == (owner or [None])
        assert found[0].key == file.key

    flipped()


@pytest.mark.s3
def test_a_changed_byte_between_tensors_is_found(
    store: ObjectStore, stored: tuple[Commit, Layout]
) -> None:
    commit, layout = stored
    chunk = layout.tensors["b"].chunks[0]
    body = bytearray(store.get(FOLDER + chunk.file))
    body[chunk.start + chunk.size_bytes] ^= 1
    store.put(FOLDER + chunk.file, bytes(body))
    (fault,) = faults(store, commit)
    assert (fault.key, fault.tensor) == (FOLDER + chunk.file, None)


@pytest.mark.s3
def test_the_bytes_of_a_bad_block_are_told(
    store: ObjectStore, stored: tuple[Commit, Layout]
) -> None:
    commit, layout = stored
    chunk = layout.tensors["a"].chunks[2]
    body = bytearray(store.get(FOLDER + chunk.file))
    body[chunk.start + 40_000] ^= 1
    store.put(FOLDER + chunk.file, bytes(body))
    first = chunk.start + 32_768
    (fault,) = faults(store, commit)
    assert f"bytes {first:,} to {chunk.start + chunk.size_bytes:,} " in fault.what


@pytest.mark.s3
def test_a_block_checksum_that_is_wrong_itself_is_found(
    store: ObjectStore, stored: tuple[Commit, Layout]
) -> None:
    commit, layout = stored
    tensor = layout.tensors["a"]
    bad = replace(tensor.chunks[0], blocks=tensor.chunks[1].blocks)
    altered = replace(tensor, chunks=(bad, *tensor.chunks[1:]))
    commit = commit_of(
        store, replace(layout, tensors={**layout.tensors, "a": altered}), commit.files
    )
    assert [fault.tensor for fault in faults(store, commit)] == ["a"]


@pytest.mark.s3
def test_what_is_cut_gone_or_swapped_is_found(
    store: ObjectStore, stored: tuple[Commit, Layout]
) -> None:
    commit, _ = stored
    first, second = commit.files
    body, other = store.get(first.key), store.get(second.key)
    store.put(first.key, body[:-1])
    assert "has" in faults(store, commit)[0].what
    store.delete([first.key])
    (gone,) = faults(store, commit)
    assert gone.what == "is gone"
    assert f", tensor {gone.tensor!r} and {gone.more_tensors} more: is gone" in str(gone)
    store.put(first.key, other)
    store.put(second.key, body)
    assert {fault.key for fault in faults(store, commit)} == {first.key, second.key}


@pytest.mark.s3
def test_metadata_that_is_altered_or_gone_is_found(
    store: ObjectStore, stored: tuple[Commit, Layout]
) -> None:
    commit, _ = stored
    body = store.get(commit.metadata.key)
    store.put(commit.metadata.key, body.replace(b"float32", b"float16", 1))
    assert "checksum" in faults(store, commit)[0].what
    store.put(commit.metadata.key, body + b" ")
    assert "bytes" in faults(store, commit)[0].what
    store.delete([commit.metadata.key])
    assert faults(store, commit)[0].what == "is gone"


@pytest.mark.s3
def test_one_bad_read_of_good_bytes_is_told_apart(
    store: ObjectStore, stored: tuple[Commit, Layout], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, _ = stored
    right = store.get_range
    wrong = iter([True])

    def once_wrong(key: str, *, start: int, length: int) -> bytes:
        body = right(key, start=start, length=length)
        return bytes([body[0] ^ 1]) + body[1:] if next(wrong, False) else body

    monkeypatch.setattr(store, "get_range", once_wrong)
    verdict = verify(store, commit, told=lambda _: None)
    assert verdict.faults == ()
    assert len(verdict.unsteady) == 1


@pytest.mark.s3
def test_a_store_that_fails_condemns_nothing(
    store: ObjectStore, stored: tuple[Commit, Layout], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, _ = stored

    def fail(key: str, *, start: int, length: int) -> bytes:
        raise StoreError("503")

    monkeypatch.setattr(store, "get_range", fail)
    with pytest.raises(StoreError):
        faults(store, commit)


@pytest.mark.s3
def test_a_later_format_is_said_and_not_called_damage(
    store: ObjectStore, stored: tuple[Commit, Layout]
) -> None:
    commit, layout = stored
    commit = commit_of(store, replace(layout, version=9), commit.files)
    with pytest.raises(CheckpointError, match="format version 9"):
        faults(store, commit)


@pytest.mark.s3
def test_a_layout_that_contradicts_itself_is_no_layout(
    store: ObjectStore, stored: tuple[Commit, Layout]
) -> None:
    commit, layout = stored
    assert list(layout_faults(layout, commit)) == []
    assert read_layout(store, commit) == layout
    tensor = layout.tensors["a"]
    first, *rest = tensor.chunks

    def told(name: str = "a", **changes: Any) -> str:
        changed = replace(layout.tensors[name], **changes)
        tensors = {**layout.tensors, name: changed}
        return "; ".join(map(str, layout_faults(replace(layout, tensors=tensors), commit)))

    assert "hold 45,000 elements of 60,000" in told(chunks=tuple(rest))
    assert "the same elements" in told(chunks=(first, first, *rest[1:]))
    assert "is no part of its shape" in told(shape=(300, 199))
    assert "is not known" in told(dtype="int4")
    assert "cannot have 60,000 bytes" in told(dtype="float64")
    assert "does not name" in told(chunks=(replace(first, file="x"), *rest))
    assert "goes beyond" in told(chunks=(replace(first, start=10**6), *rest))
    assert "is no part" in told(chunks=(replace(first, offsets=(-1, 0)), *rest))
    assert "one checksum for each" in told(chunks=(replace(first, blocks="AAAA"), *rest))
    assert "another tensor's, too" in told(chunks=(replace(first, start=rest[1].start), *rest))
    assert "two of its chunks" in told("c", shape=(2,), chunks=_twice(layout.tensors["c"]))
    odd = replace(layout, values={"v": ValueLayout(text="{", path=("v",))})
    assert "no JSON" in "; ".join(map(str, layout_faults(odd, commit)))


def _twice(tensor: TensorLayout) -> tuple[Chunk, ...]:
    """The same element of two, twice: the count is right, and one element is nowhere."""
    (chunk,) = tensor.chunks
    one = replace(chunk, offsets=(0,), lengths=(1,))
    return one, one


@settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.data())
def test_boxes_that_tile_are_told_from_boxes_that_do_not(data: st.DataObject) -> None:
    """Any cut of a matrix tiles it; with a box moved by one it does not."""
    commit = make_commit(
        10, metadata=file_record("metadata.json", b""), files=(file_record("f", bytes(9999)),)
    )
    rows, columns = data.draw(st.integers(2, 8)), data.draw(st.integers(2, 8))
    boxes = list(_cut((0, 0), (rows, columns), data))
    tensor = TensorLayout(
        dtype="uint8",
        shape=(rows, columns),
        path=("t",),
        chunks=tuple(
            Chunk(
                offsets=o, lengths=n, file="f", start=99 * i, size_bytes=n[0] * n[1], crc64nvme=""
            )
            for i, (o, n) in enumerate(boxes)
        ),
    )
    count = np.zeros((rows, columns), dtype=int)
    moved = data.draw(st.integers(0, len(boxes) - 1))
    chunks = list(tensor.chunks)
    if data.draw(st.booleans()):
        axis = data.draw(st.integers(0, 1))
        offsets = list(chunks[moved].offsets)
        offsets[axis] = max(0, offsets[axis] - 1)
        chunks[moved] = replace(chunks[moved], offsets=tuple(offsets))
    for chunk in chunks:
        (r, c), (h, w) = chunk.offsets, chunk.lengths
        count[r : r + h, c : c + w] += 1
    layout = Layout(tensors={"t": replace(tensor, chunks=tuple(chunks))})
    faults = [one for one in layout_faults(layout, commit) if one.tensor == "t"]
    assert bool(faults) == bool((count != 1).any())


def _cut(offsets: tuple[int, int], lengths: tuple[int, int], data: st.DataObject) -> Iterator[Box]:
    axis = data.draw(st.integers(0, 1))
    if lengths[axis] < 2 or data.draw(st.booleans()):
        yield offsets, lengths
        return
    at = data.draw(st.integers(1, lengths[axis] - 1))
    low, high, rest = list(lengths), list(offsets), list(lengths)
    low[axis], high[axis], rest[axis] = at, offsets[axis] + at, lengths[axis] - at
    yield from _cut(offsets, (low[0], low[1]), data)
    yield from _cut((high[0], high[1]), (rest[0], rest[1]), data)
