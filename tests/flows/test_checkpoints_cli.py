"""`headrace checkpoints`: every stored byte is listed, damage is found, a pin holds."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import torch
from typer.testing import CliRunner

from flows.cli.app import app
from storage.checkpoint_records import Commit, CommitRef, FileRecord, SweepJournal
from storage.checkpoints.commits import (
    UnreadableCommit,
    look_at_commit,
    newest_commit,
    read_pins,
)
from storage.checkpoints.pins import pin
from storage.checkpoints.quarantine import condemn, doubt, quarantined
from storage.errors import CheckpointError, HeadraceError, SpecError
from storage.records import Action, Kind, encode
from storage.retention.sweep import sweep
from storage.spec import KeepSpec, RetentionSpec
from tests.flows.checkpoint_runs import Run, Site, a_site

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with a_site(tmp_path_factory.mktemp("checkpoints")) as site:
        yield site


@pytest.fixture
def run(site: Site) -> Run:
    return site.run()


def listed(run: Run, *words: str) -> dict[str, dict[str, object]]:
    """What `ls --json` says, by step and attempt."""
    told = json.loads(run.told("ls", "--json", *words))
    return {f"{one['step']}.{one['attempt']}": one for one in told}


def flip(run: Run, file: FileRecord, at: int) -> None:
    body = bytearray(run.ledger.store.get(file.key))
    body[at] ^= 1
    run.ledger.store.put(file.key, bytes(body))


def spoil(run: Run, commit: Commit) -> str:
    """What is wrong with this commit, now that it is damaged."""
    run.ledger.store.put(run.ledger.keys.commit(commit.attempt, step=commit.step), b"{}")
    found = look_at_commit(run.ledger, attempt=commit.attempt, step=commit.step)
    assert isinstance(found, UnreadableCommit)
    return found.fault


def journal(run: Run, *refs: CommitRef) -> None:
    record = SweepJournal(sweep="s", refs=refs, at=datetime.now(UTC))
    run.ledger.store.put(run.ledger.keys.sweep("s"), encode(record))


def test_each_save_is_listed_with_what_it_is_worth_and_every_stored_byte(run: Run) -> None:
    first = run.attempt(1)
    kept, base, late = (run.save(first, step) for step in (100, 200, 300))
    run.end(first)
    second = run.attempt(2, source=base.ref)
    newest = run.save(second, 250)
    keys = run.ledger.keys
    for attempt, step in ((1, 400), (2, 300)):
        run.ledger.store.put(f"{keys.save(attempt, step=step, save='x')}data.0.0.bin", b"x" * 700)
    gone = CommitRef(step=50, attempt=1, save="old")
    journal(run, kept.ref, gone)
    run.ledger.store.put(keys.commit(2, step=240), b"no commit")
    found = listed(run, "--all")
    assert {name: one["state"] for name, one in found.items()} == {
        "400.1": "orphaned",
        "300.2": "being written",
        "300.1": "off the lineage",
        "250.2": "counts",
        "240.2": "damaged commit",
        "200.1": "counts",
        "100.1": "swept",
        "50.1": "gone",
    }
    assert found["250.2"]["newest"]
    assert newest_commit(run.ledger) == newest.ref
    assert found["200.1"]["notes"] == ["attempt 2 resumed from it"]
    assert found["300.1"]["notes"] == ["attempt 2 went on from step 200"]
    assert found["400.1"]["size_bytes"] == 700
    stored = run.ledger.store.list(f"{keys.checkpoints}data/")
    assert sum(one["size_bytes"] for one in found.values()) == sum(one.size_bytes for one in stored)
    assert "50.1" not in listed(run)
    assert late.ref.save in run.told("show", "300.1")


def test_what_an_ordered_step_back_leaves_out_is_not_called_newest(run: Run) -> None:
    first = run.attempt(1)
    run.save(first, 100)
    run.save(first, 200)
    run.end(first, Kind.NUMERIC, Action.STEP_BACK)
    found = listed(run)
    assert found["200.1"]["state"] == "stepped back from"
    assert found["200.1"]["notes"] == ["the next attempt loads nothing beyond step 100"]
    assert found["100.1"]["newest"]


def test_a_table_fits_80_columns_and_shows_states_in_words(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    intent = run.attempt(1)
    run.save(intent, 12_345_678)
    run.ledger.store.put(f"{run.ledger.keys.save(1, step=13, save='x')}data.0.0.bin", b"x" * 700)
    run.told("pin", "12345678", "--why", "a long reason, for which there is no room in a row")
    table = run.told("ls")
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "12345678.1" in table
    assert "newest; pinned:" in table
    assert "being written 1 (700 B)" in table
    assert run.told("ls", "--all") == table


def test_why_one_is_not_to_be_loaded_stands_whole_below_the_table(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    intent = run.attempt(1)
    doubted, damaged = run.save(intent, 100), run.save(intent, 200)
    condemn(run.ledger, doubted.ref, host="n7", fault=f"{doubted.files[0].key!r}: is gone")
    spoil(run, damaged)
    *table, first, second, _, _ = run.told("ls").splitlines()
    assert [line.split()[0] for line in table] == ["step.try", "200.1", "100.1"]
    assert first.startswith("200.1: the commit at ")
    assert second == f"100.1: a verify on n7 found: {doubted.files[0].key!r}: is gone"


def test_a_verify_against_what_no_job_loads_anyway_is_told_as_one(run: Run) -> None:
    first = run.attempt(1)
    base, late = run.save(first, 100), run.save(first, 200)
    run.end(first)
    run.attempt(2, source=base.ref)
    condemn(run.ledger, late.ref, host="n7", fault="x")
    assert "a verify on n7 found damage" in listed(run)["200.1"]["notes"]


def test_ls_says_of_data_without_a_commit_what_a_sweep_does(run: Run) -> None:
    intent = run.attempt(1)
    commit = run.save(intent, 100)
    for step in (200, 300):
        run.save(intent, step)
    run.end(intent)
    spoil(run, commit)
    told = run.told("ls")
    assert "keeps the data of a damaged commit" in told
    assert "are swept" not in told
    run.ledger.store.put(f"{run.ledger.keys.save(1, step=50, save='x')}data.0.0.bin", b"x")
    assert "are swept by the prune stage" in run.told("ls")
    sweep(run.ledger, RetentionSpec(keep=KeepSpec(last=2), grace_s=0), sweep_id="one")
    assert set(listed(run)) == {"100.1", "200.1", "300.1"}
    assert "are swept" not in run.told("ls")


def test_a_run_without_checkpoints_says_so(run: Run) -> None:
    assert run.told("ls") == f"Run {run.name} has no checkpoint yet.\n"
    assert "nothing to check" in run.told("verify")


def test_show_tells_who_loaded_it_and_every_file(run: Run) -> None:
    first = run.attempt(1)
    commit = run.save(first, 100)
    run.end(first)
    second = run.attempt(2, source=commit.ref)
    run.end(second)
    doubt(run.ledger, commit.ref, host="n7", attempt=2, fault="bad bytes")
    told = run.told("show", "100")
    for word in ("dp_shard 1", "800 samples", "attempt 2: hardware", "n7, attempt 2: bad bytes"):
        assert word in told
    files = json.loads(run.told("show", "100.1", "--json"))["files"]
    assert [one["crc64nvme"] for one in files] == [
        commit.metadata.crc64nvme,
        *(file.crc64nvme for file in commit.files),
    ]


def test_damage_is_named_and_jobs_pass_it_over_until_a_verify_finds_it_whole(run: Run) -> None:
    intent = run.attempt(1)
    old, new = run.save(intent, 100), run.save(intent, 200)
    assert run.told("verify").count("whole ") == 2
    flip(run, new.files[0], at=3)
    with pytest.raises(CheckpointError, match="1 of 2 are damaged"):
        run.ask("verify")
    fault = quarantined(run.ledger)[new.ref]
    assert "data.0.0.bin" in fault
    assert "tensor 'model.0.weight'" in fault
    assert listed(run)["200.1"]["state"] == "quarantined"
    assert listed(run)["100.1"]["newest"]
    flip(run, new.files[0], at=3)
    assert "out of quarantine" in run.told("verify", "200")
    assert quarantined(run.ledger) == {}
    assert listed(run)["200.1"]["newest"]
    assert old.ref not in quarantined(run.ledger)


def test_the_listing_tells_of_data_that_are_not_there(run: Run) -> None:
    intent = run.attempt(1)
    whole, cut, lost = (run.save(intent, step) for step in (100, 200, 300))
    store = run.ledger.store
    store.put(cut.files[0].key, store.get(cut.files[0].key)[:-1])
    store.delete([lost.files[0].key, lost.metadata.key])
    begin = store.now()
    # One that may be younger than the listing of its data is not judged by that.
    while store.now() <= begin:
        time.sleep(0.1)
    notes = {name: entry["notes"] for name, entry in listed(run).items()}
    count = len(whole.files) + 1
    assert notes["100.1"] == []
    assert notes["200.1"] == [f"1 of {count} objects gone or cut: verify it"]
    assert notes["300.1"] == [f"2 of {count} objects gone or cut: verify it"]


def test_a_damaged_commit_fails_a_verify_and_its_fault_is_told(run: Run) -> None:
    intent = run.attempt(1)
    run.save(intent, 100)
    fault = spoil(run, run.save(intent, 200))
    assert fault.startswith(f"the commit at {run.ledger.keys.commit(1, step=200)!r} is damaged: ")
    for words, match in (((), "1 of 2 are damaged; jobs pass"), (("200",), "1 of 1 are damaged")):
        told, error = run.failed("verify", *words)
        assert isinstance(error, CheckpointError)
        assert match in str(error)
        assert f"DAMAGED  200.1: {fault}\n" in told
    with pytest.raises(SpecError, match=re.escape(f"; 200.1 cannot be read: {fault}; the nearest")):
        run.ask("show", "200")


def test_a_verify_that_leaves_nothing_whole_says_what_follows(run: Run) -> None:
    intent = run.attempt(1)
    for step in (100, 200):
        flip(run, run.save(intent, step).files[0], at=3)
    spoil(run, run.save(intent, 300))
    with pytest.raises(CheckpointError, match="1 of 1 are damaged; jobs pass them over"):
        run.ask("verify", "200")
    with pytest.raises(CheckpointError, match=r"3 of 3 are damaged; no whole one .* than begin"):
        run.ask("verify")


def test_of_many_faults_a_verify_tells_a_few_and_how_many_more(run: Run) -> None:
    names = [f"model.{number}.weight" for number in range(15)]
    state = {name: torch.full((4,), float(at)) for at, name in enumerate(names)}
    commit = run.save(run.attempt(1), 100, state)
    store = run.ledger.store
    for file in commit.files:
        store.put(file.key, bytes(byte ^ 1 for byte in store.get(file.key)))
    told, _ = run.failed("verify")
    lines = [line for line in told.splitlines() if line.startswith("  ")]
    assert len(lines) == 11
    assert lines[-1] == "  and 5 more"


def test_the_pin_of_a_checkpoint_whose_commit_is_damaged_is_taken_back(run: Run) -> None:
    intent = run.attempt(1)
    for step in (100, 200):
        commit = run.save(intent, step)
        run.told("pin", str(step))
        spoil(run, commit)
    # Without its data nothing tells the name of its save.
    folder = run.ledger.keys.save(commit.attempt, step=commit.step, save=commit.save)
    run.ledger.store.delete(info.key for info in run.ledger.store.list(folder))
    told = run.told("unpin", "100")
    assert "pinned no longer; the next pruning would keep it: its commit is damaged" in told
    assert "pinned no longer; it has no data" in run.told("unpin", "200")
    assert read_pins(run.ledger) == ()


def test_a_pin_outlives_every_pruning_and_unpin_says_what_follows(run: Run) -> None:
    intent = run.attempt(1)
    first, *_ = [run.save(intent, step) for step in (100, 200, 300, 400)]
    retention = RetentionSpec(keep=KeepSpec(last=2), grace_s=0)
    assert "no pruning takes it" in run.told("pin", "100", "--why", "for the paper")
    assert "was pinned already" in run.told("pin", "100")
    assert read_pins(run.ledger) == (first.ref,)
    sweep(run.ledger, retention, sweep_id="one")
    assert set(listed(run)) == {"100.1", "300.1", "400.1"}
    assert "for the paper" in listed(run)["100.1"]["pins"][0]["why"]
    assert "is pinned no longer; the next pruning would keep it" in run.told("unpin", "100")
    with pytest.raises(SpecError, match="is not pinned"):
        run.ask("unpin", "100")
    sweep(run.ledger, retention, sweep_id="two")
    assert set(listed(run)) == {"300.1", "400.1"}


def test_what_is_gone_or_going_is_not_pinned(run: Run) -> None:
    intent = run.attempt(1)
    commit, other = run.save(intent, 100), run.save(intent, 200)
    journal(run, commit.ref)
    with pytest.raises(SpecError, match=r"100\.1 is swept; the nearest: 200\.1"):
        run.ask("pin", "100")
    # As when the sweep came between the look and the pin.
    with pytest.raises(CheckpointError, match=r"100\.1 was swept"):
        pin(run.ledger, commit.ref, who="ann", why="", at=datetime.now(UTC))
    run.ledger.store.delete([run.ledger.keys.commit(1, step=200)])
    with pytest.raises(CheckpointError, match=r"200\.1 is not there any more"):
        pin(run.ledger, other.ref, who="ann", why="", at=datetime.now(UTC))
    assert read_pins(run.ledger) == ()


def test_the_pin_of_a_fork_is_taken_back_only_when_asked_for(run: Run) -> None:
    commit = run.save(run.attempt(1), 100)
    run.ledger.store.put(f"{run.ledger.keys.pins}fork-child.json", encode(commit.ref))
    assert listed(run)["100.1"]["notes"] == ["pinned: fork-child"]
    with pytest.raises(SpecError, match="fork-child alone"):
        run.ask("unpin", "100")
    run.told("pin", "100")
    assert "still pinned by fork-child" in run.told("unpin", "100")
    run.told("unpin", "100", "--forks")
    assert read_pins(run.ledger) == ()


def test_a_step_that_is_not_there_or_not_one_is_said_with_what_is(run: Run) -> None:
    first = run.attempt(1)
    base = run.save(first, 100)
    run.save(first, 200)
    run.end(first)
    run.save(run.attempt(2, source=base.ref), 200)
    with pytest.raises(SpecError, match=r"200\.2 \(counts\), 200\.1 \(off the lineage\)"):
        run.ask("show", "200")
    with pytest.raises(SpecError, match=r"no such checkpoint; the nearest: 100\.1 \(counts\)"):
        run.ask("show", "150")
    with pytest.raises(SpecError, match="must be a step such as 4000"):
        run.ask("show", "two")
    assert "attempt 2" in run.told("show", "200.2")


def test_a_run_that_is_not_there_is_said(site: Site) -> None:
    with pytest.raises(HeadraceError, match="has no record"):
        site.run(begun=False).ask("ls")
    with pytest.raises(SpecError, match="was never started from here"):
        CliRunner().invoke(app, ["checkpoints", "ls", "never"], catch_exceptions=False)
