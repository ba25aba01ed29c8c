"""Between our layout and what torch's distributed checkpoint calls Metadata.

torch plans who reads what; it wants its own types for that, which it would pickle.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import get_element, set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType
from typing_extensions import override

from storage.checkpoints.layout import Layout, value_text
from storage.errors import CheckpointError

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The name under which a dtype is stored.

    Raises:
        CheckpointError: its elements cannot be stored as raw bytes.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise CheckpointError(
            f"cannot save tensor {name!r} of {dtype}; supported are {', '.join(DTYPES)}"
        ) from None


def to_metadata(layout: Layout) -> Metadata:
    """What torch's planners need; the chunks and values themselves travel as `storage_data`."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, Any] = {}
    paths = {}
    for name, tensor in layout.tensors.items():
        described[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=_dtype(name, tensor.dtype)),
            size=torch.Size(tensor.shape),
            chunks=[
                ChunkStorageMetadata(
                    offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.lengths)
                )
                for chunk in tensor.chunks
            ],
        )
        paths[name] = tensor.path
        for chunk in tensor.chunks:
            stored[MetadataIndex(name, chunk.offsets)] = chunk
    for name, value in layout.values.items():
        described[name] = BytesStorageMetadata()
        paths[name] = value.path
        stored[MetadataIndex(name)] = value
    return Metadata(described, planner_data=paths, storage_data=stored)


class JsonSavePlanner(DefaultSavePlanner):
    """torch's planner, with JSON in the place of pickle for what is no tensor.

    What several ranks hold alike is written by the lowest of them, so that the many scalars of an
    optimizer lie side by side and are read back in one request.
    """

    def __init__(self) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)

    @override
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        _require_names(state_dict, path="")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    @override
    def create_local_plan(self) -> SavePlan:
        """Checks everything first, so that what cannot be saved fails before a byte is written."""
        plan = super().create_local_plan()
        for item in plan.items:
            name = item.index.fqn
            if item.tensor_data is None:
                value_text(name, self.lookup_object(item.index))
                continue
            dtype_name(name, item.tensor_data.properties.dtype)
            if item.tensor_data.properties.layout != torch.strided:
                raise CheckpointError(
                    f"cannot save tensor {name!r}: its layout is "
                    f"{item.tensor_data.properties.layout}; call .to_dense() on it"
                )
        return plan

    @override
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(value_text(write_item.index.fqn, object).encode())
        return object


class JsonLoadPlanner(DefaultLoadPlanner):
    """torch's planner, strict about shapes and dtypes, and with JSON in the place of pickle."""

    @override
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is not None:
            _require_fit(self.state_dict, metadata)

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        loaded = json.loads(value.getvalue())
        if isinstance(loaded, list) and isinstance(
            get_element(self.original_state_dict, path), tuple
        ):
            loaded = tuple(loaded)
        set_element(self.original_state_dict, path, loaded)


def _require_names(state: object, *, path: str) -> None:
    """torch would turn the key 1 into "1", and never find its way back."""
    if isinstance(state, Mapping):
        for key, entry in state.items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"cannot save {path or 'the state'}: its key {key!r} is no string; name every "
                    "entry, as torch.distributed.checkpoint.state_dict does"
                )
            _require_names(entry, path=f"{path}.{key}" if path else key)
    elif isinstance(state, list):
        for number, entry in enumerate(state):
            _require_names(entry, path=f"{path}.{number}")


def _require_fit(state: Mapping[str, Any], metadata: Metadata) -> None:
    """Every entry of the state is in the checkpoint, as what it is here.

    torch would convert another dtype silently.
    """
    for name, wanted in state.items():
        held = metadata.state_dict_metadata.get(name)
        if held is None:
            raise CheckpointError(
                f"the checkpoint has no {name!r}, which this model or optimizer needs; "
                "it was saved by another one: set the spec back, or start a run under a new name"
            )
        here, there = _kind(wanted), _kind(held)
        if here != there:
            raise CheckpointError(
                f"{name!r} is {there} in the checkpoint and {here} in this job; "
                "set the spec back, or start a run under a new name"
            )


def _kind(entry: Any) -> str:
    if isinstance(entry, TensorStorageMetadata):
        return f"{_NAMES[entry.properties.dtype]} {list(entry.size)}"
    if isinstance(entry, torch.Tensor):
        return f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}"
    return "no tensor"


def _dtype(name: str, text: str) -> torch.dtype:
    try:
        return DTYPES[text]
    except KeyError:
        raise CheckpointError(
            f"tensor {name!r} of the checkpoint has dtype {text!r}, which this version does not "
            "know; load it with the version that wrote it"
        ) from None
