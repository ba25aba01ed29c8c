"""Runs as they may go: attempts, zombies, step backs and sweeps in any order, by the real code.

An attempt that was closed goes on loading, resuming and committing, as if every look of its own at
the fence had been just too early. Nobody ever loses what it relies on, and nobody is led back.
"""

from __future__ import annotations

from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from storage.checkpoint_records import CommitRef, Resume
from storage.checkpoints.choosing import choose
from storage.checkpoints.commits import counting_commits, newest_commit, read_commit
from storage.checkpoints.lineage import ceiling_of_next, trace
from storage.checkpoints.sealing import encode_sealed
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.records import Action, Decision, Diagnosis, End, Intent, Kind, Stage
from storage.retention.sweep import sweep
from storage.spec import KeepSpec, RetentionSpec
from tests.storage.checkpoints import work
from tests.storage.checkpoints.facts import make_commit
from tests.storage.checkpoints.memory_store import EPOCH, MemoryStore

KEEP_TWO = RetentionSpec(keep=KeepSpec(last=2), grace_s=0)


class Play:
    """One run, and all that may be done to it. `draw` picks a number below another."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self.bucket = MemoryStore()
        self.ledger = Ledger(cast("ObjectStore", self.bucket), RunKeys(prefix="", run=work.RUN))
        self.intents: list[Intent] = []
        self.chosen: dict[int, CommitRef | None] = {}
        self.steps: dict[int, int] = {}
        self.sweeps = 0
        self.told: list[str] = []

    def draw(self, below: int) -> int:
        return self._data.draw(st.integers(0, below - 1))

    def act(self, *, nested: bool = False) -> None:
        """Anything that anybody may do next."""
        deeds = [self.allocate, self.load, self.resume, self.commit, self.commit, self.save]
        (deeds if nested else [*deeds, self.sweep])[self.draw(len(deeds) + (not nested))]()

    def allocate(self) -> None:
        """An engine closes the newest attempt, whose job may go on, and makes the next."""
        attempts = self.ledger.attempts(Stage.TRAIN)
        if attempts and attempts[-1].end is None:
            if self.draw(3) == 0:
                return
            action = (Action.RESUME, Action.RESUME, Action.STEP_BACK)[self.draw(3)]
            self.ledger.claim_end(
                attempts[-1].intent,
                End(
                    diagnosis=Diagnosis(kind=(Kind.LOST, Kind.HARDWARE)[self.draw(2)]),
                    decision=Decision(action=action, reason="test"),
                    by="engine",
                    nonce="n",
                    at=EPOCH,
                ),
            )
        floor = newest_commit(self.ledger)
        attempts = self.ledger.attempts(Stage.TRAIN)
        refs = [commit.ref for commit in counting_commits(self.ledger)]
        intent = work.make_intent(
            len(self.intents) + 1, floor=floor, ceiling=ceiling_of_next(attempts, refs)
        )
        assert self.ledger.claim_intent(intent).won
        self.intents.append(intent)
        self.told.append(f"allocate {intent.attempt} floor {floor} ceiling {intent.ceiling}")

    def load(self) -> None:
        """Some attempt that has not resumed looks for what to load, perhaps once more."""
        waiting = [one for one in self.intents if one.attempt not in self.steps]
        if not waiting:
            return
        intent = waiting[self.draw(len(waiting))]
        ref = None
        found = choose(self.ledger, intent, damaged={})
        if found.commit is not None:
            ref = found.commit.ref
            assert intent.ceiling is None or ref.step <= intent.ceiling
        self.chosen[intent.attempt] = ref
        self.told.append(f"load {intent.attempt} {ref}")
        self._require_no_older_than_floor(intent, ref)

    def resume(self) -> None:
        """Some attempt that has loaded says so, maybe long after it looked."""
        loaded = [number for number in self.chosen if number not in self.steps]
        if not loaded:
            return
        number = loaded[self.draw(len(loaded))]
        source = self.chosen[number]
        record = Resume(source=source, world_size=1, nonce="n", at=EPOCH)
        assert self.ledger.claim_resume(self.intents[number - 1], record).won
        is_newest = number > max(self.steps, default=0)
        self.steps[number] = 0 if source is None else source.step
        self.told.append(f"resume {number}")
        if is_newest and not self._is_closed(number):
            assert newest_commit(self.ledger) == source, "the newest is what was just loaded"

    def commit(self) -> None:
        """Some attempt that has resumed, a zombie or not, commits a few steps further."""
        if not self.steps:
            return
        numbers = sorted(self.steps)
        number = numbers[self.draw(len(numbers))]
        before = counting_commits(self.ledger)
        self.steps[number] += 1 + self.draw(20)
        ref = self._save(number)
        self._commit(ref)
        self.told.append(f"commit {ref}")
        after = counting_commits(self.ledger)
        if number == numbers[-1]:
            assert after[0].ref == ref
        else:
            assert after == before, "a zombie's commit changes no answer"

    def save(self) -> None:
        """Some attempt writes data and never commits them."""
        if self.steps:
            numbers = sorted(self.steps)
            number = numbers[self.draw(len(numbers))]
            self.steps[number] += 1
            self._save(number)

    def sweep(self) -> None:
        """A sweeper works, and others act right after its journal was put."""
        self.sweeps += 1
        journals = self.ledger.keys.sweeps

        def meanwhile(key: str) -> None:
            if key.startswith(journals):
                self.bucket.after_put = lambda key: None
                for _ in range(self.draw(3)):
                    self.act(nested=True)

        self.bucket.after_put = meanwhile
        done = sweep(self.ledger, KEEP_TWO, sweep_id=f"s{self.sweeps}")
        self.bucket.after_put = lambda key: None
        self.told.append(f"sweep {[verdict.ref for verdict in done.deleted]}")

    def check(self) -> None:
        """What holds after every deed."""
        counting = counting_commits(self.ledger)
        for commit in counting:
            assert self._has_data(commit.ref), "what counts has its data"
        for number, source in self.chosen.items():
            if source is not None and not self._is_closed(number):
                assert self._has_data(source), "what a live attempt reads is never deleted"

    def _require_no_older_than_floor(self, intent: Intent, ref: CommitRef | None) -> None:
        floor = intent.floor
        if floor is None or (intent.ceiling is not None and floor.step > intent.ceiling):
            return
        lineage = trace(self.ledger.attempts(Stage.TRAIN))
        if lineage.admits(attempt=floor.attempt, step=floor.step):
            assert ref is not None, "a run with commits never starts over"
            assert ref.step >= floor.step, "nobody is led back behind the floor"

    def _is_closed(self, number: int) -> bool:
        found = self.ledger.attempt(Stage.TRAIN, number)
        return found is not None and found.end is not None

    def _has_data(self, ref: CommitRef) -> bool:
        folder = self.ledger.keys.save(ref.attempt, step=ref.step, save=ref.save)
        stands = read_commit(self.ledger, attempt=ref.attempt, step=ref.step) is not None
        return stands and f"{folder}data.bin" in self.bucket.objects

    def _save(self, number: int) -> CommitRef:
        ref = CommitRef(
            step=self.steps[number], attempt=number, save=f"{number}-{self.steps[number]}"
        )
        folder = self.ledger.keys.save(number, step=ref.step, save=ref.save)
        self.bucket.put(f"{folder}data.bin", b"x")
        return ref

    def _commit(self, ref: CommitRef) -> None:
        commit = make_commit(ref.step, run=work.RUN, attempt=ref.attempt, save=ref.save)
        self.bucket.put(self.ledger.keys.commit(ref.attempt, step=ref.step), encode_sealed(commit))


@given(data=st.data(), deeds=st.integers(5, 40))
@settings(max_examples=60)
def test_no_zombie_step_back_or_sweep_takes_from_anybody_what_it_relies_on(
    data: st.DataObject, deeds: int
) -> None:
    play = Play(data)
    play.allocate()
    for _ in range(deeds):
        play.act()
        play.check()
