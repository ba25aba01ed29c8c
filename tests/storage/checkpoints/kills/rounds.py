"""A round: a training is carried to its last step, attempt after attempt, whatever happens to it.

This process only forks and waits; it plays the engine (intents, floors, ends), srun and the batch
step. What it asserts are the promises: where an attempt goes on from, and every loss.
"""

from __future__ import annotations

import heapq
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from random import Random
from typing import Any, TypeVar

from storage.checkpoint_records import CommitRef
from storage.checkpoints.commits import commit_places, counting_commits, newest_commit
from storage.errors import StoreError
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.records import Action, Decision, Diagnosis, End, Intent, Kind, Stage, Why, new_nonce
from tests.storage.checkpoints.kills.disks import Disks, NearSave
from tests.storage.checkpoints.kills.faults import Site
from tests.storage.checkpoints.kills.jobs import JobProcesses
from tests.storage.checkpoints.kills.judging import judge
from tests.storage.checkpoints.kills.plans import Plan
from tests.storage.checkpoints.kills.processes import fork
from tests.storage.checkpoints.kills.promises import Promises
from tests.storage.checkpoints.kills.reports import Parent, Report
from tests.storage.checkpoints.kills.training import LAST_STEP

T = TypeVar("T")

MOST_ATTEMPTS = 12
ATTEMPT_DEADLINE_S = 60.0
STORE_DEADLINE_S = 90.0
SETTLE_S = 3.0
POLL_S = 0.003
LOOK_S = 0.03


class Round:
    """Carries a plan out. Any broken promise is an AssertionError."""

    def __init__(self, parent: Parent, plan: Plan, *, lines: bool = False) -> None:
        self.report = Report(seed=plan.seed, has_disk=plan.disk is not None)
        self._parent = parent
        self._plan = plan
        self._lines = lines
        self._random = Random(f"carried out {plan.seed}")
        self._name = f"r{plan.seed}-{new_nonce()}"
        self._folder = parent.folder / self._name
        self._folder.mkdir(parents=True)
        self._ledger = Ledger(parent.for_round.adopt(), RunKeys(prefix="", run=self._name))
        self._jobs: list[JobProcesses] = []
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._heard = 0
        self._disks = (
            None if plan.disk is None else Disks(self._folder / "disk", plan.disk, run=self._name)
        )
        self._looked_at = 0.0
        self._promises = Promises(self._near)
        self._stood: dict[str, str] = {}
        self._restarting: int | None = None

    def run(self) -> Report:
        begin = time.monotonic()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            self._carry_out()
        except Exception as error:
            self.report.failure = f"{type(error).__name__}: {error}"
        finally:
            self._end_all()
        self.report.wall_s = time.monotonic() - begin
        if self.report.failure:
            self.report.story = self._story()
        return self.report

    def _carry_out(self) -> None:
        newest: CommitRef | None = None
        while newest is None or newest.step < LAST_STEP:
            number = len(self._jobs) + 1
            assert number <= MOST_ATTEMPTS, "no attempt comes to the end"
            job = self._start(number, floor=newest)
            self._attend(job)
            self._end(job)
            newest = self._newest()
            is_disturbed = job.abandoned is not None or job.plan.faults_of(number)
            assert is_disturbed or not job.is_good or _step(newest) == LAST_STEP, (
                f"attempt {number} came to its end undisturbed, and its last save is not committed"
            )
        if any(job.abandoned for job in self._jobs):
            self._settle_zombies()
            last = self._start(len(self._jobs) + 1, floor=newest, is_last=True)
            self._attend(last)
            assert self._promises.last_steps[last.number] == LAST_STEP
            self._end(last)
        if self._disks is not None:
            self._disks.judge(self._jobs)
        with self._insisting() as insist:
            self._require_unchanged()
            holdings = insist(lambda: judge(self._ledger, seed=self._plan.seed))
        self.report.commits = holdings.commits
        self.report.orphans = holdings.orphans
        self.report.orphan_bytes = holdings.orphan_bytes
        self._wait_for_server()
        self._ledger.store.delete(info.key for info in self._ledger.store.list(f"{self._name}/"))

    # What an engine does.

    def _start(
        self, number: int, *, floor: CommitRef | None, is_last: bool = False
    ) -> JobProcesses:
        """The last one only looks where a job would go on from, as a single rank."""
        intent = self._intent(number, floor)
        with self._insisting() as insist:
            insist(lambda: self._ledger.claim_intent(intent))
        job = JobProcesses(
            intent=intent,
            plan=Plan(seed=self._plan.seed, disk=self._plan.disk) if is_last else self._plan,
            world=1 if is_last else self._plan.world(number),
            disk_of_node=None if self._disks is None else self._disks.of_node,
            has_flushers=not is_last,
            folder=self._folder,
            spec=self._parent.spec,
            made=self._parent.for_children,
            at=self._at,
            random=self._random,
            lines=self._lines,
        )
        self._jobs.append(job)
        self.report.attempts = number
        job.start()
        self._wake("start")
        return job

    def _intent(self, number: int, floor: CommitRef | None) -> Intent:
        return Intent(
            run=self._name,
            stage=Stage.TRAIN,
            unit="train",
            attempt=number,
            token=f"kills-{self._name}-{number}",
            nonce=new_nonce(),
            cluster="local",
            user="me",
            why=Why.FIRST if number == 1 else Why.RESUMED,
            after=None if number == 1 else number - 1,
            nodes=self._plan.nodes,
            ranks_per_node=1,
            fingerprint="f",
            floor=floor,
            created_at=datetime.now(UTC),
        )

    def _end(self, job: JobProcesses) -> None:
        for folder in job.buffer_folders:
            left = job.abandoned is not None or job.node_died or not job.has_flushers
            assert left or not folder.path.exists(), f"{folder.path} was left behind"
        record = End(
            diagnosis=Diagnosis(kind=Kind.UNKNOWN),
            decision=Decision(action=Action.RESUME, reason="a kill"),
            by="round",
            nonce=new_nonce(),
            at=datetime.now(UTC),
        )
        with self._insisting() as insist:
            insist(lambda: self._ledger.claim_end(job.intent, record))
            if self._disks is not None:
                known = insist(lambda: self._ledger.attempt(Stage.TRAIN, job.number))
                resume = None if known is None else known.resume
                self.report.from_disk += resume is not None and resume.from_disk
                if job.is_over and job.dead_node:
                    self._disks.lose(job.dead_node)

    def _newest(self) -> CommitRef | None:
        """The next intent's floor: never older than what was reported or could be seen."""
        self._observe()
        with self._insisting() as insist:
            newest = insist(lambda: newest_commit(self._ledger))
        at_least = self._promises.newest()
        assert _step(newest) >= at_least, f"{newest}, and step {at_least} was reported before"
        return newest

    def _observe(self) -> None:
        """What anybody can see in the store at this moment is a promise to whoever loads later."""
        with self._insisting() as insist:
            places = insist(lambda: list(commit_places(self._ledger)))
            now = time.monotonic()
            self._listen()
            for step, attempt in places:
                self._promises.see(attempt=attempt, step=step, at=now)
            infos = insist(lambda: list(self._ledger.store.list(self._ledger.keys.checkpoints)))
        self._stood |= {info.key: info.etag for info in infos}

    def _near(self) -> list[NearSave]:
        return [] if self._disks is None else self._disks.whole(self._plan.world)

    def _observe_disk(self) -> None:
        """As often as it costs little: what was whole once, and still is, must be found."""
        if self._disks is not None and time.monotonic() - self._looked_at > LOOK_S:
            saves = self._near()
            self._looked_at = now = time.monotonic()
            self._listen()
            self._promises.see_near(saves, at=now)
            if self._disks.is_shared and not any(job.abandoned for job in self._jobs):
                self._promises.require_near()

    def _require_unchanged(self) -> None:
        """Nothing that once stood was replaced by something else, or went away."""
        infos = self._ledger.store.list(self._ledger.keys.checkpoints)
        stands = {info.key: info.etag for info in infos}
        changed = [key for key, etag in self._stood.items() if stands.get(key) != etag]
        assert not changed, f"was overwritten or removed: {changed}"

    # What srun, the batch step and the kernel do.

    def _attend(self, job: JobProcesses) -> None:
        deadline = time.monotonic() + ATTEMPT_DEADLINE_S
        while not (job.is_over or job.abandoned):
            assert time.monotonic() < deadline, f"attempt {job.number} hangs"
            self._tick()
            job.leave_if_ranks_are_over()
            time.sleep(POLL_S)
        self._tick()

    def _tick(self) -> None:
        self._reap()
        self._listen()
        self._observe_disk()
        while self._agenda and self._agenda[0][0] <= time.monotonic():
            heapq.heappop(self._agenda)[2]()

    def _at(self, after_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time.monotonic() + after_s, next(self._order), act))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._restarting:
                self._restarting = None
                assert status == 0, "the server does not come back"
                continue
            job, child = next(
                (job, child) for job in self._jobs for child in job.children if child.pid == pid
            )
            # What it said comes first: whether it met its fault decides what its end means.
            self._listen()
            if os.WIFSTOPPED(status):
                job.stopped(child)
            else:
                job.ended(child, os.waitstatus_to_exitcode(status))

    def _settle_zombies(self) -> None:
        """Those that still sleep wake, and may do what they can, until they leave or are killed."""
        zombies = [job for job in self._jobs if job.abandoned]
        counted = counting_commits(self._ledger)
        self._observe()
        for job in zombies:
            self.report.woken += job.wake()
        self._wait_until(lambda: all(c.code is not None for job in zombies for c in job.ranks))
        for job in zombies:
            job.kill(job.ranks)
            job.tell_to_leave()
        self._wait_until(lambda: all(job.is_over for job in zombies))
        for job in zombies:
            job.kill(job.children)
        self._wait_until(lambda: all(c.code is not None for job in zombies for c in job.children))
        now = counting_commits(self._ledger)
        assert now == counted, f"zombies changed what counts: {counted} is now {now}"

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SETTLE_S
        while not is_so() and time.monotonic() < deadline:
            self._tick()
            time.sleep(POLL_S)

    def _wake(self, occasion: str) -> None:
        for job in self._jobs:
            if job.abandoned is not None and job.abandoned.wakes == occasion:
                self.report.woken += job.wake()

    def _end_all(self) -> None:
        for job in self._jobs:
            job.kill(job.children)
        for job in self._jobs:
            for child in job.children:
                if child.code is None:
                    os.waitpid(child.pid, 0)
            for folder in job.buffer_folders:
                folder.remove()
        self._wait_for_server()

    # What the server goes through.

    def _kill_server(self) -> None:
        if self._restarting is not None:
            return
        pid = self._parent.server.status().pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            self.report.server_kills += 1
        log = self._folder / "server.log"
        self._restarting = fork(self._start_server, log=log)

    def _start_server(self) -> None:
        self._parent.server.ensure()

    def _wait_for_server(self) -> None:
        if self._restarting is not None:
            os.waitpid(self._restarting, 0)
            self._restarting = None

    @contextmanager
    def _insisting(self) -> Iterator[Callable[[Callable[[], T]], T]]:
        """What the engine asks of the store it asks again, while a server is on its way back."""

        def insist(ask: Callable[[], T]) -> T:
            deadline = time.monotonic() + STORE_DEADLINE_S
            while True:
                try:
                    return ask()
                except StoreError:
                    if not self._plan.server_kills_s or time.monotonic() > deadline:
                        raise
                time.sleep(0.1)

        yield insist

    # What the processes say.

    def _listen(self) -> None:
        path = self._folder / "events.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._heard)
            told = file.read()
        whole = told[: told.rfind(b"\n") + 1]
        self._heard += len(whole)
        for line in whole.splitlines():
            event = json.loads(line)
            self._jobs[event["attempt"] - 1].heard(event)
            self._judge(event)

    def _judge(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "line":
            site = Site(event["role"], event["file"], event["line"], event["times"])
            self.report.sites.append(site)
        elif kind == "met":
            self.report.met.append(event["fault"])
        elif kind == "resumed" and not self._promises.last_steps:
            for after_s in self._plan.server_kills_s:
                self._at(after_s, self._kill_server)
        self._promises.hear(event)
        self.report.resumes = self._promises.resumes
        is_commit = kind == "outcome" and event["result"] == "committed"
        self._wake("committed" if is_commit else kind)

    def _story(self) -> str:
        logs = (
            f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}"
            for log in sorted(self._folder.glob("*.log"))
        )
        events = self._folder / "events.jsonl"
        lines = events.read_text().splitlines() if events.exists() else []
        said = "\n".join(line[:400] for line in lines if '"line"' not in line)
        return f"{self._plan}\n{said}\n" + "\n".join(logs)


def _step(ref: CommitRef | None) -> int:
    return 0 if ref is None else ref.step
