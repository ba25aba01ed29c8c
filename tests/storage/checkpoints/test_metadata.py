"""What may be in a checkpoint: tensors and JSON values, and nothing that could run code."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage.checkpoint_records import FileRecord, RankDone
from storage.checkpoints.layout import (
    Chunk,
    Layout,
    RankPart,
    TensorLayout,
    ValueLayout,
    compact,
    merge,
    value_text,
)
from storage.checkpoints.metadata import DTYPES, JsonLoadPlanner, JsonSavePlanner, to_metadata
from storage.errors import CheckpointError
from storage.records import Stage, decode
from tests.storage.checkpoints.facts import make_facts


def plan_save(state: dict[str, Any]) -> None:
    planner = JsonSavePlanner()
    planner.set_up_planner(state)
    planner.create_local_plan()


def plan_load(state: dict[str, Any], layout: Layout) -> None:
    planner = JsonLoadPlanner()
    planner.set_up_planner(state, to_metadata(layout))
    planner.create_local_plan()


def tensor(dtype: str = "float32", *, split: int = 2, rows: int = 4) -> tuple[TensorLayout, ...]:
    """One layout a rank of a tensor of `rows` rows that `split` ranks share."""
    return tuple(
        TensorLayout(
            dtype=dtype,
            shape=(rows, 3),
            path=("w",),
            chunks=(
                Chunk(
                    offsets=(rank * rows // split, 0),
                    lengths=(rows // split, 3),
                    file=f"data.{rank}.0.bin",
                    start=0,
                    size_bytes=12 * rows // split,
                    crc64nvme="",
                ),
            ),
        )
        for rank in range(split)
    )


@pytest.mark.parametrize(
    "value",
    [object(), math.nan, math.inf, np.float32(1.0), Stage.TRAIN, [1, {2}], b"bytes", (object(),)],
    ids=["object", "nan", "inf", "numpy", "enum", "set", "bytes", "object in a tuple"],
)
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"cannot save 'bad.*holds tensors and JSON values"):
        plan_save({"bad": {"deep": value}})


def test_a_key_that_is_no_string_is_refused_at_any_depth() -> None:
    """torch's own optimizer.state_dict() has such keys; they would come back as strings."""
    with pytest.raises(CheckpointError, match=r"cannot save optimizer\.state\.1: its key 7 is no"):
        plan_save({"optimizer": {"state": [{}, {7: {"step": 1}}]}})


def test_a_value_too_large_for_the_metadata_is_refused() -> None:
    with pytest.raises(CheckpointError, match="its JSON is 70002 bytes, more than 65536"):
        plan_save({"long": "x" * 70_000})


def test_a_tensor_that_is_not_raw_bytes_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"its layout is torch\.sparse_coo"):
        plan_save({"sparse": torch.eye(2).to_sparse()})
    with pytest.raises(CheckpointError, match=r"of torch\.float8_e4m3fnuz; supported are"):
        plan_save({"odd": torch.zeros(2).to(torch.float8_e4m3fnuz)})


_json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=_json_values)
def test_every_json_value_survives_the_metadata_to_the_bit(value: object) -> None:
    layout = Layout(values={"v": ValueLayout(text=value_text("v", value), path=("v", 0))})
    read = decode(Layout, compact(layout))
    assert read == layout
    back = json.loads(read.values["v"].text)
    assert repr(back) == repr(value)


def test_a_done_record_is_also_the_record_that_others_know() -> None:
    part = RankPart(
        facts=make_facts(1),
        rank=0,
        files=(FileRecord(key="k", size_bytes=1, crc64nvme="c"),),
        layout=Layout(tensors={"w": tensor()[0]}),
    )
    assert decode(RankPart, compact(part)) == part
    known = decode(RankDone, compact(part))
    assert (known.facts, known.rank, known.files) == (make_facts(1), 0, part.files)


def test_parts_of_all_ranks_make_the_whole_in_any_order() -> None:
    first, second = (Layout(tensors={"w": part}) for part in tensor())
    for parts in ([first, second], [second, first]):
        chunks = merge(parts).tensors["w"].chunks
        assert {chunk.offsets for chunk in chunks} == {(0, 0), (2, 0)}


def test_a_whole_that_lacks_a_part_is_refused() -> None:
    with pytest.raises(CheckpointError, match="wrote 6 elements of 'w', which has 12"):
        merge([Layout(tensors={"w": tensor()[0]})])


def test_ranks_that_built_different_models_are_refused() -> None:
    parts = [Layout(tensors={"w": tensor()[0]}), Layout(tensors={"w": tensor("bfloat16")[1]})]
    with pytest.raises(CheckpointError, match="ranks disagree on 'w'"):
        merge(parts)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"w": torch.zeros(5, 3)}, r"'w' is float32 \[4, 3\] .* and float32 \[5, 3\] in this job"),
        (
            {"w": torch.zeros(4, 3, dtype=torch.bfloat16)},
            r"'w' is float32 \[4, 3\] in the checkpoint and bfloat16 \[4, 3\]",
        ),
        ({"w": 1}, r"'w' is float32 \[4, 3\] in the checkpoint and no tensor"),
        ({"other": torch.zeros(4, 3)}, "the checkpoint has no 'other'"),
    ],
)
def test_a_state_of_another_form_is_refused(state: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        plan_load(state, Layout(tensors={"w": tensor(split=1)[0]}))


def test_a_dtype_of_a_later_version_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has dtype 'float2', which this version does not"):
        to_metadata(Layout(tensors={"w": tensor("float2", split=1)[0]}))


def test_dtype_names_are_torch_s_own() -> None:
    assert all(getattr(torch, name) is dtype for name, dtype in DTYPES.items())
