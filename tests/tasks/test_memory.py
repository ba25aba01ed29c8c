"""Engines that never wait, one after the other, decide as one that stays."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from storage.records import Kind, Stage, decode, encode
from tasks.context import Unit
from tasks.memory import GAP_S, Memory, Sights
from tasks.situation import Patience
from tests.tasks.world import (
    EPOCH,
    STAGE,
    Answer,
    Fate,
    Fault,
    FaultKind,
    JobPlan,
    Landing,
    Plan,
    World,
)

FOLDER = Path("/nonexistent/headrace-model")
TICK_S = 5.0


def ticking(*jobs: JobPlan, landings: tuple[Landing, ...] = (), faults: tuple[Fault, ...] = ()):
    plan = Plan(engines=1, jobs=jobs, landings=landings, faults=faults)
    return World(plan, FOLDER, tick_s=TICK_S)


def kinds(world: World) -> list[Kind]:
    attempts = world.open_ledger().attempts(STAGE)
    return [one.end.diagnosis.kind for one in attempts if one.end is not None]


@pytest.mark.parametrize(
    ("fate", "expected"),
    [
        (Fate.DONE, [Kind.DONE]),
        (Fate.RESUME, [Kind.TIME, Kind.DONE]),
        (Fate.NODE_FAIL, [Kind.HARDWARE, Kind.DONE]),
        (Fate.VANISH, [Kind.LOST, Kind.DONE]),
        (Fate.LINGER, [Kind.DONE]),
    ],
)
def test_ticks_find_out_what_takes_longer_to_see_than_one_of_them_looks(
    fate: Fate, expected: list[Kind]
) -> None:
    world = ticking(JobPlan(run_s=20.0, fate=fate))
    world.run()
    world.check_rest()
    assert kinds(world) == expected


def test_a_sbatch_that_nobody_sees_land_is_doubted_over_several_ticks() -> None:
    world = ticking(landings=(Landing(answer=Answer.DOUBT, delays_s=(120.0,)),))
    world.run()
    assert kinds(world) == [Kind.LOST, Kind.DONE]


def test_a_tick_killed_at_any_call_leaves_nothing_to_run_twice() -> None:
    plain = ticking()
    plain.run()
    for step in range(1, plain.calls_of(0)):
        world = ticking(faults=(Fault(0, step, FaultKind.CRASH),))
        world.run()
        world.check_rest()
        assert sum(world.sbatches.values()) == len(world.sbatches)


def test_time_without_ticks_is_not_time_in_which_a_job_was_silent() -> None:
    """A night without cron is one gap, and an outage none at all."""
    seen = Sights(stage=STAGE, at=EPOCH)
    assert seen.watched_s(EPOCH + timedelta(seconds=20)) == 20.0
    assert seen.watched_s(EPOCH + timedelta(hours=9)) == GAP_S
    assert seen.watched_s(EPOCH - timedelta(hours=9)) == 0.0
    assert replace(seen, at=None).watched_s(EPOCH) == 0.0
    assert Patience().doubt_s <= GAP_S


def test_an_outage_leaves_no_time_that_the_next_tick_could_take_for_silence() -> None:
    world = ticking(JobPlan(run_s=300.0))
    world.start_engine(0, delay_s=0.0)
    marks: dict[float, datetime | None] = {}

    def mark() -> None:
        assert world.memory.sights is not None
        marks[world.now_s] = world.memory.sights.at

    world.begin(lambda: setattr(world.store, "down_until_s", 100.0), delay_s=20.0)
    for delay_s in (19.0, 60.0):
        world.begin(mark, delay_s=delay_s)
    world.go_on()
    assert marks[19.0] is not None
    assert marks[60.0] is None


def test_a_look_that_ends_in_an_outage_leaves_no_time_either() -> None:
    def second_tick(*faults: Fault) -> tuple[int, Sights]:
        """The calls until a moment after it, and what it has left behind."""
        world = ticking(JobPlan(run_s=100.0), faults=faults)
        world.start_engine(0, delay_s=0.0)
        seen: list[tuple[int, Sights]] = []

        def mark() -> None:
            assert world.memory.sights is not None
            seen.append((world.calls_of(0), world.memory.sights))

        world.begin(mark, delay_s=1.5 * TICK_S)
        world.go_on()
        return seen[0]

    calls, sights = second_tick()
    assert sights.at is not None
    _, sights = second_tick(Fault(0, calls, FaultKind.ERROR))
    assert sights.at is None


def test_what_was_over_is_remembered_for_each_unit_and_its_nodes() -> None:
    told: list[Memory] = []
    world = ticking(JobPlan(fate=Fate.DONE))
    world.run()
    attempts = world.open_ledger().attempts(STAGE)
    unit = Unit(name="u0", entry="none")
    memory = Memory(changed=told.append)
    assert memory.past_of(Stage.SHARD, [unit], ()) == frozenset()
    assert memory.past_of(Stage.SHARD, [unit], attempts) == frozenset()
    elsewhere = replace(unit, node_list=("n1",))
    assert memory.past_of(Stage.SHARD, [elsewhere], attempts) == {1}
    assert len(told) == 2, "what must last was not told, or told without need"
    again = Memory(past=memory.past)
    assert again.past_of(Stage.SHARD, [elsewhere], ()) == {1}


def test_a_sight_survives_its_file() -> None:
    world = ticking(JobPlan(run_s=20.0))
    world.start_engine(0, delay_s=0.0)
    kept: list[Sights] = []
    world.begin(lambda: kept.append(world.memory.sights or Sights(stage=STAGE, at=None)), delay_s=9)
    world.go_on()
    assert kept[0].attempts
    assert decode(Sights, encode(kept[0])) == kept[0]
