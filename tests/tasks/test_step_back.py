"""What a step back ordered is in every later intent until some attempt has honoured it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from slurm.snapshot import Snapshot
from slurm.spec import ClusterSpec, RetrySpec
from storage.attempts import Attempt
from storage.checkpoint_records import CommitRef, Resume
from storage.checkpoints.sealing import encode_sealed
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.records import Action, Decision, Diagnosis, End, Intent, Kind, Stage, Why, encode
from storage.spec import StoreSpec
from tasks.context import RunContext, Unit
from tasks.deeds import Deeds
from tasks.engine import Engine
from tasks.eyes import Unseen
from tasks.situation import Allocate, Order, Situation
from tests.storage.checkpoints.facts import make_commit
from tests.tasks.world import EPOCH, RUN, Plan, Shelf, World

FOLDER = Path("/nonexistent/headrace-model")
TRAIN = Unit(name="train", entry="none", resumes=True)


class Bench:
    """An engine's own deeds, on a ledger that a test writes the rest of."""

    def __init__(self) -> None:
        self.ledger = Ledger(cast("ObjectStore", Shelf({})), RunKeys(prefix="", run=RUN))
        context = RunContext(
            run=RUN,
            workdir=FOLDER,
            cluster=World(Plan(engines=1), FOLDER).cluster,
            cluster_spec=ClusterSpec(),
            retry=RetrySpec(),
            store=StoreSpec(),
            ledger=self.ledger,
            snapshot=Snapshot(path=FOLDER, digest="d", git_commit=None, git_dirty=None),
            eyes=Unseen(),
        )
        self._deeds = Deeds(context, Engine())
        self._order = Order(
            run=RUN,
            stage=Stage.TRAIN,
            units=(TRAIN,),
            fingerprint="f",
            cluster="c",
            who="me",
            retry=RetrySpec(),
        )

    def next(self, *, seen: Attempt | None = None) -> Intent:
        """The intent that the engine makes now; `seen` is the last attempt as it saw it."""
        attempts = self.ledger.attempts(Stage.TRAIN)
        last = seen or (attempts[-1] if attempts else None)
        number = len(attempts) + 1
        step = Allocate(unit=TRAIN, number=number, why=Why.FIRST, after=last, excluded=())
        assert self._deeds.do(step, self._order, Situation(now=EPOCH, attempts=attempts))
        made = self.ledger.intent(Stage.TRAIN, number)
        assert made is not None
        return made

    def end(self, intent: Intent, action: Action = Action.RESUME) -> None:
        end = End(
            diagnosis=Diagnosis(kind=Kind.NUMERIC),
            decision=Decision(action=action, reason="test"),
            by="e",
            nonce="n",
            at=EPOCH,
        )
        self.ledger.claim_end(intent, end)

    def resume(self, intent: Intent, source: CommitRef | None) -> None:
        record = Resume(source=source, world_size=1, nonce="n", at=EPOCH)
        self.ledger.claim_resume(intent, record)

    def commit(self, intent: Intent, *steps: int) -> list[CommitRef]:
        made = []
        for step in steps:
            commit = make_commit(step, run=RUN, attempt=intent.attempt)
            key = self.ledger.keys.commit(intent.attempt, step=step)
            self.ledger.store.create(key, encode_sealed(commit))
            made.append(commit.ref)
        return made


@pytest.fixture
def bench() -> Bench:
    return Bench()


def stepped_back(bench: Bench) -> list[CommitRef]:
    """Attempt 1 committed 10, 20 and 30, and its end orders a step back."""
    first = bench.next()
    assert (first.floor, first.ceiling) == (None, None)
    bench.resume(first, None)
    refs = bench.commit(first, 10, 20, 30)
    bench.end(first, Action.STEP_BACK)
    return refs


def test_the_ceiling_is_carried_on_until_an_attempt_has_resumed_below_it(bench: Bench) -> None:
    _, second_newest, newest = stepped_back(bench)
    for _ in range(3):
        intent = bench.next()
        assert (intent.floor, intent.ceiling) == (newest, 20)
        bench.end(intent)
    honouring = bench.next()
    bench.resume(honouring, second_newest)
    (later,) = bench.commit(honouring, 25)
    bench.end(honouring)
    following = bench.next()
    assert (following.floor, following.ceiling) == (later, None)


def test_a_lost_attempt_that_honoured_it_after_all_frees_those_after_it(bench: Bench) -> None:
    """It came alive again after the next had been made, and has got on since."""
    _, second_newest, _ = stepped_back(bench)
    lost = bench.next()
    bench.end(lost)
    queued = bench.next()
    assert queued.ceiling == 20
    bench.end(queued)
    seen = bench.ledger.attempt(Stage.TRAIN, queued.attempt)
    bench.resume(lost, second_newest)
    (later,) = bench.commit(lost, 25)
    following = bench.next(seen=seen)
    assert (following.floor, following.ceiling) == (later, None)


def test_a_second_step_back_before_the_first_is_honoured_goes_no_higher(bench: Bench) -> None:
    stepped_back(bench)
    again = bench.next()
    assert again.ceiling == 20
    bench.end(again, Action.STEP_BACK)
    assert bench.next().ceiling == 20


def test_a_second_step_back_after_the_first_was_honoured_is_a_new_one(bench: Bench) -> None:
    first_commit, second_newest, _ = stepped_back(bench)
    honouring = bench.next()
    bench.resume(honouring, second_newest)
    bench.end(honouring, Action.STEP_BACK)
    queued = bench.next()
    assert queued.ceiling == first_commit.step
    bench.end(queued)
    assert bench.next().ceiling == first_commit.step


def test_data_to_skip_is_carried_with_the_ceiling(bench: Bench) -> None:
    stepped_back(bench)
    intent = bench.next()
    skipping = replace(intent, skip_data=((100, 200),))
    bench.ledger.store.put(bench.ledger.keys.intent(Stage.TRAIN, 2), encode(skipping))
    bench.end(skipping)
    third = bench.next()
    assert (third.ceiling, third.skip_data) == (20, ((100, 200),))
    bench.resume(third, None)
    bench.end(third)
    fourth = bench.next()
    assert (fourth.ceiling, fourth.skip_data) == (None, ())


def test_a_step_back_with_nothing_behind_it_is_a_fresh_start(bench: Bench) -> None:
    first = bench.next()
    bench.resume(first, None)
    bench.commit(first, 10)
    bench.end(first, Action.STEP_BACK)
    assert bench.next().ceiling == 0
