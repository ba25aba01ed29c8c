"""Whatever happens to the objects of a checkpoint, it is never loaded as something else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from awscrt.checksums import crc64nvme
from hypothesis import example, given, settings
from hypothesis import strategies as st

from storage.checkpoint_records import Commit
from storage.checkpoints import save as saving
from storage.checkpoints.layout import crc_text
from storage.checkpoints.load import load_newest
from storage.checkpoints.sealing import decode_sealed, encode_sealed
from storage.checkpoints.writer import ObjectStoreWriter
from storage.errors import CheckpointError
from storage.job import JobContext, JobDescription
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from tests.ranks import ALONE
from tests.storage.checkpoints import work
from tests.storage.checkpoints.held import HeldStore

OLDER, NEWER = 10, 20


def make_state(seed: float) -> dict[str, Any]:
    """Several files, two of one size, one tensor of two blocks, padding behind most of them."""
    return {
        "one": torch.arange(100, dtype=torch.float32) * seed,
        "two": torch.arange(100, 200, dtype=torch.float32) * seed,
        "long": torch.arange(9001, dtype=torch.float32) * seed,
        "odd": (torch.arange(33) * seed).to(torch.bfloat16),
        "flags": torch.tensor([True, False, seed > 15]),
        "count": torch.tensor(int(seed)),
        "none": torch.zeros(0, 4),
        "box": torch.zeros(6, 6)[:, 1:4].copy_(torch.arange(18).reshape(6, 3) * seed),
        "scheduler": {"kind": "cosine", "at": [1, 2.5, seed], "betas": (0.9, seed)},
    }


def make_tiny(seed: float) -> dict[str, Any]:
    return {
        "one": torch.arange(5, dtype=torch.float32) * seed,
        "count": torch.tensor(int(seed)),
        "at": [seed],
    }


@dataclass(frozen=True, kw_only=True)
class StoreJob(JobDescription):
    """A job whose ledger is on a store that is there already."""

    opened: ObjectStore

    def open_ledger(self) -> Ledger:
        return Ledger(self.opened, self.keys)


@dataclass(frozen=True)
class Run:
    """A run with two commits, and all that is in its bucket; `objects` are the newer one's."""

    store: ObjectStore
    make: Callable[[float], dict[str, Any]]
    newer: Commit
    objects: dict[str, bytes]
    everything: dict[str, bytes]

    @classmethod
    def of(cls, store: ObjectStore, make: Callable[[float], dict[str, Any]]) -> Run:
        ledger = work_ledger(store)
        intent = work.make_intent(1)
        assert ledger.claim_intent(intent).won
        context = context_of(store, 1)
        load_newest(context, make(-1.0), model_hash="model", dataset_id="data")
        commits = [
            work.save_state(context, make(float(step)), step=step) for step in (OLDER, NEWER)
        ]
        newer = commits[1]
        keys = [file.key for file in (newer.metadata, *newer.files)]
        keys.append(ledger.keys.commit(1, step=NEWER))
        assert ledger.claim_intent(work.make_intent(2, floor=newer.ref)).won
        everything = {info.key: store.get(info.key) for info in store.list("")}
        return cls(store, make, newer, {key: everything[key] for key in keys}, everything)

    @contextmanager
    def changed(self, bodies: dict[str, bytes | None]) -> Iterator[None]:
        """Objects have other bytes, or are gone, and all is as it was afterwards."""
        for key, body in bodies.items():
            if body is None:
                self.store.delete([key])
            else:
                self.store.put(key, body)
        try:
            yield
        finally:
            there = [info.key for info in self.store.list("")]
            self.store.delete(key for key in there if key not in self.everything)
            for key in bodies:
                self.store.put(key, self.everything[key])

    def loaded(self) -> int:
        """The step that a new attempt resumes from; what it holds then is what was saved there."""
        state = self.make(-1.0)
        commit = load_newest(
            context_of(self.store, 2, floor=self.newer),
            state,
            model_hash="model",
            dataset_id="data",
        )
        assert commit is not None
        expected = self.make(float(commit.step))
        for name, value in expected.items():
            same = torch.equal(state[name], value) if torch.is_tensor(value) else None
            assert state[name] == value if same is None else same, name
        return commit.step


def work_ledger(store: ObjectStore) -> Ledger:
    return Ledger(store, StoreJob(**job_fields(1), opened=store).keys)


def context_of(store: ObjectStore, attempt: int, *, floor: Commit | None = None) -> JobContext:
    return JobContext(StoreJob(**job_fields(attempt, floor=floor), opened=store), ALONE)


def job_fields(attempt: int, *, floor: Commit | None = None) -> dict[str, Any]:
    nowhere = Path("/nowhere")
    return {
        "intent": work.make_intent(attempt, floor=None if floor is None else floor.ref),
        "store": HeldStore({}).spec,
        "entry": "trainer.main",
        "folder": nowhere,
        "code": nowhere,
        "python": nowhere,
    }


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor of some size lies in a file of its own."""
    monkeypatch.setattr(saving, "ObjectStoreWriter", partial(ObjectStoreWriter, object_bytes=448))


@pytest.fixture
def run(small_files: None) -> Run:
    return Run.of(HeldStore({}), make_state)


@pytest.fixture
def served(small_files: None, store: ObjectStore) -> Run:
    """On a real server."""
    return Run.of(store, make_state)


def flipped(body: bytes, at: int, mask: int) -> bytes:
    return body[:at] + bytes([body[at] ^ mask]) + body[at + 1 :]


def test_a_flip_of_any_byte_of_any_object_is_stepped_back_from() -> None:
    """Each byte of data, padding, metadata and commit, one after the other."""
    run = Run.of(HeldStore({}), make_tiny)
    with run.changed({}):
        assert run.loaded() == NEWER
    undetected = []
    for key, body in run.objects.items():
        for at in range(len(body)):
            with run.changed({key: flipped(body, at, 1 << at % 8)}):
                if run.loaded() != OLDER:
                    undetected.append((key, at))
    assert undetected == []


@pytest.mark.s3
def test_a_flip_is_stepped_back_from_wherever_it_is(served: Run) -> None:
    run = served

    @settings(max_examples=30)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(run.objects)))
        body = run.objects[key]
        at = data.draw(st.integers(0, len(body) - 1))
        with run.changed({key: flipped(body, at, data.draw(st.integers(1, 255)))}):
            assert run.loaded() == OLDER

    check()


@pytest.mark.s3
def test_what_is_cut_or_lengthened_or_gone_or_overwritten_is_stepped_back_from(
    served: Run,
) -> None:
    run = served

    @settings(max_examples=30)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(run.objects)))
        body = run.objects[key]
        cut = st.integers(0, len(body) - 1).map(lambda length: body[:length])
        longer = st.binary(min_size=1, max_size=100).map(lambda more: body + more)
        other = st.binary(max_size=100)
        zeros = st.just(bytes(len(body)))
        # A commit that is gone is no damage: that somebody deleted it is an error of its own.
        gone = st.nothing() if "/commits/" in key else st.none()
        damaged = data.draw(gone | cut | longer | other | zeros)
        with run.changed({key: damaged}):
            assert run.loaded() == OLDER

    check()


def test_two_objects_that_changed_places_are_stepped_back_from(run: Run) -> None:
    """Of one checkpoint, and of two; of one size, too."""
    commits = [
        decode_sealed(Commit, run.store.get(info.key))
        for info in run.store.list(work_ledger(run.store).keys.commits)
    ]
    older = next(commit for commit in commits if commit.step == OLDER)
    files = [file.key for file in older.files]
    sizes = [len(body) for body in run.objects.values()]
    assert len(set(sizes)) < len(sizes)
    keys = [*run.objects, *files, older.metadata.key]
    bodies = {key: run.store.get(key) for key in keys}
    for at, one in enumerate(run.objects):
        for other in keys[at + 1 :]:
            if bodies[one] == bodies[other]:
                continue
            with run.changed({one: bodies[other], other: bodies[one]}):
                if other in run.objects:
                    assert run.loaded() == OLDER
                else:
                    # Both checkpoints are damaged.
                    with pytest.raises(CheckpointError, match="none of them can be loaded"):
                        run.loaded()


def test_an_older_save_s_objects_in_the_newer_one_s_place_are_stepped_back_from(run: Run) -> None:
    """Whole, sealed, of the right form, and not the ones that were committed here."""
    older = {
        info.key.replace(f"{OLDER:012d}", f"{NEWER:012d}"): run.store.get(info.key)
        for info in run.store.list("")
        if f"{OLDER:012d}" in info.key
    }
    save = run.newer.save
    for key, body in older.items():
        target = next(
            (each for each in run.objects if each.rpartition("/")[2] == key.rpartition("/")[2]),
            None,
        )
        if target is not None and run.objects[target] != body:
            assert save in target or "/commits/" in target
            with run.changed({target: body}):
                assert run.loaded() == OLDER


_JUNK = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([2**31, 2**63, -(2**63), 10**30, 1e300])
    | st.sampled_from(["", "x", "float32", "int32", "data.0.0.bin", "../data.0.0.bin", "AAAA"])
    | st.lists(st.integers(-3, 300), max_size=3)
    | st.just({})
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every entry of a JSON tree."""
    entries = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    found = [] if not path else [path]
    for key, entry in entries:
        found += places(entry, (*path, key))
    return found


def with_entry(tree: Any, path: tuple[Any, ...], junk: Any, *, gone: bool) -> Any:
    copy = json.loads(json.dumps(tree))
    holder = copy
    for key in path[:-1]:
        holder = holder[key]
    if gone:
        del holder[path[-1]]
    else:
        holder[path[-1]] = junk
    return copy


def resealed(run: Run, metadata: bytes) -> dict[str, bytes | None]:
    """Metadata that its commit vouches for."""
    record = replace(
        run.newer.metadata, size_bytes=len(metadata), crc64nvme=crc_text(crc64nvme(metadata))
    )
    commit = replace(run.newer, metadata=record)
    keys = work_ledger(run.store).keys
    return {record.key: metadata, keys.commit(1, step=NEWER): encode_sealed(commit)}


def test_metadata_that_is_nonsense_is_never_loaded_and_never_another_error() -> None:
    """Its checksum fits; yet whatever it says, what is loaded is right, or it is an error."""
    run = Run.of(HeldStore({}), make_state)
    whole = json.loads(run.objects[run.newer.metadata.key])
    # What is said of values that are no tensors cannot be told from what was meant.
    told = [path for path in places(whole) if path[0] != "values" or len(path) < 3]
    outcomes = set()

    @settings(max_examples=400)
    @given(path=st.sampled_from(told), junk=_JUNK, gone=st.booleans())
    @example(path=("tensors", "none", "shape"), junk=[0, 10**30], gone=False)
    @example(path=("tensors", "long", "chunks", 0, "start"), junk=1, gone=False)
    @example(path=("tensors", "count", "chunks", 0, "blocks"), junk="data.0.0.bin", gone=False)
    def check(path: tuple[Any, ...], junk: Any, gone: bool) -> None:
        body = json.dumps(with_entry(whole, path, junk, gone=gone)).encode()
        with run.changed(resealed(run, body)):
            try:
                outcomes.add(run.loaded())
            except CheckpointError:
                outcomes.add("error")

    check()
    assert outcomes == {OLDER, NEWER, "error"}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"version": 1}', b"\xff\xfe", b"7"])
def test_metadata_that_is_no_layout_is_stepped_back_from(body: bytes) -> None:
    run = Run.of(HeldStore({}), make_tiny)
    with run.changed(resealed(run, body)):
        if body == b'{"version": 1}':
            with pytest.raises(CheckpointError, match="the checkpoint has no"):
                run.loaded()
        else:
            assert run.loaded() == OLDER


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("offsets", {"offsets": [1]}, "is no part of its shape"),
        ("lengths", {"lengths": [99], "size_bytes": 396}, "chunks hold 99 elements of 100"),
        ("size", {"size_bytes": 404}, "cannot have 404 bytes"),
        ("start", {"start": 64}, "goes beyond the 448 bytes"),
        ("file", {"file": "data.7.0.bin"}, "which the commit does not name"),
    ],
)
def test_a_chunk_that_cannot_be_is_told_with_what_is_wrong_of_it(
    name: str, change: dict[str, Any], said: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.loads(run.objects[run.newer.metadata.key])
    whole["tensors"]["one"]["chunks"][0] |= change
    with run.changed(resealed(run, json.dumps(whole).encode())):
        assert run.loaded() == OLDER
    assert said in capsys.readouterr().out


def test_another_model_s_checkpoint_is_an_error_and_no_step_back(run: Run) -> None:
    keys = work_ledger(run.store).keys
    foreign = encode_sealed(replace(run.newer, model_hash="another"))
    with (
        run.changed({keys.commit(1, step=NEWER): foreign}),
        pytest.raises(CheckpointError, match="saved with model 'another'"),
    ):
        run.loaded()


def test_a_commit_that_is_gone_is_an_error_where_it_was_known(run: Run) -> None:
    with (
        run.changed({work_ledger(run.store).keys.commit(1, step=NEWER): None}),
        pytest.raises(CheckpointError, match="is gone, and nothing newer counts"),
    ):
        run.loaded()


def test_a_run_whose_only_checkpoints_are_damaged_is_an_error(run: Run) -> None:
    damaged = {
        info.key: flipped(run.store.get(info.key), 3, 1)
        for info in run.store.list(work_ledger(run.store).keys.checkpoints)
        if info.key.endswith(".bin")
    }
    with run.changed(damaged), pytest.raises(CheckpointError, match="none of them can be loaded"):
        run.loaded()
