"""Engines that die or freeze at any line between an intent and its end, and sbatch that lies.

Whatever happens, a second engine completes the run; each attempt has at most one sbatch and one job
that worked, and jobs of attempts that were given up ran no step.
"""

from __future__ import annotations

import itertools
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from slurm.spec import ClusterSpec
from storage.attempts import Attempt
from storage.records import Action
from tests.faults import wrappers
from tests.faults.engine import EngineProcess, Fault, Line, Task
from tests.faults.runs import ENTRIES, STAGE
from tests.faults.sites import Site
from tests.faults.wrappers import sbatch_calls

pytestmark = [pytest.mark.slurm, pytest.mark.s3, pytest.mark.timeout(600)]

SIDE_BY_SIDE = 6
SHORT_POINTS = 6
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
LATE_S = (1, 5, 15, 45, 120)
DEADLINE_S = 200.0


@dataclass(frozen=True)
class Play:
    """One run that is to be carried out under a fault."""

    site: Site
    task: Task
    path: Path
    """Where its `sbatch` is, which counts the calls."""

    @property
    def name(self) -> str:
        return self.task.run

    def engine(self, fault: Fault | None = None, *, record: bool = False) -> EngineProcess:
        return EngineProcess(replace(self.task, fault=fault, record=record), path=self.path)

    def attempts(self) -> tuple[Attempt, ...]:
        return self.task.open_ledger().attempts(STAGE)

    def workers(self) -> dict[int, set[str]]:
        """By attempt, the jobs whose ranks came to their work."""
        found: dict[int, set[str]] = {}
        for mark in (self.task.workdir / self.name / STAGE).rglob("worked.*.*"):
            attempt = next(part for part in mark.parts if part.isdigit() and len(part) == 4)
            found.setdefault(int(attempt), set()).add(mark.name.split(".")[1])
        return found

    def check(self) -> None:
        """The promises, looked up in the ledger, in the wrapper's log and at Slurm."""
        attempts = self.attempts()
        assert all(one.end is not None for one in attempts), self.name
        calls = Counter(sbatch_calls(self.path))
        assert all(count == 1 for count in calls.values()), (self.name, calls)
        actions = [one.end.decision.action for one in attempts if one.end is not None]
        assert actions[-1] is Action.DONE, (self.name, actions)
        assert actions.count(Action.DONE) == 1, (self.name, actions)
        worked = self.workers()
        for one in attempts:
            job = one.start.job if one.start is not None else None
            allowed = set() if job is None else {job.job_id}
            assert worked.get(one.number, set()) <= allowed, (self.name, one.number, worked)

    def check_slurm(self, jobs: list[tuple[str, str, str]]) -> None:
        """No job but the start's winner has a step of its own, whatever became of it later."""
        for one in self.attempts():
            job = one.start.job if one.start is not None else None
            winner = None if job is None else job.job_id
            stepped = {
                identity.partition(".")[0]
                for identity, name, _ in jobs
                if name == one.intent.token and identity.partition(".")[2].isdigit()
            }
            assert stepped <= {winner}, (self.name, one.number, stepped)


def make_play(site: Site, name: str, path: Path | None = None) -> Play:
    run = f"{name}-{secrets.token_hex(4)}"
    task = Task(
        run=run,
        workdir=site.workdir,
        store=site.store,
        cluster=ClusterSpec(
            kind="slurm",
            slurm_conf=site.cluster.slurm_conf,
            memory_per_node="200M",
            time_limit_min=10,
            signal_lead_s=20,
            env={"PYTHONPATH": str(ENTRIES)},
        ),
        snapshot=site.snapshot,
        payload={"part": "wait", "faulty_until": 0},
    )
    return Play(site=site, task=task, path=path or wrappers.honest(site.workdir / f"bin-{run}"))


def under(play: Play, fault: Fault) -> bool:
    """One engine meets the fault, a second completes the run, and the first goes on if it can.

    Returns whether the fault was met: a line may not be come to in every run.
    """
    first = play.engine(fault)
    try:
        met = first.wait_for_fault()
        play.engine().result()
        if met and fault.signal == signal.SIGSTOP:
            first.go_on()
            first.result()
    finally:
        first.kill()
    play.check()
    return met


def check_slurm(site: Site, plays: list[Play]) -> None:
    """When all jobs have left the queue: what sacct says of each."""
    names = {one.intent.token for play in plays for one in play.attempts()}
    deadline = time.monotonic() + DEADLINE_S
    while names & set(site.slurm("squeue", "-h", "-t", "PD,R,CG", "-o", "%j").split()):
        assert time.monotonic() < deadline, "jobs do not leave the queue"
        time.sleep(0.5)
    jobs: list[tuple[str, str, str]] = []
    name = ""
    listed = site.slurm("sacct", "-D", "-nP", "--starttime=now-1days", "-o", "JobID,JobName,State")
    for line in listed.splitlines():
        identity, own_name, state = line.split("|")
        # A step bears a name of its own; it follows its job.
        name = name if "." in identity else own_name
        jobs.append((identity, name, state))
    for play in plays:
        play.check_slurm(jobs)


@pytest.fixture(scope="module")
def lines(site: Site) -> tuple[Line, ...]:
    """The lines that an engine goes through from an intent to its end, in order."""
    play = make_play(site, "record")
    told = play.engine(record=True).result()
    play.check()
    found = tuple(Line(file, number) for file, number in told["lines"])
    assert {"tasks/deeds.py", "storage/ledger.py", "slurm/submit.py"} <= {one.file for one in found}
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(SIDE_BY_SIDE)
    yield threads
    threads.shutdown(cancel_futures=True)


def at_lines(
    site: Site, pool: ThreadPoolExecutor, faults: Sequence[Fault]
) -> list[tuple[Play, Future[bool]]]:
    """A run under each fault, a few side by side."""
    plays = [make_play(site, f"line-{number}") for number in range(len(faults))]
    return [(one, pool.submit(under, one, fault)) for one, fault in zip(plays, faults, strict=True)]


@pytest.fixture(scope="module")
def under_way(
    site: Site, lines: tuple[Line, ...], pool: ThreadPoolExecutor
) -> list[tuple[Play, Future[bool]]]:
    """A few lines of all, evenly spread, with each signal in turn."""
    step = len(lines) // SHORT_POINTS
    points = lines[step // 2 :: step][:SHORT_POINTS]
    faults = [
        Fault(line=line, signal=number)
        for line, number in zip(points, itertools.cycle(SIGNALS), strict=False)
    ]
    return at_lines(site, pool, faults)


def test_an_sbatch_that_times_out_after_it_landed_is_found_again(
    site: Site, under_way: list[tuple[Play, Future[bool]]]
) -> None:
    play = make_play(site, "timed-out", wrappers.timing_out(site.workdir / "bin-timed-out"))
    assert play.engine().result()["attempt"] == 1
    play.check()
    check_slurm(site, [play])


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_engine_is_killed_while_sbatch_is_on_its_way(
    site: Site, when: str, under_way: list[tuple[Play, Future[bool]]]
) -> None:
    """sbatch outlives the engine that called it, and lands a second later, or has landed."""
    folder = site.workdir / f"bin-orphan-{when}"
    path = (
        wrappers.orphaned(folder, delay_s=1)
        if when == "before"
        else wrappers.followed_by(folder, "kill -9 $PPID")
    )
    play = make_play(site, f"orphan-{when}", path)
    first = play.engine()
    try:
        assert first.wait_for_fault()
        play.engine().result()
    finally:
        first.kill()
    play.check()
    check_slurm(site, [play])
    assert len(sbatch_calls(path)) == len(play.attempts())


def test_an_engine_dies_or_freezes_between_an_intent_and_its_end(
    site: Site, under_way: list[tuple[Play, Future[bool]]]
) -> None:
    met = [future.result() for _, future in under_way]
    assert any(met)
    check_slurm(site, [play for play, _ in under_way])


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_an_engine_dies_or_freezes_at_every_line(
    site: Site, lines: tuple[Line, ...], pool: ThreadPoolExecutor
) -> None:
    """It is killed at one line and stopped at the next: neighbours have little between them."""
    signals = itertools.cycle(SIGNALS)
    faults = [Fault(line=line, signal=next(signals)) for line in lines]
    played = at_lines(site, pool, faults)
    met = [future.result() for _, future in played]
    assert sum(met) > len(met) * 0.9
    check_slurm(site, [play for play, _ in played])


def controller_dies_after_its_answer(site: Site, name: str) -> None:
    """The controller may have forgotten the job, run it again, or give its id to the next."""
    pid = site.cluster.pid("slurmctld")
    path = wrappers.followed_by(site.workdir / f"bin-{name}", f"kill -9 {pid}")
    play = make_play(site, name, path)
    engine = play.engine()
    try:
        deadline = time.monotonic() + DEADLINE_S
        while site.cluster.pid("slurmctld") is not None:
            assert time.monotonic() < deadline, "the controller was not killed"
            time.sleep(0.05)
        site.cluster.start("slurmctld")
        engine.result()
    finally:
        engine.kill()
        site.cluster.up()
    play.check()
    check_slurm(site, [play])


def test_the_controller_is_killed_right_after_its_answer(
    site: Site, under_way: list[tuple[Play, Future[bool]]]
) -> None:
    wait(future for _, future in under_way)
    controller_dies_after_its_answer(site, "ctld-killed")


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_the_controller_is_killed_right_after_its_answer_again_and_again(site: Site) -> None:
    for number in range(5):
        controller_dies_after_its_answer(site, f"ctld-killed-{number}")


@pytest.mark.campaign
def test_sbatch_lands_up_to_two_minutes_late(site: Site) -> None:
    plays = [
        make_play(
            site,
            f"late-{delay_s}",
            wrappers.late(site.workdir / f"bin-late-{delay_s}", delay_s=delay_s),
        )
        for delay_s in LATE_S
    ]
    for engine in [play.engine() for play in plays]:
        engine.result()
    time.sleep(max(LATE_S))
    check_slurm(site, plays)
    for play in plays:
        play.check()
        landed = [
            site.slurm("sacct", "-nXP", f"--name={one.intent.token}", "--format=JobID")
            for one in play.attempts()
        ]
        assert all(landed), (play.name, landed)
