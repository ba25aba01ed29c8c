"""A small world in which the real loop runs against a simulated Slurm, one call at a time.

Engines and jobs are greenlets that give up control at every call to the store, to the cluster and
to the clock. Which one goes on, who is paused, who dies and what an sbatch does is drawn before, so
a failure can be run again. Time passes only while everybody waits.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any, TypeVar, cast

from greenlet import getcurrent, greenlet

from slurm.batch import Placement, pass_start
from slurm.cluster import (
    JobObservation,
    JobState,
    NodeState,
    Resources,
    SubmitDoubtful,
    SubmitLimited,
)
from slurm.snapshot import Snapshot
from slurm.spec import ClusterSpec, RetrySpec
from storage.errors import HeadraceError, SlurmError, StoreError, SubmitRejected
from storage.job import JobDescription
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.object_store import Created, ObjectInfo, ObjectStore
from storage.records import Exit, ExitCode, Heartbeat, Intent, Stage, decode, encode
from storage.spec import StoreSpec
from tasks.context import RunContext, Unit
from tasks.engine import Engine
from tasks.eyes import Eyes, Unseen
from tasks.memory import Memory
from tasks.pauses import Paused
from tasks.runner import UnitResult, carry_out
from tasks.situation import Patience

T = TypeVar("T")

EPOCH = datetime(2040, 1, 1, tzinfo=UTC)
RUN, STAGE, FINGERPRINT = "model", Stage.SHARD, "f.0"
NODES = tuple(f"n{index}" for index in range(1, 9))
MOST_STEPS = 60_000
RESTART_S = 3.0
BEAT_S = 3.0


class ViolationError(AssertionError):
    """A promise of the protocol is broken."""


class Killed(BaseException):
    """`kill -9`: passes through every handler of the code that it hits."""


class FaultKind(Enum):
    CRASH = "crash"
    PAUSE = "pause"
    ERROR = "error"


@dataclass(frozen=True)
class Fault:
    """What befalls an engine at one of its calls, counted over all of its lives."""

    engine: int
    at_step: int
    kind: FaultKind
    seconds: float = 0.0


class Answer(Enum):
    """What sbatch tells its caller."""

    JOB_ID = "job id"
    DOUBT = "doubt"
    REFUSAL = "refusal"
    LIMIT = "limit"


@dataclass(frozen=True)
class Landing:
    """What one sbatch does: its answer, and when (if ever) how many jobs are queued."""

    answer: Answer = Answer.JOB_ID
    delays_s: tuple[float, ...] = (0.0,)
    unseen_s: float = 0.0


class Fate(Enum):
    """How a job that passed the start ends."""

    DONE = "done"
    RESUME = "resume"
    NODE_FAIL = "node fail"
    VANISH = "vanish"
    LINGER = "linger"
    FREEZE = "freeze"
    BUG = "bug"


@dataclass(frozen=True)
class JobPlan:
    queue_s: float = 1.0
    run_s: float = 2.0
    fate: Fate = Fate.DONE
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """All that is drawn for one life of the world."""

    seed: int = 0
    engines: int = 2
    units: int = 1
    elements: int = 1
    stagger_s: float = 0.0
    pause_rate: float = 0.0
    faults: tuple[Fault, ...] = ()
    landings: tuple[Landing, ...] = ()
    jobs: tuple[JobPlan, ...] = ()


@dataclass(eq=False)
class Actor:
    """Whoever is scheduled. `engine` is the slot of an engine, None for jobs and landings."""

    body: greenlet
    engine: int | None = None
    wake_at_s: float = 0.0
    budget: int = 0
    killed: bool = False


@dataclass(eq=False)
class Job:
    job_id: str
    description: JobDescription
    plan: JobPlan
    seen_from_s: float
    element: int | None = None
    state: JobState = JobState.PENDING
    raw_state: str = "PENDING"
    exit_code: str = ""
    node: str = ""
    actor: Actor | None = None

    def end(self, raw_state: str, code: int = 0) -> None:
        if self.state is not JobState.ENDED:
            self.state, self.raw_state = JobState.ENDED, raw_state
            self.exit_code = f"{code}:0"


@dataclass
class World:
    plan: Plan
    folder: Path
    obeys_start: bool = True
    may_fail: bool = False
    tolerate: bool = False
    fingerprint: str = FINGERPRINT
    eyes: Eyes = field(default_factory=Unseen)
    tick_s: float | None = None
    """Engines that leave where others wait, and that are started again after so many seconds."""
    memory: Memory = field(default_factory=Memory)
    units: tuple[Unit, ...] = ()
    now_s: float = 0.0
    objects: dict[str, bytes] = field(default_factory=dict)
    results: dict[int, Mapping[str, UnitResult]] = field(default_factory=dict)
    failures: dict[int, HeadraceError] = field(default_factory=dict)
    pauses: list[Paused] = field(default_factory=list)
    sbatches: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    passed: dict[str, list[Job]] = field(default_factory=lambda: defaultdict(list))
    parts: dict[str, set[int | None]] = field(default_factory=lambda: defaultdict(set))
    """Which elements' parts of a unit are done for good, as a shard's tasks are."""
    refused: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._random = Random(self.plan.seed)
        self._faults = {(one.engine, one.at_step): one for one in self.plan.faults}
        self._landings = iter(self.plan.landings)
        self._job_plans = iter(self.plan.jobs)
        self._job_ids = itertools.count(1)
        self._actors: dict[greenlet, Actor] = {}
        self._steps: dict[int, int] = defaultdict(int)
        self._scheduler = getcurrent()
        self.store = MemoryStore(self)
        self.cluster = SimulatedSlurm(self)
        self.keys = RunKeys(prefix="", run=RUN)
        if not self.units:
            names = (f"u{index}" for index in range(self.plan.units))
            self.units = tuple(
                Unit(name=name, entry="none", elements=self.plan.elements) for name in names
            )

    def open_ledger(self) -> Ledger:
        return Ledger(cast("ObjectStore", self.store), self.keys)

    def nonce(self) -> str:
        return f"{self._random.getrandbits(64):016x}"

    # The schedule

    def run(self) -> None:
        """Lets everybody live until all engines have a result and no job is left."""
        for index in range(self.plan.engines):
            self.start_engine(index, delay_s=index * self.plan.stagger_s)
        self.go_on()

    def go_on(self) -> None:
        """Lets those who are there live to their ends."""
        for _ in range(MOST_STEPS):
            if not self._actors:
                return
            ready = [one for one in self._actors.values() if one.wake_at_s <= self.now_s]
            if not ready:
                self.now_s = min(one.wake_at_s for one in self._actors.values())
                continue
            actor = self._random.choice(ready)
            actor.budget = self._random.choice((1, 1, 2, 3, 8, 30))
            actor.body.switch()
            if actor.body.dead:
                del self._actors[actor.body]
        raise ViolationError(f"nobody comes to an end within {MOST_STEPS} steps: {self.told()}")

    def begin(
        self, body: Callable[[], None], *, delay_s: float, engine: int | None = None
    ) -> Actor:
        actor = Actor(
            body=greenlet(body, self._scheduler), engine=engine, wake_at_s=self.now_s + delay_s
        )
        self._actors[actor.body] = actor
        return actor

    def sleep(self, seconds: float) -> None:
        actor = self._actors[getcurrent()]
        actor.wake_at_s = self.now_s + seconds
        self._yield(actor)

    def call(self, act: Callable[[], T], error: type[Exception]) -> T:
        """One call that anything may happen to, before it has its effect and after."""
        self._step(error)
        result = act()
        self._step(error)
        return result

    def _step(self, error: type[Exception]) -> None:
        actor = self._actors.get(getcurrent())
        if actor is None:
            return
        fault = None
        if actor.engine is not None:
            self._steps[actor.engine] += 1
            fault = self._faults.get((actor.engine, self._steps[actor.engine]))
        pause_s = 0.0
        if fault is not None and fault.kind is FaultKind.PAUSE:
            pause_s = fault.seconds
        elif self._random.random() < self.plan.pause_rate:
            pause_s = self._random.choice((1.0, 5.0, 20.0, 60.0))
        actor.budget -= 1
        if pause_s or actor.budget < 0:
            actor.wake_at_s = self.now_s + pause_s
            self._yield(actor)
        if fault is not None and fault.kind is FaultKind.CRASH:
            raise Killed
        if fault is not None and fault.kind is FaultKind.ERROR:
            raise error("the model's fault")

    def _yield(self, actor: Actor) -> None:
        self._scheduler.switch()
        if actor.killed:
            raise Killed

    # Engines

    def start_engine(self, index: int, *, delay_s: float) -> None:
        self.begin(lambda: self._live(index), delay_s=delay_s, engine=index)

    def _live(self, index: int) -> None:
        context = RunContext(
            run=RUN,
            workdir=self.folder,
            cluster=self.cluster,
            cluster_spec=ClusterSpec(),
            retry=RetrySpec(backoff_s=1.0, backoff_max_s=2.0, lost_after_s=8.0, unknown=8, site=8),
            store=StoreSpec(),
            ledger=self.open_ledger(),
            snapshot=Snapshot(path=self.folder, digest="d", git_commit=None, git_dirty=None),
            eyes=self.eyes,
        )
        engine = Engine(
            user="model",
            name=f"engine {index}",
            clock=WorldClock(self, skew_s=7.0 * index),
            nonce=self.nonce,
            patience=Patience(
                doubt_s=4.0, linger_s=2.0, settle_s=2.0, cancel_s=3.0, hopeless_s=5.0
            ),
        )
        if self.tick_s is not None:
            engine = replace(engine, memory=self.memory, leaves_at_s=self.now_s)
        try:
            self.results[index] = carry_out(
                context,
                STAGE,
                self.units,
                fingerprint=self.fingerprint,
                tolerate=self.tolerate,
                engine=engine,
            )
        except Killed:
            self.start_engine(index, delay_s=RESTART_S)
        except Paused as pause:
            assert self.tick_s is not None
            self.pauses.append(pause)
            self.start_engine(index, delay_s=self.tick_s)
        except HeadraceError as error:
            if not self.may_fail:
                raise ViolationError(f"engine {index} gave up: {error}; {self.told()}") from error
            self.failures[index] = error

    # Jobs

    def land(self, description: JobDescription) -> str:
        """What the one sbatch does; returns the id of the (first) job."""
        token = description.intent.token
        self.sbatches[token] += 1
        if self.sbatches[token] > 1:
            raise ViolationError(f"sbatch was called {self.sbatches[token]} times for {token}")
        landing = next(self._landings, Landing())
        if landing.answer is Answer.REFUSAL:
            self.refused.add(token)
            raise SubmitRejected("required node not available")
        if landing.answer is Answer.LIMIT:
            self.refused.add(token)
            raise SubmitLimited("QOSMaxSubmitJobPerUserLimit")
        job_id = None
        for delay_s in landing.delays_s:
            landed_id, elements = str(next(self._job_ids)), description.intent.elements
            for element in range(elements):
                job = self.cluster.make_job(
                    landed_id,
                    description,
                    plan=next(self._job_plans, JobPlan()),
                    seen_from_s=self.now_s + delay_s + landing.unseen_s,
                    element=element if elements > 1 else None,
                )
                self.begin(lambda job=job: self.cluster.queue(job), delay_s=delay_s)  # type: ignore[misc]
            job_id = job_id or landed_id
        if landing.answer is Answer.DOUBT or job_id is None:
            raise SubmitDoubtful("sbatch was killed after 30 s")
        return job_id

    def carry(self, job: Job) -> None:
        """A job's life, from the queue to its end. The start is passed by the real code."""
        try:
            self.sleep(job.plan.queue_s)
            job.state, job.raw_state = JobState.RUNNING, "RUNNING"
            placement = Placement(
                job_id=job.job_id, restart_count=0, nodes=(job.node,), element=job.element
            )
            ledger = self.open_ledger()
            code = pass_start(ledger, job.description, placement)
            if code is not None and self.obeys_start:
                job.end("FAILED", code)
                return
            self._check_start(job)
            self._work(job, ledger)
        except Killed:
            job.end("CANCELLED")
        except StoreError:
            job.end("FAILED", ExitCode.STORAGE)

    def _check_start(self, job: Job) -> None:
        token = job.description.intent.token
        passed = self.passed[token]
        passed.append(job)
        if len({one.job_id for one in passed}) > 1:
            raise ViolationError(f"{len(passed)} jobs passed the start of {token}")
        if len({one.element for one in passed}) < len(passed):
            raise ViolationError(f"an element passed the start of {token} twice")
        attempt = self._peek(job.description.intent)
        if attempt.start is None or attempt.start.is_void:
            raise ViolationError(f"job {job.job_id} passed the start of {token}, which is void")

    def _work(self, job: Job, ledger: Ledger) -> None:
        intent, fate = job.description.intent, job.plan.fate
        until_s = self.now_s + job.plan.run_s
        for sequence in itertools.count(1):
            self._beat(ledger, job, sequence)
            if self.now_s >= until_s:
                break
            self.sleep(min(BEAT_S, until_s - self.now_s))
        if fate is Fate.FREEZE:
            self.sleep(30.0)
        if ledger.is_superseded(intent):
            job.end("FAILED", ExitCode.FENCED)
            return
        if fate is Fate.NODE_FAIL:
            self.cluster.dead_nodes.add(job.node)
            job.end("NODE_FAIL")
            return
        if fate is Fate.BUG:
            self._say_last(job, ledger, ExitCode.BAD_CONFIG)
            return
        if fate is Fate.VANISH:
            self.cluster.forget(job)
            return
        code = ExitCode.RESUME if fate is Fate.RESUME else ExitCode.DONE
        self._say_last(job, ledger, code)

    def _say_last(self, job: Job, ledger: Ledger, code: ExitCode) -> None:
        intent = job.description.intent
        record = Exit(
            code=code,
            element=job.element,
            rank=0,
            node=job.node,
            nonce=self.nonce(),
            at=self.time(),
            outputs={"by": job.job_id},
        )
        if code is ExitCode.DONE and job.element is not None:
            self.parts[intent.unit].add(job.element)
            if len(self.parts[intent.unit]) >= intent.elements:
                ledger.claim_exit(intent, record)
        ledger.claim_word(intent, record)
        if job.plan.fate is Fate.LINGER:
            self.sleep(100.0)
        job.end("COMPLETED" if code == ExitCode.DONE else "FAILED", code)

    def _beat(self, ledger: Ledger, job: Job, sequence: int) -> None:
        intent = job.description.intent
        beat = Heartbeat(
            node=job.node, element=job.element, sequence=sequence, step=sequence, at=self.time()
        )
        key = self.keys.heartbeat(intent.stage, intent.attempt, job.node, element=job.element)
        ledger.store.put(key, encode(beat))

    def kill(self, job: Job) -> None:
        job.end("CANCELLED")
        if job.actor is not None and not job.actor.body.dead:
            job.actor.killed = True
            job.actor.wake_at_s = self.now_s

    def calls_of(self, engine: int) -> int:
        """How many moments an engine has given to others so far."""
        return self._steps[engine]

    # What must hold

    def time(self) -> datetime:
        return EPOCH + timedelta(seconds=self.now_s)

    def check_create(self, key: str, body: bytes) -> None:
        """Seen by the model at the moment at which a record comes to stand."""
        if key.endswith(".end.json"):
            self._check_end(key)
        elif key.endswith(".exit.json"):
            self._check_exit(key, decode(Exit, body))
        elif "." not in key.removesuffix(".json") and "/attempts/" in key:
            intent = decode(Intent, body)
            for number in range(1, intent.attempt):
                earlier = self._peek(intent, number)
                if earlier.intent.unit == intent.unit and earlier.end is None:
                    raise ViolationError(
                        f"attempt {intent.attempt} was made while {number} was open: {self.told()}"
                    )

    def _check_end(self, key: str) -> None:
        number = int(key.rsplit("/", 1)[1].split(".", maxsplit=1)[0])
        attempt = self.peek(number)
        if attempt.start is None and attempt.intent.token not in self.refused:
            raise ViolationError(
                f"attempt {number} was closed while a job could still pass its start"
            )

    def _check_exit(self, key: str, word: Exit) -> None:
        """An element's failure is not the attempt's while others go on, unless they were ended."""
        number, *kind = key.rsplit("/", 1)[1].split(".")
        if word.element is None or word.code == ExitCode.DONE or kind[0] == "element":
            return
        attempt = self.peek(int(number))
        living = [
            one.element
            for one in self.passed[attempt.intent.token]
            if one.state is not JobState.ENDED
        ]
        if living and attempt.cancel is None:
            raise ViolationError(f"attempt {number} failed while elements {living} were at work")

    def check_rest(self) -> None:
        """What holds when everybody is done: nothing is open, and all engines saw the same end."""
        attempts = self.open_ledger().attempts(STAGE)
        left_open = [one.number for one in attempts if one.is_open]
        if left_open:
            raise ViolationError(f"attempts {left_open} have no end: {self.told()}")
        if set(self.results) != set(range(self.plan.engines)):
            raise ViolationError(f"only engines {sorted(self.results)} have a result")
        for unit in self.units:
            seen = {one[unit.name].attempt.number for one in self.results.values()}
            done = {one[unit.name].done for one in self.results.values()}
            if len(seen) != 1 or done != {True}:
                raise ViolationError(
                    f"the engines do not agree on {unit.name}: {seen}, done {done}"
                )

    def peek(self, number: int) -> Any:
        return Ledger(cast("ObjectStore", Shelf(self.objects)), self.keys).attempt(STAGE, number)

    def _peek(self, intent: Intent, number: int | None = None) -> Any:
        return self.peek(intent.attempt if number is None else number)

    def told(self) -> str:
        lines = [f"{self.now_s:.1f} s"]
        for number in itertools.count(1):
            one = self.peek(number)
            if one is None:
                return "\n".join(lines)
            end = None if one.end is None else (one.end.by, one.end.diagnosis, one.end.decision)
            lines.append(f"{number} {one.intent.unit} start={one.start} exit={one.exit} end={end}")
        raise AssertionError


class Shelf:
    """The store's conditional semantics, with nobody in between."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects

    def get_if_exists(self, key: str) -> bytes | None:
        return self.objects.get(key)

    def head(self, key: str) -> ObjectInfo | None:
        body = self.objects.get(key)
        return None if body is None else _info(key, body)

    def put(self, key: str, body: bytes) -> None:
        self.objects[key] = bytes(body)

    def create(self, key: str, body: bytes) -> Created:
        stored = self.objects.setdefault(key, body)
        return Created(won=stored == body, body=stored)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        keys = sorted(key for key in self.objects if key.startswith(prefix))
        return iter([_info(key, self.objects[key]) for key in keys if key > (start_after or "")])


def _info(key: str, body: bytes) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=len(body), etag="", last_modified=EPOCH)


class MemoryStore(Shelf):
    """The shelf as the actors see it: each call is a moment at which others may act."""

    def __init__(self, world: World) -> None:
        super().__init__(world.objects)
        self._world = world
        self.down_until_s = 0.0

    def get_if_exists(self, key: str) -> bytes | None:
        return self._ask(lambda: super(MemoryStore, self).get_if_exists(key))

    def head(self, key: str) -> ObjectInfo | None:
        return self._ask(lambda: super(MemoryStore, self).head(key))

    def put(self, key: str, body: bytes) -> None:
        self._ask(lambda: super(MemoryStore, self).put(key, body))

    def create(self, key: str, body: bytes) -> Created:
        return self._ask(lambda: self._create(key, body))

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return self._ask(lambda: super(MemoryStore, self).list(prefix, start_after=start_after))

    def _create(self, key: str, body: bytes) -> Created:
        is_new = key not in self.objects
        created = super().create(key, body)
        if is_new:
            self._world.check_create(key, body)
        return created

    def _ask(self, act: Callable[[], T]) -> T:
        def answer() -> T:
            if self._world.now_s < self.down_until_s:
                raise StoreError("connection refused")
            return act()

        return self._world.call(answer, StoreError)


class SimulatedSlurm:
    """A controller that tells what it knows, late, and keeps no promise that Slurm does not."""

    gates = True
    replaces_nodes = False
    max_elements = 100

    def __init__(self, world: World) -> None:
        self._world = world
        self._jobs: dict[str, list[Job]] = defaultdict(list)
        self._queued: list[Job] = []
        self.name = "model"
        self.down_until_s = 0.0
        self.dead_nodes: set[str] = set()

    def script(self, job: JobDescription, resources: Resources) -> str:
        raise NotImplementedError

    def submit(self, job: JobDescription, resources: Resources) -> str:
        return self._world.call(lambda: self._world.land(job), SubmitDoubtful)

    def observe(self, tokens: Sequence[str]) -> Mapping[str, JobObservation]:
        return self._ask(lambda: {one: self._observe(one) for one in tokens})

    def cancel(self, *, job_id: str, token: str) -> None:
        def act() -> None:
            for job in self._jobs[job_id]:
                if job.description.intent.token == token:
                    self._world.kill(job)

        self._ask(act)

    def nodes(self) -> tuple[NodeState, ...]:
        return self._ask(
            lambda: tuple(
                NodeState(
                    name=name,
                    raw_state="down*" if name in self.dead_nodes else "idle",
                    responds=name not in self.dead_nodes,
                    idle=name not in self.dead_nodes,
                )
                for name in NODES
            )
        )

    def _ask(self, act: Callable[[], T]) -> T:
        def answer() -> T:
            if self._world.now_s < self.down_until_s:
                raise SlurmError("slurmctld does not answer")
            return act()

        return self._world.call(answer, SlurmError)

    def make_job(
        self,
        job_id: str,
        description: JobDescription,
        *,
        plan: JobPlan,
        seen_from_s: float,
        element: int | None,
    ) -> Job:
        return Job(
            job_id=job_id,
            description=description,
            plan=plan,
            seen_from_s=seen_from_s,
            element=element,
        )

    def queue(self, job: Job) -> None:
        excluded = set(job.description.intent.excluded)
        job.node = next(node for node in NODES if node not in excluded)
        self._jobs[job.job_id].append(job)
        self._queued.append(job)
        job.actor = self._world.begin(lambda: self._world.carry(job), delay_s=0.0)

    def job(self, job_id: str) -> Job:
        (job,) = self._jobs[job_id]
        return job

    def forget(self, job: Job) -> None:
        job.end("FORGOTTEN")
        self._queued.remove(job)

    def _observe(self, token: str) -> JobObservation:
        found = [
            job
            for job in self._queued
            if job.description.intent.token == token and job.seen_from_s <= self._world.now_s
        ]
        if not found:
            return JobObservation(token=token, state=JobState.ABSENT)
        job = min(found, key=_liveliness)
        return JobObservation(
            token=token,
            state=job.state,
            job_id=job.job_id,
            raw_state=job.raw_state,
            reason=job.plan.reason if job.state is JobState.PENDING else "",
            exit_code=job.exit_code,
            nodes=(job.node,),
        )


def _liveliness(job: Job) -> tuple[int, bool]:
    order = (JobState.RUNNING, JobState.PENDING, JobState.ENDED)
    return order.index(job.state), job.raw_state == "COMPLETED"


class WorldClock:
    """The world's time, on a host whose own clock is set wrong by `skew_s`."""

    def __init__(self, world: World, *, skew_s: float) -> None:
        self._world = world
        self._skew = timedelta(seconds=skew_s)

    def now(self) -> datetime:
        return self._world.time() + self._skew

    def monotonic(self) -> float:
        return self._world.now_s

    def sleep(self, seconds: float) -> None:
        self._world.sleep(seconds)
