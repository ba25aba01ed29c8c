"""Tensors leave a checkpoint as they are in it, however they were cut, and in bounded memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from storage.checkpoints import export as exporting
from storage.checkpoints.export import FloatType, Wanted, to_bfloat16, write_tensors
from storage.errors import CheckpointError
from storage.object_store import ObjectStore
from tests.storage.checkpoints.handmade import FOLDER, example, put_tensors


@pytest.mark.s3
@pytest.mark.parametrize("slab_bytes", [1, 8_000, 10**6])
def test_pieces_of_any_cut_become_the_whole_tensor(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slab_bytes: int
) -> None:
    monkeypatch.setattr(exporting, "SLAB_BYTES", slab_bytes)
    monkeypatch.setattr(exporting, "AHEAD_BYTES", 4 * slab_bytes)
    tensors = {name: one for name, one in example().items() if name != "a" or slab_bytes > 1}
    _, layout = put_tensors(store, tensors)
    wanted = [
        Wanted(name=f"their.{name}", source=name, layout=tensor)
        for name, tensor in layout.tensors.items()
    ]
    read: list[int] = []
    write_tensors(
        store, FOLDER, wanted, tmp_path, dtype="float32", about={"x": "y"}, told=read.append
    )
    assert sum(read) == sum(array.nbytes for array, _, _ in tensors.values())
    found = load_file(tmp_path / "model.safetensors")
    for name, (array, dtype, _) in tensors.items():
        whole = torch.from_numpy(array.astype(np.int64) if dtype == "bfloat16" else array)
        if dtype == "bfloat16":
            whole = whole.to(torch.uint16).view(torch.bfloat16)
        assert torch.equal(found[f"their.{name}"], whole.float()), name
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt", "x": "y"}


@pytest.mark.s3
def test_only_floats_can_be_exported(store: ObjectStore, tmp_path: Path) -> None:
    whole = [((0,), (3,))]
    _, layout = put_tensors(store, {"n": (np.arange(3, dtype="<i8"), "int64", whole)})
    wanted = [Wanted(name="n", source="n", layout=layout.tensors["n"])]
    dtype: FloatType = "float32"
    with pytest.raises(CheckpointError, match="tensor 'n' is int64 and cannot become float32"):
        write_tensors(store, FOLDER, wanted, tmp_path, dtype=dtype, about={}, told=lambda _: None)


LOWER_HALVES = st.sampled_from([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
UPPER_HALVES = st.integers(0, 2**16 - 1) | st.sampled_from([0x7F7F, 0x7F80, 0xFF80, 0x7FFF, 1])


@given(st.lists(st.tuples(UPPER_HALVES, LOWER_HALVES), min_size=1, max_size=50))
def test_rounding_to_bfloat16_is_that_of_torch(halves: list[tuple[int, int]]) -> None:
    bits = np.array([(upper << 16) | lower for upper, lower in halves], dtype=np.uint32)
    values = bits.view(np.float32)
    ours = torch.from_numpy(to_bfloat16(values)).view(torch.bfloat16)
    theirs = torch.from_numpy(values).bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan())
    numbers = ~theirs.isnan()
    assert torch.equal(ours[numbers], theirs[numbers])
