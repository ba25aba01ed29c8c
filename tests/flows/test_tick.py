"""Ticks carry a run to its end as one engine would, and none of them waits."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from flows.console import Lines
from flows.spec import PipelineSpec
from flows.steps import run_stages
from flows.ticking import Standing, Ticked, tick
from headrace import command
from slurm.cluster import open_cluster
from storage.file_locks import FileLock
from tasks.context import RunContext
from tests.flows.attempts import record
from tests.flows.own_runs import Place, a_place

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with a_place(tmp_path_factory.mktemp("ticks")) as place:
        yield place


def ticked(
    spec: PipelineSpec, *, until: Callable[[Ticked], bool], again: bool = False
) -> list[Ticked]:
    """Ticks that never stay, as cron would start them, until one says what is waited for."""
    all_of_them = [tick(spec, eyes=Lines(), again=again, stay_s=0.0)]
    deadline = time.monotonic() + 90
    while not until(all_of_them[-1]):
        assert time.monotonic() < deadline, all_of_them[-1]
        time.sleep(0.2)
        all_of_them.append(tick(spec, eyes=Lines(), stay_s=0.0))
    return all_of_them


def is_over(one: Ticked) -> bool:
    return one.standing is not Standing.GOING_ON


def trains(one: Ticked) -> bool:
    return "train: attempt" in one.message and "running" in one.message


@pytest.fixture(scope="module")
def going_on(place: Place) -> PipelineSpec:
    """A run that trains until its end is let come. Its first ticks were killed, each a little later
    than the one before."""
    spec = place.spec("on")
    for delay_s in (0.9, 1.3, 1.8, 2.4):
        process = subprocess.Popen(command("tick", "on", "--spec", str(place.file(spec))))
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
    ticks = ticked(spec, until=trains)
    assert all(one.standing is Standing.GOING_ON for one in ticks)
    assert "look again in" in ticks[-1].message
    return spec


@pytest.fixture(scope="module")
def failed(place: Place) -> PipelineSpec:
    """A run that has a bug, before the tick that finds it out."""
    spec = place.spec("failing", "exit 81")
    ticked(spec, until=lambda one: one.message.startswith("train:"))
    return spec


def state_of(spec: PipelineSpec) -> Path:
    (state,) = (spec.workdir / spec.run).glob("tick.*.json")
    return state


def shell(*arguments: str) -> tuple[int, str]:
    """Exit code and words of the command as cron gives it."""
    done = subprocess.run(
        command("tick", *arguments, "--quiet"),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_stage_that_the_request_has_finished_is_not_looked_at_again(place: Place) -> None:
    """Its record may have expired since, its inputs may have changed: the run has begun with it."""
    spec = place.spec("finished")
    done = {stage: record(stage) for stage in spec.stages}
    nothing_is_asked = cast("RunContext", None)
    assert run_stages(nothing_is_asked, spec, spec.stages, done=done) == done


def test_two_ticks_do_not_overlap(going_on: PipelineSpec) -> None:
    with FileLock(state_of(going_on).with_suffix(".lock")) as other:
        assert other.try_acquire()
        told = tick(going_on, eyes=Lines(), stay_s=0.0)
    assert told.message == "another tick is at work"


def test_ticks_alone_bring_a_run_to_its_end_and_begin_nothing_twice(
    place: Place, going_on: PipelineSpec
) -> None:
    shell("on", "--spec", str(place.file(going_on)))
    assert shell("on") == (75, "")
    place.let_end("on")
    ends = [shell("on")]
    while ends[-1][0] == 75 and len(ends) < 100:
        ends.append(shell("on"))
    assert ends[-1][0] == 0
    assert "run on is complete" in ends[-1][1]
    assert shell("on") == (0, "")
    for stage in going_on.stages:
        done = [one for one in place.attempts(going_on, stage) if one.exit is not None]
        assert len(done) == 1, (stage, done)
    assert not open_cluster(going_on.cluster, workdir=going_on.workdir).queue()


def test_a_run_that_gave_up_is_tried_again_only_when_asked(
    place: Place, failed: PipelineSpec
) -> None:
    before = state_of(failed).read_bytes()
    last = ticked(failed, until=is_over)[-1]
    assert (last.standing, last.is_news) == (Standing.FAILED, True)
    after = tick(failed, eyes=Lines(), stay_s=0.0)
    assert (after.standing, after.is_news) == (Standing.FAILED, False)
    assert "--again" in after.message

    # A tick that is killed may have closed the attempt and not have written down that it was that.
    state_of(failed).write_bytes(before)
    assert ticked(failed, until=is_over)[-1].standing is Standing.FAILED
    assert len(place.attempts(failed)) == 1

    assert ticked(failed, until=is_over, again=True)[-1].standing is Standing.FAILED
    assert len(place.attempts(failed)) == 2


def test_a_state_that_cannot_be_read_is_one_that_was_lost(
    place: Place, failed: PipelineSpec
) -> None:
    ticked(failed, until=is_over)
    before = len(place.attempts(failed))
    state_of(failed).write_text("{")
    assert ticked(failed, until=is_over)[-1].standing is Standing.FAILED
    assert len(place.attempts(failed)) == before + 1


def test_a_run_that_nobody_knows_is_a_wrong_argument(place: Place) -> None:
    done = subprocess.run(
        command("tick", "unheard-of"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "unheard-of" in done.stderr
