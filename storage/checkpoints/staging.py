"""The rank's side of a save: a snapshot of its tensors in shared memory, while training goes on.

Parameters and optimizer state change only inside the optimizer's step. So a copy that is begun
after one step may take until the next one is due, beside the forward and backward pass, and what is
left of it by then is all that the loop is held up by.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import get_element
from torch.distributed.tensor import DTensor

from storage.checkpoint_records import SaveFacts
from storage.checkpoints.buffers import BufferFolder, Sealed, Tier, allocate
from storage.checkpoints.layout import StatePath, ValueLayout, value_text
from storage.checkpoints.metadata import JsonSavePlanner
from storage.checkpoints.placing import (
    Place,
    buffer_plan,
    plan_save,
    tensor_places,
    value_paths,
)
from storage.checkpoints.ranks import Ranks
from storage.errors import CheckpointError

LEFTOVER_PATIENCE_S = 10.0
SMALL_BYTES = 64 * 2**10
"""Copied at once, since that takes less time than to find out whether it had to be."""


@dataclass
class _Bound:
    """An item of the plan and the tensor that it is copied from."""

    place: Place
    name: str
    source: torch.Tensor
    memory: int
    at_once: bool


class Stager:
    """One rank's buffers. Snapshots are begun and finished in turn, by one thread."""

    def __init__(self, folder: BufferFolder, *, buffers: int = 2) -> None:
        self.size_bytes = 0
        self._folder = folder
        self._slots = range(buffers)
        self._ranks = Ranks()
        self._bound: list[_Bound] = []
        self._values: dict[str, StatePath] = {}
        self._memory: list[mmap.mmap] = []
        self._views: list[list[torch.Tensor]] = []
        self._copies: SimpleQueue[_Copy | None] = SimpleQueue()
        self._copy: _Copy | None = None
        self._held = ExitStack()

    def prepare(self, state: dict[str, Any], *, volatile: Collection[str] = ()) -> None:
        """Plans once for all saves, makes the buffers, and copies into one of them. Collective.

        The tensors of `state` may change later, but each must stay what and where it is; `volatile`
        names those that the forward pass changes, which are copied when a snapshot is begun.

        Raises:
            CheckpointError: something in `state` cannot be saved, or the memory does not hold it.
        """
        planner, plan = plan_save(state, self._ranks)
        places = tensor_places(plan)
        self._values = value_paths(plan)
        self._bound = [_bind(place, planner, volatile) for place in places]
        described = buffer_plan(places, rank=self._ranks.rank)
        self.size_bytes = described.size_bytes
        self._ranks.from_all(lambda: self._make_buffers(described.size_bytes))
        self._folder.write_plan(described)
        threading.Thread(
            target=_work, args=(self._copies,), name="checkpoint-copy", daemon=True
        ).start()
        # A rehearsal, after which the first snapshot is no slower than the others.
        self._take(state, self._slots[0], seal=lambda: None)
        self.finish()

    @property
    def is_free(self) -> bool:
        """Whether a snapshot could be begun now."""
        return (self._copy is None or self._copy.is_over) and self._free_slot() is not None

    def begin(
        self,
        state: Mapping[str, Any],
        facts: SaveFacts,
        *,
        tiers: tuple[Tier, ...] = (Tier.STORE,),
    ) -> None:
        """Begins the snapshot of a save; the caller goes on, up to the next optimizer step.

        Raises:
            CheckpointError: no buffer is free, or a tensor of `state` is no longer where it was.
        """
        if self._copy is not None:
            self._copy.wait_until_sealed()
        slot = self._free_slot()
        if slot is None:
            raise CheckpointError(
                f"no buffer is free for the snapshot of step {facts.step}: the saves before it are "
                "still on their way to the store; ask is_free first"
            )
        values = {
            name: ValueLayout(text=value_text(name, get_element(state, path)), path=path)  # type: ignore[arg-type]
            for name, path in self._values.items()
        }
        sealed = Sealed(rank=self._ranks.rank, slot=slot, facts=facts, values=values, tiers=tiers)
        self._take(state, slot, seal=lambda: self._folder.seal(sealed))

    def finish(self) -> None:
        """To be called before the tensors change: waits until they are copied.

        Raises:
            CheckpointError: the snapshot could not be completed.
        """
        if self._copy is not None:
            self._copy.wait_until_copied()

    def close(self) -> None:
        """Completes a snapshot that was begun; what is sealed stays for the flusher."""
        self._copies.put(None)
        if self._copy is not None:
            self._copy.wait_until_sealed()
        self._held.close()

    def _take(self, state: Mapping[str, Any], slot: int, seal: Callable[[], None]) -> None:
        self._require_bound(state)
        pairs = list(zip(self._bound, self._views[slot], strict=True))
        for bound, view in pairs:
            if bound.at_once:
                view.copy_(bound.source)
        rest = [(view, bound.source) for bound, view in pairs if not bound.at_once]
        self._copy = _copy_of(rest, seal=seal)
        self._copies.put(self._copy)

    def _make_buffers(self, size_bytes: int) -> None:
        self._held.enter_context(self._folder.held())
        for slot in self._slots:
            memory = self._allocate(self._folder.buffer(self._ranks.rank, slot), size_bytes)
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            if torch.cuda.is_available():
                _pin(whole)
            self._memory.append(memory)
            self._views.append([bound.place.view(whole) for bound in self._bound])

    def _allocate(self, path: Path, size_bytes: int) -> mmap.mmap:
        """Waits a little for the memory of a job before this one, whose end may be under way."""
        until = time.monotonic() + LEFTOVER_PATIENCE_S
        while True:
            try:
                return allocate(path, size_bytes)
            except CheckpointError:
                self._folder.remove_leftovers()
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)

    def _free_slot(self) -> int | None:
        rank = self._ranks.rank
        return next((slot for slot in self._slots if self._folder.is_free(rank, slot)), None)

    def _require_bound(self, state: Mapping[str, Any]) -> None:
        """A tensor that was replaced would be saved as it was when the job began."""
        for bound in self._bound:
            tensor = get_element(state, bound.place.path)  # type: ignore[arg-type]
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if not isinstance(local, torch.Tensor) or local.data_ptr() != bound.memory:
                raise CheckpointError(
                    f"{bound.name!r} is another tensor than when the job began; change tensors in "
                    "place, or prepare the saves again"
                )


def _bind(place: Place, planner: JsonSavePlanner, volatile: Collection[str]) -> _Bound:
    name = place.item.index.fqn
    source = planner.resolve_data(place.item)
    assert isinstance(source, torch.Tensor)
    at_once = place.size_bytes <= SMALL_BYTES or name in volatile
    return _Bound(
        place=place, name=name, source=source.detach(), memory=source.data_ptr(), at_once=at_once
    )


Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class _Copy:
    """Copies, then seals. An error is raised where the copy is waited for."""

    def __init__(self, pairs: Pairs, seal: Callable[[], None]) -> None:
        self._pairs = pairs
        self._seal = seal
        self._copied = threading.Event()
        self._sealed = threading.Event()
        self._error: Exception | None = None

    def carry_out(self) -> None:
        try:
            self.copy()
            self._copied.set()
            self._seal()
        except Exception as error:
            self._error = error
        finally:
            self._copied.set()
            self._sealed.set()

    def copy(self) -> None:
        for target, source in self._pairs:
            target.copy_(source)

    @property
    def is_over(self) -> bool:
        """Whether it is sealed, or has failed."""
        return self._sealed.is_set()

    def wait_until_copied(self) -> None:
        self._copied.wait()
        self._raise()

    def wait_until_sealed(self) -> None:
        self._sealed.wait()
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"the snapshot could not be completed: {error}") from error


class _DeviceCopy(_Copy):
    """The same from an accelerator: copies queue beside the compute stream, which then waits."""

    def __init__(self, pairs: Pairs, seal: Callable[[], None]) -> None:
        super().__init__(pairs, seal)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._done = stream.record_event()

    def copy(self) -> None:
        self._done.synchronize()

    def wait_until_copied(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)
        self._raise()


def _work(copies: SimpleQueue[_Copy | None]) -> None:
    """What a thread does that starts once: to start one for each copy would hold up the loop."""
    while (copy := copies.get()) is not None:
        copy.carry_out()


def _copy_of(pairs: Pairs, seal: Callable[[], None]) -> _Copy:
    is_on_device = any(source.is_cuda for _, source in pairs)
    return _DeviceCopy(pairs, seal) if is_on_device else _Copy(pairs, seal)


def _pin(buffer: torch.Tensor) -> None:
    """Lets the device write to it directly.

    Raises:
        CheckpointError: the driver refused.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    if int(code) != 0:
        raise CheckpointError(f"cudaHostRegister of a checkpoint buffer failed with {code}")
