"""Sweeping beside live readers and writers, killed at any line, on a real store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from storage.checkpoint_records import CommitRef, FileRecord, Loading, Reading, Resume
from storage.checkpoints.commits import counting_commits, loading_key, newest_commit
from storage.checkpoints.quarantine import acquit, condemn
from storage.checkpoints.reading import reading
from storage.checkpoints.sealing import encode_sealed
from storage.errors import CheckpointError, StoreError
from storage.job import JobContext, JobDescription
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.object_store import DeleteFailure, ObjectStore
from storage.records import Action, Decision, Diagnosis, End, Intent, Kind, Stage, Why, encode
from storage.retention.sweep import SweepJob, run, sweep
from storage.spec import KeepSpec, RetentionSpec
from tests.ranks import ALONE
from tests.storage.checkpoints.facts import make_commit

pytestmark = pytest.mark.s3

AT = datetime(2026, 1, 1, tzinfo=UTC)
KEEP_TWO = RetentionSpec(keep=KeepSpec(last=2), grace_s=0)


class Run:
    """A run in the bucket, as its trainers would have left it."""

    def __init__(self, store: ObjectStore, name: str = "demo") -> None:
        self.name = name
        self.ledger = Ledger(store, RunKeys(prefix="", run=name))
        self.store = store
        self.keys = self.ledger.keys

    def attempt(
        self,
        number: int,
        *,
        source: CommitRef | None = None,
        resumed: bool = True,
        ended: bool = False,
        floor: CommitRef | None = None,
        stage: Stage = Stage.TRAIN,
    ) -> Intent:
        intent = Intent(
            run=self.name,
            stage=stage,
            unit=stage,
            attempt=number,
            token=f"{stage}-{number}",
            nonce=str(number),
            cluster="c",
            user="u",
            why=Why.FIRST,
            after=None,
            nodes=1,
            ranks_per_node=1,
            fingerprint="f",
            floor=floor,
            created_at=AT,
        )
        assert self.ledger.claim_intent(intent).won
        if resumed:
            record = Resume(source=source, world_size=1, nonce=str(number), at=AT)
            self.ledger.claim_resume(intent, record)
        if ended:
            self.end(intent)
        return intent

    def end(self, intent: Intent, kind: Kind = Kind.DONE) -> None:
        record = End(
            diagnosis=Diagnosis(kind=kind),
            decision=Decision(action=Action.DONE, reason="test"),
            by="test",
            nonce="n",
            at=AT,
        )
        self.ledger.claim_end(intent, record)

    def data(self, step: int, attempt: int = 1, save: str = "aa") -> CommitRef:
        """The objects of a save without its commit."""
        folder = self.keys.save(attempt, step=step, save=save)
        self.store.put(f"{folder}data.0.0.bin", b"x" * 300)
        self.store.put(f"{folder}metadata.json", b"{}")
        return CommitRef(step=step, attempt=attempt, save=save)

    def commit(self, ref: CommitRef) -> CommitRef:
        folder = self.keys.save(ref.attempt, step=ref.step, save=ref.save)
        commit = make_commit(
            ref.step,
            run=self.name,
            attempt=ref.attempt,
            save=ref.save,
            metadata=FileRecord(key=f"{folder}metadata.json", size_bytes=2, crc64nvme=""),
            files=(FileRecord(key=f"{folder}data.0.0.bin", size_bytes=300, crc64nvme=""),),
            at=AT,
        )
        self.store.put(self.keys.commit(ref.attempt, step=ref.step), encode_sealed(commit))
        return ref

    def saved(self, *steps: int, attempt: int = 1) -> list[CommitRef]:
        return [self.commit(self.data(step, attempt)) for step in steps]

    def marker(self, number: int, *candidates: CommitRef) -> None:
        body = encode(Loading(candidates=candidates, at=AT))
        self.store.put(loading_key(self.ledger, number), body)

    def sweep(self, sweep_id: str = "s1", retention: RetentionSpec = KEEP_TWO) -> set[CommitRef]:
        done = sweep(self.ledger, retention, sweep_id=sweep_id)
        assert done.failures == ()
        return {verdict.ref for verdict in done.deleted}

    def steps(self) -> list[int]:
        """Steps of which a commit or any data is left."""
        commits = self._below(self.keys.commits)
        saves = self._below(f"{self.keys.checkpoints}data/")
        names = {name[0] for name in commits} | {name[1] for name in saves}
        return sorted({int(name[:12]) for name in names})

    def _below(self, prefix: str) -> list[list[str]]:
        return [info.key.removeprefix(prefix).split("/") for info in self.store.list(prefix)]


@pytest.fixture
def demo(store: ObjectStore) -> Run:
    return Run(store)


def test_the_newest_stay_and_the_others_leave_nothing_behind(demo: Run) -> None:
    demo.attempt(1)
    demo.saved(10, 20, 30, 40)
    assert {ref.step for ref in demo.sweep()} == {10, 20}
    assert demo.steps() == [30, 40]
    assert [commit.step for commit in counting_commits(demo.ledger)] == [40, 30]
    assert demo.sweep("s2") == set()


def test_only_this_run_is_swept(demo: Run, store: ObjectStore) -> None:
    other = Run(store, "demo-2")
    for each in (demo, other):
        each.attempt(1)
        each.saved(10, 20, 30)
    demo.sweep()
    assert (demo.steps(), other.steps()) == ([20, 30], [10, 20, 30])


def test_a_pin_the_grace_and_keep_last_hold(demo: Run) -> None:
    demo.attempt(1)
    pinned, *_ = demo.saved(10, 20, 30, 40, 50)
    demo.store.put(f"{demo.keys.pins}best.json", encode(pinned))
    demo.sweep("s1", RetentionSpec(keep=KeepSpec(last=3), grace_s=0))
    assert demo.steps() == [10, 30, 40, 50]
    assert demo.sweep("s2", RetentionSpec(keep=KeepSpec(last=2), grace_s=3600)) == set()


def test_the_resume_source_of_a_live_attempt_stays_until_it_has_ended(demo: Run) -> None:
    demo.attempt(1, ended=True)
    source, *_ = demo.saved(10)
    live = demo.attempt(2, source=source)
    demo.saved(20, 30, 40, attempt=2)
    assert {ref.step for ref in demo.sweep("s1")} == {20}
    demo.end(live)
    later = demo.attempt(3, source=CommitRef(step=40, attempt=2, save="aa"))
    assert {ref.step for ref in demo.sweep("s2")} == {10}
    demo.end(later)
    assert demo.steps() == [30, 40]


def test_what_a_reader_may_be_reading_stays_until_it_has_resumed(demo: Run) -> None:
    demo.attempt(1, ended=True)
    old, _, newest = demo.saved(10, 20, 30)
    reader = demo.attempt(2, resumed=False)
    demo.marker(2, old, newest)
    assert demo.sweep("s1") == set()
    record = Resume(source=newest, world_size=1, nonce="r", at=AT)
    demo.ledger.claim_resume(reader, record)
    assert demo.sweep("s2") == {old}


def test_the_floor_of_an_attempt_that_still_queues_stays(demo: Run) -> None:
    demo.attempt(1)
    floor, *_ = demo.saved(10, 20, 30)
    demo.attempt(2, resumed=False, floor=floor)
    assert demo.sweep() == set()


def test_commits_off_the_lineage_go_and_never_displace_those_that_count(demo: Run) -> None:
    demo.attempt(1)
    source, *_ = demo.saved(10, 20, 30)
    demo.attempt(2, source=source)
    demo.saved(15, attempt=2)
    assert {ref.step for ref in demo.sweep()} == {20, 30}
    assert [commit.step for commit in counting_commits(demo.ledger)] == [15, 10]


def test_data_without_a_commit_goes_only_once_its_attempt_has_ended(demo: Run) -> None:
    first = demo.attempt(1)
    demo.saved(10, 20)
    orphan = demo.data(25)
    assert demo.sweep("s1") == set()
    demo.end(first)
    assert demo.sweep("s2", RetentionSpec(grace_s=3600)) == set()
    assert demo.sweep("s3") == {orphan}
    assert demo.steps() == [10, 20]


def test_a_save_that_was_swept_never_counts_again_even_if_it_is_committed_later(
    demo: Run,
) -> None:
    first = demo.attempt(1)
    demo.saved(10, 20)
    orphan = demo.data(25)
    demo.end(first)
    demo.sweep("s1")
    demo.commit(demo.data(25))
    newest = newest_commit(demo.ledger)
    assert newest is not None
    assert newest.step == 20
    assert demo.sweep("s2") == {orphan}
    assert demo.steps() == [10, 20]


def test_an_object_of_an_unknown_form_is_nobody_s_to_delete(demo: Run) -> None:
    demo.attempt(1, ended=True)
    demo.saved(10, 20, 30)
    foreign = f"{demo.keys.checkpoints}data/notes.txt"
    demo.store.put(foreign, b"mine")
    demo.sweep()
    assert demo.store.head(foreign) is not None


def test_a_quarantined_checkpoint_stays_and_does_not_count_among_the_newest_two(demo: Run) -> None:
    demo.attempt(1)
    _, _, doubted, _ = demo.saved(10, 20, 30, 40)
    condemn(demo.ledger, doubted, host="login1", fault="bad CRC")
    done = sweep(demo.ledger, KEEP_TWO, sweep_id="s1")
    assert {verdict.ref.step for verdict in done.deleted} == {10}
    (reason,) = [verdict.reason for verdict in done.kept if verdict.ref == doubted]
    assert reason == "in doubt: a verify on login1 found: bad CRC"
    acquit(demo.ledger, doubted)
    assert {ref.step for ref in demo.sweep("s2")} == {20}


def test_what_may_be_poison_stays_and_does_not_count_among_the_newest_two(demo: Run) -> None:
    demo.attempt(1, ended=True)
    *_, poison = demo.saved(10, 20, 30)
    for number in (2, 3, 4):
        demo.end(demo.attempt(number, source=poison), kind=Kind.NUMERIC)
    done = sweep(demo.ledger, KEEP_TWO, sweep_id="s1")
    assert done.deleted == ()
    assert "attempts 2 (numeric), 3 (numeric), 4 (numeric) loaded it" in done.kept[0].reason


def test_a_damaged_commit_never_makes_its_data_deletable(demo: Run) -> None:
    demo.attempt(1, ended=True)
    damaged, *_ = demo.saved(10, 20, 30)
    key = demo.keys.commit(1, step=damaged.step)
    body = demo.store.get(key)
    demo.store.put(key, body[:40] + b"?" + body[41:])
    done = sweep(demo.ledger, KEEP_TWO, sweep_id="s1")
    assert done.deleted == ()
    (reason,) = [verdict.reason for verdict in done.kept if verdict.ref == damaged]
    assert reason == "its commit is damaged"
    assert demo.steps() == [10, 20, 30]


def test_a_reader_outside_a_job_keeps_its_checkpoint_until_it_is_done(demo: Run) -> None:
    demo.attempt(1, ended=True)
    old, *_ = demo.saved(10, 20, 30)
    with reading(demo.ledger, [old], who="verify by ann on login1") as standing:
        assert standing == {old}
        done = sweep(demo.ledger, KEEP_TWO, sweep_id="s1")
        assert done.deleted == ()
        assert done.kept[-1].reason == "verify by ann on login1 is reading it"
    assert demo.sweep("s2") == {old}
    with reading(demo.ledger, [old], who="late") as standing:
        assert standing == frozenset()


def test_a_reader_s_marker_is_put_before_the_journals_are_read(
    demo: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweeper that journals in between sees the marker; one that did before is seen."""
    demo.attempt(1, ended=True)
    old, *_ = demo.saved(10, 20, 30)
    listing = demo.store.list

    def sweep_first(prefix: str) -> Iterator[Any]:
        monkeypatch.undo()
        if prefix == demo.keys.sweeps:
            demo.sweep("s1")
        return listing(prefix)

    monkeypatch.setattr(demo.store, "list", sweep_first)
    with reading(demo.ledger, [old], who="me") as standing:
        assert standing == {old}
    assert demo.steps() == [10, 20, 30]


def test_a_reader_that_comes_while_the_sweep_decides_keeps_its_checkpoint(
    demo: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo.attempt(1, ended=True)
    old, *_ = demo.saved(10, 20, 30)
    with ExitStack() as readers:
        at_journal(
            demo, monkeypatch, lambda: readers.enter_context(reading(demo.ledger, [old], who="me"))
        )
        assert demo.sweep() == set()
    assert [commit.step for commit in counting_commits(demo.ledger)] == [30, 20, 10]


def test_a_marker_whose_reader_died_expires_and_one_that_lives_is_renewed(demo: Run) -> None:
    demo.attempt(1, ended=True)
    old, *_ = demo.saved(10, 20, 30)
    dead = Reading(refs=(old,), who="dead", valid_s=-60.0, at=AT)
    demo.store.put(f"{demo.keys.readers}dead.json", encode(dead))
    with reading(demo.ledger, [old], who="alive", valid_s=5.0):
        assert demo.sweep("s1") == set()
        (marker,) = demo.store.list(demo.keys.readers)
        deadline = time.monotonic() + 60
        while demo.store.head(marker.key) == marker and time.monotonic() < deadline:
            time.sleep(0.05)
        assert demo.store.head(marker.key) != marker
    assert demo.sweep("s2") == {old}
    assert list(demo.store.list(demo.keys.readers)) == []


def test_a_reader_whose_marker_lapsed_is_told_so(
    demo: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo.attempt(1)
    (ref,) = demo.saved(10)
    put = demo.store.put

    def refused(key: str, body: Any) -> None:
        if key.startswith(demo.keys.readers) and demo.store.head(key) is not None:
            raise StoreError("down")
        put(key, body)

    monkeypatch.setattr(demo.store, "put", refused)
    with (
        pytest.raises(CheckpointError, match=r"may have been deleted meanwhile; .*: down"),
        reading(demo.ledger, [ref], who="me", valid_s=0.1),
    ):
        time.sleep(0.3)


def at_journal(demo: Run, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Has `act` happen right after the journal was put, before the sweeper looks again."""
    put = demo.store.put
    done: list[str] = []

    def put_and_act(key: str, body: Any) -> None:
        put(key, body)
        if key.startswith(demo.keys.sweeps) and not done:
            done.append(key)
            act()

    monkeypatch.setattr(demo.store, "put", put_and_act)


def test_a_reader_that_came_before_the_journal_was_read_keeps_its_checkpoint(
    demo: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo.attempt(1, ended=True)
    old, *_ = demo.saved(10, 20, 30)
    demo.attempt(2, resumed=False)
    at_journal(demo, monkeypatch, lambda: demo.marker(2, old))
    assert demo.sweep() == set()
    assert demo.steps() == [10, 20, 30]
    assert [commit.step for commit in counting_commits(demo.ledger)] == [30, 20, 10]


def test_a_commit_that_lands_while_its_data_are_judged_is_taken_out(
    demo: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo.attempt(1, ended=True)
    demo.saved(10, 20)
    late = demo.data(25)
    at_journal(demo, monkeypatch, lambda: demo.commit(late))
    assert demo.sweep() == set()
    newest = newest_commit(demo.ledger)
    assert newest == late


def test_a_rollback_while_the_sweep_decides_keeps_what_is_newest_then(
    demo: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo.attempt(1, ended=True)
    first, *_ = demo.saved(10, 20, 30, 40)
    at_journal(demo, monkeypatch, lambda: demo.attempt(2, source=first))
    demo.sweep()
    assert [commit.step for commit in counting_commits(demo.ledger)] == [10]


class _KilledError(Exception):
    pass


def calls_that_change(store: ObjectStore, monkeypatch: pytest.MonkeyPatch, survive: int) -> None:
    """Lets `survive` changes through, a key of a delete being one, and kills at the next."""
    left = iter(range(survive))
    put, delete = store.put, store.delete

    def spend() -> None:
        if next(left, None) is None:
            raise _KilledError

    def counted_put(key: str, body: Any) -> None:
        spend()
        put(key, body)

    def counted_delete(keys: Any) -> tuple[DeleteFailure, ...]:
        failures: tuple[DeleteFailure, ...] = ()
        for key in keys:
            spend()
            failures += delete([key])
        return failures

    monkeypatch.setattr(store, "put", counted_put)
    monkeypatch.setattr(store, "delete", counted_delete)


def test_killed_after_any_change_and_run_again_it_ends_in_the_same_place(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    survive = 0
    while True:
        demo = Run(store, f"demo-{survive}")
        demo.attempt(1, ended=True)
        (source,) = demo.saved(10)
        demo.data(15)
        demo.attempt(2, source=source)
        demo.saved(20, 30, 40, attempt=2)
        with monkeypatch.context() as patched:
            calls_that_change(store, patched, survive)
            try:
                demo.sweep("s1")
                finished = True
            except _KilledError:
                finished = False
        left = {commit.step for commit in counting_commits(demo.ledger)}
        assert {10, 30, 40} <= left
        for commit in counting_commits(demo.ledger):
            assert store.head(commit.files[0].key) is not None
        demo.sweep("s2")
        assert demo.steps() == [10, 30, 40], f"killed after {survive} changes"
        if finished:
            break
        survive += 1
    assert survive == 6


def test_a_commit_that_the_store_will_not_delete_keeps_its_data(
    demo: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo.attempt(1)
    demo.saved(10, 20, 30)
    delete = demo.store.delete

    def refusing(keys: Any) -> tuple[DeleteFailure, ...]:
        held = list(keys)
        refused = [key for key in held if "/commits/" in key]
        delete(key for key in held if key not in refused)
        return tuple(DeleteFailure(key, "AccessDenied", "no") for key in refused)

    with monkeypatch.context() as patched:
        patched.setattr(demo.store, "delete", refusing)
        done = sweep(demo.ledger, KEEP_TWO, sweep_id="s1")
    assert [failure.code for failure in done.failures] == ["AccessDenied"]
    assert done.deleted == ()
    assert done.bytes_after == done.bytes_before
    assert demo.steps() == [10, 20, 30]
    demo.sweep("s2")
    assert demo.steps() == [20, 30]


def test_a_store_that_fails_fails_the_sweep(demo: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(prefix: str) -> Iterator[Any]:
        raise StoreError("down")

    monkeypatch.setattr(demo.store, "list", fail)
    with pytest.raises(StoreError, match="down"):
        demo.sweep()


def test_the_job_s_outputs_say_what_stayed_what_went_and_why(demo: Run) -> None:
    demo.attempt(1)
    demo.saved(10, 20, 30)
    intent = demo.attempt(1, stage=Stage.PRUNE, resumed=False)
    job = JobDescription(
        intent=intent,
        store=demo.store.spec,
        entry="storage.retention.sweep",
        payload=SweepJob(retention=KEEP_TWO).model_dump(mode="json"),
        folder=Path("/nowhere"),
        code=Path("/nowhere"),
        python=Path("/nowhere"),
    )

    def shown(step: int, reason: str) -> dict[str, Any]:
        return {"step": step, "attempt": 1, "save": "aa", "size_bytes": 302, "reason": reason}

    assert run(JobContext(job, ALONE)) == {
        "kept": [shown(step, "newest 2, keep.last 2") for step in (30, 20)],
        "deleted": [
            {
                "step": 10,
                "attempt": 1,
                "save": "aa",
                "size_bytes": 302,
                "reason": "no rule keeps it",
            }
        ],
        "bytes_before": 3 * 302,
        "bytes_after": 2 * 302,
        "failures": [],
    }
