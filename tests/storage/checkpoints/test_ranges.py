"""A rank reads the bytes that it needs, few beside them, and loads none that is unverified."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from awscrt.checksums import crc64nvme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from storage.checkpoint_records import Commit, FileRecord
from storage.checkpoints import contents, layout, ranges, reader
from storage.checkpoints.layout import Chunk, Layout, TensorLayout, chunk_crcs, compact, crc_text
from storage.checkpoints.metadata import JsonLoadPlanner
from storage.checkpoints.ranges import Request, Requests, Stored
from storage.checkpoints.reader import DamagedCheckpointError, ObjectStoreReader
from tests.storage.checkpoints.facts import make_commit
from tests.storage.checkpoints.held import HeldStore

FOLDER = "save/"
MIB = 2**20
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.complex128)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which a tensor of some hundred bytes meets every case."""
    for module in (layout, contents, ranges, reader):
        monkeypatch.setattr(module, "BLOCK_BYTES", 16)
    for module in (ranges, reader):
        monkeypatch.setattr(module, "RANGE_BYTES", 128)
    monkeypatch.setattr(ranges, "BOX_BYTES", 80)
    monkeypatch.setattr(ranges, "REQUEST_BYTES", 20)
    monkeypatch.setattr(ranges, "SPARE_BYTES", 8)


class RecordingStore(HeldStore):
    """Remembers the length of every range."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.lengths: list[int] = []

    def read_into(self, key: str, *into: memoryview, start: int) -> None:
        self.lengths.append(sum(map(len, into)))
        super().read_into(key, *into, start=start)


class BoxPlanner(JsonLoadPlanner):
    """Fills one tensor, whatever the index."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target


@dataclass(frozen=True)
class Case:
    """A tensor, how it was cut up when it was saved, and the box of it that is wanted now."""

    whole: torch.Tensor
    grid: tuple[tuple[int, ...], ...]
    files: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    is_plain: bool
    has_blocks: bool

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.lengths, strict=True))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(st.lists(st.integers(1, 12), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    whole = (torch.arange(math.prod(shape)) % 255).reshape(shape).to(dtype)
    grid = tuple(
        (0, *sorted(draw(st.sets(st.integers(1, size - 1), max_size=2)) if size > 1 else ()), size)
        for size in shape
    )
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    lengths = tuple(
        draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)
    )
    count = math.prod(len(cuts) - 1 for cuts in grid)
    return Case(
        whole=whole,
        grid=grid,
        files=tuple(draw(st.integers(0, 1)) for _ in range(count)),
        offsets=offsets,
        lengths=lengths,
        is_plain=draw(st.booleans()),
        has_blocks=draw(st.integers(0, 3)) > 0,
    )


def raw(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return bytes(flat.view(torch.uint8).numpy().data)


def saved(case: Case) -> tuple[dict[str, bytes], Commit]:
    """The objects of the save, and its commit."""
    bodies = {"data.0.0.bin": b"", "data.1.0.bin": b""}
    chunks = []
    for file, cuts in zip(case.files, product(*map(pairwise, case.grid)), strict=True):
        data = raw(case.whole[tuple(slice(*cut) for cut in cuts)])
        name = f"data.{file}.0.bin"
        chunks.append(
            Chunk(
                offsets=tuple(start for start, _ in cuts),
                lengths=tuple(end - start for start, end in cuts),
                file=name,
                start=len(bodies[name]),
                size_bytes=len(data),
                crc64nvme=crc_text(crc64nvme(data)),
                blocks=chunk_crcs(memoryview(data))[1] if case.has_blocks else "",
            )
        )
        bodies[name] += data + bytes(-len(data) % 16)
    dtype = str(case.whole.dtype).removeprefix("torch.")
    tensor = TensorLayout(
        dtype=dtype, shape=tuple(case.whole.shape), path=("w",), chunks=tuple(chunks)
    )
    bodies["metadata.json"] = compact(Layout(tensors={"w": tensor}))
    objects = {FOLDER + name: body for name, body in bodies.items()}
    records = {
        key: FileRecord(key=key, size_bytes=len(body), crc64nvme=crc_text(crc64nvme(body)))
        for key, body in objects.items()
    }
    metadata = records.pop(FOLDER + "metadata.json")
    return objects, make_commit(1, metadata=metadata, files=tuple(records.values()))


def loaded(store: HeldStore, commit: Commit, case: Case) -> torch.Tensor:
    """What the reader makes of the box."""
    target = torch.zeros(case.lengths, dtype=case.whole.dtype)
    if not case.is_plain:
        # Its elements do not lie one after the other, as on a device that has no shared memory.
        target = torch.stack((target, target), dim=-1)[..., 0]
    own = ObjectStoreReader(store, commit)
    described = own.read_metadata()
    own.set_up_storage_reader(described, is_coordinator=False)
    box = ChunkStorageMetadata(offsets=torch.Size(case.offsets), sizes=torch.Size(case.lengths))
    items = create_read_items_for_chunk_list("w", described.state_dict_metadata["w"], [box])
    own.read_data(LoadPlan(items), BoxPlanner(target)).wait()
    return target


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_any_box_of_any_save_comes_back_to_the_bit_in_bounded_requests(
    small: None, case: Case
) -> None:
    objects, commit = saved(case)
    store = RecordingStore(objects)
    assert raw(loaded(store, commit, case)) == raw(case.whole[case.box])
    assert max(store.lengths) <= 128


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), data=st.data())
def test_no_byte_that_is_loaded_can_be_another_one(
    small: None, case: Case, data: st.DataObject
) -> None:
    """A flip is found, or it is in no byte of the box, which comes back as it was."""
    objects, commit = saved(case)
    key = data.draw(st.sampled_from([file.key for file in commit.files if file.size_bytes]))
    at = data.draw(st.integers(0, len(objects[key]) - 1))
    body = bytearray(objects[key])
    body[at] ^= data.draw(st.integers(1, 255))
    try:
        box = loaded(HeldStore(objects | {key: bytes(body)}), commit, case)
    except DamagedCheckpointError:
        return
    assert raw(box) == raw(case.whole[case.box])


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("has_blocks", [True, False])
def test_every_byte_of_a_file_is_checked_where_all_of_it_is_wanted(
    small: None, is_plain: bool, has_blocks: bool
) -> None:
    """Large tensors that are read directly, and the padding behind them."""
    whole = torch.arange(201, dtype=torch.uint8)
    case = Case(whole, ((0, 101, 201),), (0, 0), (0,), (201,), is_plain, has_blocks)
    objects, commit = saved(case)
    key = FOLDER + "data.0.0.bin"
    assert len(objects[key]) > 201
    for at in range(len(objects[key])):
        body = bytearray(objects[key])
        body[at] ^= 1 << at % 8
        with pytest.raises(DamagedCheckpointError):
            loaded(HeldStore(objects | {key: bytes(body)}), commit, case)


def requests_for(shape: tuple[int, int], rows: slice, columns: slice) -> list[Request]:
    """What is asked for of a float32 tensor that was saved in one chunk."""
    size_bytes = 4 * math.prod(shape)
    blocks = "AAAAAAAAAAAA" * (-(-size_bytes // layout.BLOCK_BYTES) * 8 // 9 + 1)
    chunk = Chunk(
        offsets=(0, 0),
        lengths=shape,
        file="data.0.0.bin",
        start=0,
        size_bytes=size_bytes,
        crc64nvme="",
        blocks=blocks,
    )
    index = MetadataIndex("w", torch.Size([0, 0]))
    lengths = torch.Size([rows.stop - rows.start, columns.stop - columns.start])
    item = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=torch.Size([0, 0]),
        storage_index=index,
        storage_offsets=torch.Size([rows.start, columns.start]),
        lengths=lengths,
    )
    wanted = Requests()
    target: Any = memoryview(bytearray(4 * math.prod(lengths)))
    wanted.add(item, Stored("w", chunk, padding=0), target)
    return wanted.all()


def test_columns_are_read_row_by_row_where_the_gap_is_dearer_than_a_request() -> None:
    """Rows of 4 MiB, a quarter of each wanted."""
    requests = requests_for((8, MIB), slice(0, 8), slice(1000, 1000 + MIB // 4))
    read = sum(request.end - request.start for request in requests)
    assert len(requests) == 8
    assert read <= 1.05 * 8 * MIB


def test_narrow_columns_are_read_together_in_few_requests() -> None:
    """Rows of 256 KiB, a quarter of each wanted: a request for each would cost more."""
    requests = requests_for((512, 65536), slice(0, 512), slice(0, 16384))
    assert len(requests) <= 6
    assert all(request.end - request.start <= ranges.RANGE_BYTES for request in requests)


def test_a_run_of_rows_goes_straight_to_its_place_but_for_the_blocks_at_its_ends() -> None:
    requests = requests_for((4096, 5001), slice(1001, 3001), slice(0, 5001))
    assert len(requests) == 2
    assert all(request.end - request.start <= ranges.RANGE_BYTES for request in requests)
    pieces = [piece for request in requests for piece in request.pieces]
    placed = sum(len(piece.place) for piece in pieces if piece.place is not None)
    rest = [piece.end - piece.start for piece in pieces if piece.place is None]
    assert placed > 0.99 * 2000 * 5001 * 4
    assert rest == [layout.BLOCK_BYTES] * 2
