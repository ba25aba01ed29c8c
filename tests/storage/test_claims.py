"""Claims beside a store that overwrites: one winner, whoever is killed wherever."""

from __future__ import annotations

import errno
import multiprocessing
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage import claims as claims_module
from storage.claims import Claims
from storage.errors import StoreError
from storage.object_store import ObjectStore
from storage.probe import probe
from storage.spec import StoreSpec
from tests.storage.meddler import Meddler

WRITERS = 8
KEY = "demo/attempts/train/0001.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "claims"
    made.mkdir()
    return made


@pytest.fixture
def lying(meddler: Meddler, folder: Path) -> Iterator[ObjectStore]:
    """A store that answers 200 to every condition and overwrites, with claims beside it."""
    meddler.rule = lambda asked, forward: forward(asked.without("if-none-match", "if-match"))
    spec = StoreSpec(
        bucket=f"test-{secrets.token_hex(6)}", endpoint_url=meddler.endpoint_url, claims=folder
    )
    store = ObjectStore(spec)
    store.ensure_bucket()
    yield store
    store.close()


def writer(spec: StoreSpec, number: int, start: Any, answers: Any) -> None:
    """One of the racers: a process with a client of its own."""
    store = ObjectStore(spec)
    start.wait()
    for turn in range(5):
        body = f"writer {number}".encode()
        created = store.create(f"{KEY}-{turn}", body)
        answers.put((turn, created.won, created.body, store.get(f"{KEY}-{turn}")))


def killed_before_the_put(spec: StoreSpec, body: bytes) -> None:
    store = ObjectStore(spec)
    store.put = lambda *_: os._exit(9)  # type: ignore[method-assign]
    store.create(KEY, body)


def test_of_eight_racing_processes_one_wins_and_all_see_its_body(lying: ObjectStore) -> None:
    fork = multiprocessing.get_context("fork")
    start, answers = fork.Barrier(WRITERS), fork.Queue()
    processes = [
        fork.Process(target=writer, args=(lying.spec, number, start, answers))
        for number in range(WRITERS)
    ]
    for process in processes:
        process.start()
    found = [answers.get(timeout=120) for _ in range(5 * WRITERS)]
    for process in processes:
        process.join()
    for turn in range(5):
        of_turn = [(won, body, stored) for number, won, body, stored in found if number == turn]
        assert sum(won for won, _, _ in of_turn) == 1
        assert {each for _, body, stored in of_turn for each in (body, stored)} == {
            lying.get(f"{KEY}-{turn}")
        }


def test_a_claim_whose_claimant_died_before_its_put_is_finished_by_the_next(
    lying: ObjectStore,
) -> None:
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=killed_before_the_put, args=(lying.spec, b"first"))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert lying.get_if_exists(KEY) is None
    created = lying.create(KEY, b"second")
    assert (created.won, created.body) == (False, b"first")
    assert lying.get(KEY) == b"first"
    assert lying.create(KEY, b"first").won, "its writer, asking again, has won"


def test_what_was_stored_without_a_claim_is_not_overwritten(lying: ObjectStore) -> None:
    lying.put(KEY, b"older")
    assert lying.create(KEY, b"new") == lying.create(KEY, b"newer")
    assert lying.get(KEY) == b"older"


def test_a_key_that_was_deleted_can_be_claimed_anew(lying: ObjectStore) -> None:
    assert lying.create(KEY, b"first").won
    assert lying.delete([KEY, "another/key"]) == ()
    assert lying.create(KEY, b"second").won
    assert lying.get(KEY) == b"second"


def test_the_probe_of_such_a_store_is_not_deceived_by_the_claims(lying: ObjectStore) -> None:
    assert not probe(lying, prefix="probe").conditional_writes


def test_a_draft_that_was_left_behind_is_no_claim(folder: Path) -> None:
    claims = Claims(folder, bucket="b")
    claims.take("a/b.json", b"x")
    draft = folder / "b" / "a" / ".0123.draft"
    draft.mkdir()
    (draft / "body").write_bytes(b"half")
    assert claims.take("a/c.json", b"y") == b"y"
    assert claims.holder("a/b.json") == b"x"
    assert claims.holder("a/d.json") is None


@pytest.mark.parametrize("landed", [True, False])
def test_a_rename_whose_answer_was_lost_is_settled_by_what_stands(
    folder: Path, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    """NFS sends it again, and then the draft is gone."""
    claims, rename = Claims(folder, bucket="b"), Path.rename
    monkeypatch.setattr(claims_module, "PATIENCE_S", 0.1)

    def sent_twice(self: Path, target: Path) -> Path:
        if landed:
            rename(self, target)
        raise FileNotFoundError(errno.ENOENT, "gone")

    monkeypatch.setattr(Path, "rename", sent_twice)
    if landed:
        assert claims.take("a", b"mine") == b"mine"
    else:
        with pytest.raises(StoreError, match="cannot claim 'a'"):
            claims.take("a", b"mine")


def test_a_folder_that_is_not_there_is_an_error_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="must lie on a file system that this host and all nodes"):
        Claims(tmp_path / "none", bucket="b")
    assert not (tmp_path / "none").exists()
