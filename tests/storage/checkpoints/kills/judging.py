"""What the store holds after a round, read without torch: whole commits, and bytes of nobody."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.checkpoint_records import Commit
from storage.checkpoints.catalog import State, gather
from storage.checkpoints.commits import readable_commits
from storage.checkpoints.contents import folder_of, read_layout
from storage.checkpoints.layout import StatePath, TensorLayout
from storage.checkpoints.verify import verify
from storage.ledger import Ledger
from tests.storage.checkpoints.kills.training import differences, reference_trace


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Of a run: how many commits there are, and what lies there that belongs to none of them."""

    commits: int
    orphans: int
    orphan_bytes: int


def judge(ledger: Ledger, *, seed: int) -> Holdings:
    """Raises AssertionError where a commit is not whole, or a byte is not accounted for."""
    commits = readable_commits(ledger)
    listed = len(list(ledger.store.list(ledger.keys.commits)))
    assert len(commits) == listed, f"{listed - len(commits)} commits cannot be read"
    for number, commit in enumerate(commits):
        # What is the reference's bit for bit needs no checksum, but checksums must be right, too.
        faults = list(_faults(ledger, commit, checksums=number == seed % len(commits)))
        assert not faults, f"step {commit.step} of attempt {commit.attempt}: {faults}"
    entries = gather(ledger).entries
    stored = {
        info.key: info.size_bytes for info in ledger.store.list(f"{ledger.keys.checkpoints}data/")
    }
    assert sum(one.size_bytes for one in entries) == sum(stored.values()), "bytes that none lists"
    orphans = [one for one in entries if one.commit is None]
    for one in orphans:
        assert one.state is State.ORPHANED, one
        folder = ledger.keys.save(one.ref.attempt, step=one.ref.step, save=one.ref.save)
        assert one.size_bytes == sum(n for key, n in stored.items() if key.startswith(folder)), one
    for one in entries:
        if one.commit is not None:
            folder = folder_of(one.commit)
            records = sum(n for key, n in stored.items() if key.startswith(f"{folder}done."))
            assert one.size_bytes == one.commit.size_bytes + records, one
    assert len(entries) == len(commits) + len(orphans)
    return Holdings(
        commits=len(commits),
        orphans=len(orphans),
        orphan_bytes=sum(one.size_bytes for one in orphans),
    )


def _faults(ledger: Ledger, commit: Commit, *, checksums: bool) -> Iterator[str]:
    """What is damaged, and, where nothing is, what is another step's than the commit says."""
    if checksums and (found := verify(ledger.store, commit, told=lambda _: None).faults):
        yield from map(str, found)
        return
    layout = read_layout(ledger.store, commit)
    files = {file.key.removeprefix(folder_of(commit)): file.key for file in commit.files}
    bodies = {name: ledger.store.get(key) for name, key in files.items()}
    whole = {name: _assemble(tensor, bodies) for name, tensor in layout.tensors.items()}
    yield from differences(whole, step=commit.step)
    values = {value.path: json.loads(value.text) for value in layout.values.values()}
    trace = reference_trace(commit.step)
    known: dict[StatePath, Any] = {("progress", "trace", n): loss for n, loss in enumerate(trace)}
    known |= {("progress", "step"): commit.step, ("progress", "trace"): trace}
    for path, value in values.items():
        if known.get(path) != value:
            yield f"{path} is {value}"


def _assemble(tensor: TensorLayout, bodies: dict[str, bytes]) -> NDArray[Any]:
    whole = np.empty(tensor.shape, dtype=tensor.dtype)
    for chunk in tensor.chunks:
        data = bodies[chunk.file][chunk.start : chunk.start + chunk.size_bytes]
        box = np.frombuffer(data, dtype=tensor.dtype)
        assert box.size == math.prod(chunk.lengths)
        place = tuple(
            slice(offset, offset + length)
            for offset, length in zip(chunk.offsets, chunk.lengths, strict=True)
        )
        whole[place] = box.reshape(chunk.lengths)
    return whole.reshape(-1)
