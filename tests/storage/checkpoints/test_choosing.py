"""What a job resumes from: the newest that nothing speaks against, and never less in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from storage.checkpoint_records import CommitRef, Resume, SweepJournal
from storage.checkpoints.choosing import choose, why_swept
from storage.checkpoints.commits import newest_commit
from storage.checkpoints.quarantine import acquit, condemn, doubt
from storage.checkpoints.sealing import encode_sealed
from storage.errors import CheckpointError
from storage.ledger import Ledger
from storage.records import Action, Decision, Diagnosis, End, Intent, Kind, encode
from tests.storage.checkpoints import work
from tests.storage.checkpoints.facts import make_commit

pytestmark = pytest.mark.s3

AT = datetime(2026, 1, 1, tzinfo=UTC)


class Run:
    """A run whose checkpoints hold no data: choosing reads none."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def attempt(self, number: int, *, resumed: bool = True, **fields: Any) -> Intent:
        source, from_disk = fields.pop("source", None), fields.pop("from_disk", False)
        intent = replace(work.make_intent(number), **fields)
        assert self.ledger.claim_intent(intent).won
        if resumed:
            self.resume(intent, source, from_disk=from_disk)
        return intent

    def resume(self, intent: Intent, source: CommitRef | None, *, from_disk: bool = False) -> None:
        record = Resume(source=source, from_disk=from_disk, world_size=1, nonce=intent.nonce, at=AT)
        assert self.ledger.claim_resume(intent, record).won

    def commit(self, step: int, attempt: int = 1) -> CommitRef:
        commit = make_commit(step, run=work.RUN, attempt=attempt, save=f"save-{attempt}-{step}")
        self.ledger.store.create(self.key(commit.ref), encode_sealed(commit))
        return commit.ref

    def key(self, ref: CommitRef) -> str:
        return self.ledger.keys.commit(ref.attempt, step=ref.step)

    def damage(self, ref: CommitRef) -> None:
        body = bytearray(self.ledger.store.get(self.key(ref)))
        body[len(body) // 2] ^= 1
        self.ledger.store.put(self.key(ref), bytes(body))

    def end(self, intent: Intent, kind: Kind) -> None:
        record = End(
            diagnosis=Diagnosis(kind=kind),
            decision=Decision(action=Action.RESUME, reason="test"),
            by="test",
            nonce="n",
            at=AT,
        )
        self.ledger.claim_end(intent, record)

    def sweep(self, *refs: CommitRef) -> None:
        journal = SweepJournal(sweep="s", refs=refs, at=AT)
        self.ledger.store.put(self.ledger.keys.sweep("s"), encode(journal))

    def choice(
        self, intent: Intent, damaged: Mapping[CommitRef, str] | None = None
    ) -> tuple[CommitRef | None, list[str]]:
        """What is chosen, and what is said of those that were passed over."""
        found = choose(self.ledger, intent, damaged=damaged or {})
        ref = None if found.commit is None else found.commit.ref
        return ref, [str(each) for each in found.passed]


@pytest.fixture
def demo(ledger: Ledger) -> Run:
    return Run(ledger)


def test_a_damaged_commit_is_stepped_back_from_with_the_reason_and_is_no_floor(demo: Run) -> None:
    demo.attempt(1)
    older, newer = demo.commit(10), demo.commit(20)
    second = demo.attempt(2, resumed=False, floor=newer)
    demo.damage(newer)
    assert newest_commit(demo.ledger) == older
    chosen, (said,) = demo.choice(second)
    assert chosen == older
    assert said.startswith("the checkpoint of step 20 (attempt 1, save unknown): the commit at")
    assert "is damaged" in said


def test_a_commit_that_was_put_in_another_s_place_is_stepped_back_from(demo: Run) -> None:
    demo.attempt(1)
    older = demo.commit(10)
    body = demo.ledger.store.get(demo.key(older))
    demo.ledger.store.put(demo.ledger.keys.commit(1, step=20), body)
    chosen, (said,) = demo.choice(demo.attempt(2, resumed=False, floor=older))
    assert chosen == older
    assert "is that of run 'demo', attempt 1, step 10" in said


def test_one_host_s_word_stops_nobody_and_two_hosts_words_do_until_a_verify_lifts_them(
    demo: Run,
) -> None:
    demo.attempt(1)
    older, newer = demo.commit(10), demo.commit(20)
    second = demo.attempt(2, resumed=False, floor=newer)
    doubt(demo.ledger, newer, host="n1", attempt=2, fault="bad CRC")
    assert demo.choice(second) == (newer, [])
    doubt(demo.ledger, newer, host="n2", attempt=3, fault="bad CRC")
    chosen, (said,) = demo.choice(second)
    assert chosen == older
    assert "2 hosts could not read it: n1 (attempt 2)" in said
    acquit(demo.ledger, newer)
    assert demo.choice(second) == (newer, [])


def test_a_checkpoint_that_may_be_poison_is_stepped_back_from_though_it_is_the_floor(
    demo: Run,
) -> None:
    demo.attempt(1)
    older, newer = demo.commit(10), demo.commit(20)
    for number in (2, 3, 4):
        demo.end(demo.attempt(number, source=newer, floor=newer), Kind.CODE)
        if number < 4:
            assert demo.choice(demo.attempt(10 * number, resumed=False))[0] == newer
    chosen, (said,) = demo.choice(demo.attempt(5, resumed=False, floor=newer))
    assert chosen == older
    assert "attempts 2 (code), 3 (code), 4 (code) loaded it and failed" in said


def test_where_nothing_will_do_each_commit_is_listed_with_its_reason(demo: Run) -> None:
    demo.attempt(1)
    refs = [demo.commit(step) for step in (10, 20, 30, 40, 50)]
    swept, unreadable, condemned, damaged, poison = refs
    for number in (2, 3, 4):
        demo.end(demo.attempt(number, source=poison), Kind.HANG)
    last = demo.attempt(5, resumed=False, floor=poison)
    demo.sweep(swept)
    demo.damage(unreadable)
    condemn(demo.ledger, condemned, host="login1", fault="two bytes differ")
    with pytest.raises(CheckpointError) as caught:
        demo.choice(last, damaged={damaged: "rank 0: no such object"})
    (line,) = str(caught.value).splitlines()
    first, *told = line.split("the checkpoint of ")
    assert "none of them can be loaded; see `headrace checkpoints ls demo`" in first
    assert "`headrace checkpoints verify demo`" in first
    reasons = {
        50: "loaded it and failed without a newer commit",
        40: "rank 0: no such object",
        30: "a verify on login1 found: two bytes differ",
        20: "is damaged",
        10: "a sweep has named it",
    }
    for text, (step, reason) in zip(told, reasons.items(), strict=True):
        assert text.startswith(f"step {step} (")
        assert reason in text


def test_a_run_of_which_every_commit_is_damaged_does_not_start_over(demo: Run) -> None:
    demo.attempt(1)
    demo.damage(demo.commit(10))
    with pytest.raises(CheckpointError, match="the run has commits and none of them"):
        demo.choice(demo.attempt(2, resumed=False))


def test_a_run_of_which_every_commit_is_gone_does_not_start_over(demo: Run) -> None:
    """Though the attempt before has loaded its save from a disk."""
    demo.attempt(1)
    commit = demo.commit(10)
    demo.attempt(2, source=commit, from_disk=True, floor=commit)
    demo.ledger.store.delete([demo.key(commit)])
    with pytest.raises(CheckpointError, match="the run has commits and none of them"):
        demo.choice(demo.attempt(3, resumed=False))


def test_a_floor_that_a_sweep_took_is_no_floor_that_may_be_stepped_back_from(demo: Run) -> None:
    demo.attempt(1)
    _, newer = demo.commit(10), demo.commit(20)
    last = demo.attempt(2, resumed=False, floor=newer)
    demo.sweep(newer)
    with pytest.raises(CheckpointError, match="is gone, and nothing newer counts"):
        demo.choice(last)


def test_a_floor_that_a_later_resume_left_behind_is_not_gone(demo: Run) -> None:
    """An older attempt, which stepped back on its own, came alive again in between."""
    demo.attempt(1)
    older, newer = demo.commit(10), demo.commit(20)
    zombie = demo.attempt(2, resumed=False, floor=newer)
    third = demo.attempt(3, resumed=False, floor=newer)
    demo.resume(zombie, older)
    assert demo.choice(third) == (older, [])


def test_what_a_sweep_takes_under_a_reader_s_hands_is_not_damaged(demo: Run) -> None:
    demo.attempt(1)
    first, second = demo.commit(10), demo.commit(20)
    assert why_swept(demo.ledger, first) is None
    demo.sweep(first)
    assert why_swept(demo.ledger, first) == "a sweep took it while it was being read"
    demo.ledger.store.delete([demo.key(second)])
    assert why_swept(demo.ledger, second) == "its commit was deleted while it was being read"


def test_a_zombie_that_goes_on_committing_changes_nothing_that_others_see(demo: Run) -> None:
    """Attempt 1 was cut off, 2 took over from step 20 and committed 25; 1 wakes up and goes on."""
    first = demo.attempt(1)
    demo.commit(10)
    taken = demo.commit(20)
    demo.end(first, Kind.LOST)
    second = demo.attempt(2, resumed=False, floor=taken)
    demo.resume(second, demo.choice(second)[0])
    newest = demo.commit(25, attempt=2)
    third = demo.attempt(3, resumed=False, floor=newest)
    before = demo.choice(third)
    for step in (21, 30, 1000):
        demo.commit(step, attempt=1)
        assert newest_commit(demo.ledger) == newest
        assert demo.choice(third) == before == (newest, [])
    demo.damage(newest)
    assert demo.choice(third)[0] == taken
