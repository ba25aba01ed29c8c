"""One attempt's processes and what their ends mean: what srun and the batch step do for a job."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from storage.checkpoints.buffers import BufferFolder
from storage.job import RankIdentity
from storage.records import ExitCode, Intent
from storage.spec import StoreSpec
from tests.storage.checkpoints.kills.faults import Deed, Fault
from tests.storage.checkpoints.kills.plans import Plan
from tests.storage.checkpoints.kills.processes import (
    SIGNALS,
    Job,
    UnusedStore,
    Voice,
    fork,
    run_flusher,
    run_rank,
)

RESTART_S = 0.02
KILL_ON_BAD_EXIT_S = 0.05
NOWHERE = Path("/nowhere")

At = Callable[[float, Callable[[], None]], None]


@dataclass(kw_only=True)
class Child:
    """A process. `code` is None as long as it lives, and negative for a signal."""

    pid: int
    role: str
    incarnation: int
    fault: Fault | None
    met: bool = False
    stopped: bool = False
    code: int | None = None

    @property
    def is_rank(self) -> bool:
        return self.role.startswith("rank")

    def send(self, number: int) -> None:
        """To a child that was not waited for yet: its number is still its own."""
        if self.code is None:
            os.kill(self.pid, number)


@dataclass(kw_only=True)
class JobProcesses:
    """An attempt at work. `at` has something called in so many seconds."""

    intent: Intent
    plan: Plan
    world: int
    folder: Path
    spec: StoreSpec
    made: UnusedStore
    at: At
    random: Random
    disk_of_node: Callable[[str], Path] | None = None
    has_flushers: bool = True
    lines: bool = False
    children: list[Child] = field(default_factory=list)
    leaving: bool = False
    dead_node: str = ""
    abandoned: Fault | None = None
    resumed: bool = False
    ranks_killed: bool = False

    @property
    def number(self) -> int:
        return self.intent.attempt

    @property
    def nodes(self) -> int:
        return min(self.plan.nodes, self.world)

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def ranks(self) -> Sequence[Child]:
        return [child for child in self.children if child.is_rank]

    @property
    def flushers(self) -> Sequence[Child]:
        return [child for child in self.children if not child.is_rank]

    @property
    def node_died(self) -> bool:
        return bool(self.dead_node)

    @property
    def is_over(self) -> bool:
        return (
            self._are_ranks_over
            and all(child.code is not None for child in self.children)
            and (self.node_died or self._is_flushed)
        )

    @property
    def _are_ranks_over(self) -> bool:
        return all(child.code is not None for child in self.ranks)

    @property
    def _is_flushed(self) -> bool:
        last = {child.role: child.code for child in self.flushers}
        return self.leaving and all(code == 0 for code in last.values())

    @property
    def is_good(self) -> bool:
        """All ranks came to the last step, and the flushers to their end."""
        return not self.node_died and all(child.code == 0 for child in self.ranks)

    @property
    def buffer_folders(self) -> Sequence[BufferFolder]:
        nodes = {identity.node for identity in map(self._identity, range(self.world))}
        return [BufferFolder.of(token=self.intent.token, node=node) for node in sorted(nodes)]

    def start(self) -> None:
        for node in range(self.nodes if self.has_flushers else 0):
            self._start_flusher(f"flusher{node}", 0)
        listener = socket.create_server(("127.0.0.1", 0))
        for rank in range(self.world):
            fault = self._fault(f"rank{rank}", 0)
            work = partial(
                run_rank,
                self._job(self._identity(rank).node),
                self._identity(rank),
                self._voice(f"rank{rank}"),
                fault if fault is not None and fault.is_within else None,
                plan=self.plan,
                listener=listener,
                lines=self.lines,
            )
            self._add(work, f"rank{rank}", 0, fault)
        listener.close()

    def heard(self, event: dict[str, Any]) -> None:
        """What a process said of itself."""
        if event["kind"] == "met":
            for child in self.children:
                if child.pid == event["pid"]:
                    child.met = True
        if event["kind"] == "resumed" and not self.resumed:
            self.resumed = True
            for child in self.children:
                if child.fault is not None and child.fault.since == "resumed":
                    self._schedule(child, child.fault)

    def stopped(self, child: Child) -> None:
        child.stopped = True
        fault = child.fault
        assert fault is not None, f"{child} stopped by itself"
        if fault.deed is Deed.ZOMBIE:
            self.abandoned = fault
            return
        if fault.deed is Deed.TWIN:
            self._start_flusher(child.role, child.incarnation + 1, faulty=False)
        self.at(fault.lasts_s, partial(self._go_on, child))

    def ended(self, child: Child, code: int) -> None:
        """Raises AssertionError for an end that nobody has brought about."""
        child.code = code
        deed = child.fault.deed if child.fault is not None else None
        was_killed = code == -signal.SIGKILL
        if was_killed and deed is Deed.NODE and child.met:
            number = int(child.role.removeprefix("rank").removeprefix("flusher"))
            self.dead_node = self._identity(number).node
            self.kill(self.children)
        if child.is_rank:
            self._rank_ended(child, code, was_killed=was_killed)
        elif code != 0:
            assert was_killed, f"attempt {self.number}: {child.role} fell over with {code}"
            if not self.node_died and self.abandoned is None:
                self.at(RESTART_S, partial(self._restart, child))
        else:
            assert self.leaving, f"attempt {self.number}: {child.role} left and was not told to"

    def leave_if_ranks_are_over(self) -> None:
        if self._are_ranks_over and not self.leaving and not self.node_died:
            self.tell_to_leave()

    def tell_to_leave(self) -> None:
        self.leaving = True
        for child in self.flushers:
            child.send(signal.SIGUSR1)

    def wake(self) -> bool:
        """Continues what is stopped; whether anything was."""
        sleeping = [child for child in self.children if child.stopped and child.code is None]
        for child in sleeping:
            self._go_on(child)
        return bool(sleeping)

    def kill(self, children: Sequence[Child]) -> None:
        for child in children:
            if child.is_rank and child.code is None:
                self.ranks_killed = True
            child.send(signal.SIGKILL)

    def _rank_ended(self, child: Child, code: int, *, was_killed: bool) -> None:
        self.ranks_killed |= was_killed
        if code == 0:
            return
        # The kernel may tell of a peer's end before that of the one that was killed.
        deadly = {Deed.KILL, Deed.NODE}
        is_excused = (
            self.ranks_killed
            or self.node_died
            or any(one.met and one.fault and one.fault.deed in deadly for one in self.ranks)
            or self.abandoned is not None
            or (bool(self.plan.server_kills_s) and not self.resumed and code != ExitCode.FENCED)
        )
        assert is_excused, f"attempt {self.number}: {child.role} ended by itself with {code}"
        if self.abandoned is None:
            self.at(self.random.uniform(0, KILL_ON_BAD_EXIT_S), lambda: self.kill(self.ranks))

    def _restart(self, child: Child) -> None:
        if not self.node_died and self.abandoned is None:
            self._start_flusher(child.role, child.incarnation + 1)

    def _go_on(self, child: Child) -> None:
        child.stopped = False
        child.send(signal.SIGCONT)

    def _start_flusher(self, role: str, incarnation: int, *, faulty: bool = True) -> None:
        fault = self._fault(role, incarnation) if faulty else None
        identity = self._identity(int(role.removeprefix("flusher")))
        work = partial(
            run_flusher,
            self._job(identity.node),
            identity,
            self._voice(role),
            fault if fault is not None and fault.is_within else None,
            leaving=self.leaving,
            lines=self.lines,
        )
        self._add(work, role, incarnation, fault)

    def _add(
        self, work: Callable[[], None], role: str, incarnation: int, fault: Fault | None
    ) -> None:
        pid = fork(work, log=self.folder / f"{self.number}.{role}.log")
        child = Child(pid=pid, role=role, incarnation=incarnation, fault=fault)
        self.children.append(child)
        if fault is not None and (fault.since == "start" or self.resumed):
            self._schedule(child, fault)

    def _schedule(self, child: Child, fault: Fault) -> None:
        if not fault.is_within:
            # One that was started again has less left to do.
            after_s = fault.after_s * (0.3 if child.incarnation else 1.0)
            self.at(after_s, partial(self._do_to, child, fault))

    def _do_to(self, child: Child, fault: Fault) -> None:
        if child.code is None:
            self._voice(child.role)("met", fault=str(fault), pid=child.pid)
            child.met = True
            child.send(SIGNALS[fault.deed])

    def _fault(self, role: str, incarnation: int) -> Fault | None:
        """One a process: what comes first in the plan."""
        faults = self.plan.faults_of(self.number)
        own = (one for one in faults if (one.role, one.incarnation) == (role, incarnation))
        return next(own, None)

    def _identity(self, rank: int) -> RankIdentity:
        return RankIdentity(
            rank=rank,
            world_size=self.world,
            local_rank=rank // self.nodes,
            node=f"n{rank % self.nodes + 1}",
            nodes=tuple(f"n{node + 1}" for node in range(self.nodes)),
            master_addr="127.0.0.1",
            master_port=1,
        )

    def _voice(self, role: str) -> Voice:
        return Voice(self.events, attempt=self.number, role=role)

    def _job(self, node: str) -> Job:
        """Nodes have their own disks under one path, which simulated ones of one host have not."""
        disk = None if self.disk_of_node is None else {"folder": str(self.disk_of_node(node))}
        return Job(
            intent=self.intent,
            store=self.spec,
            entry="trainer.main",
            payload={"train": {"checkpoint": {"disk": disk}}},
            folder=NOWHERE,
            code=NOWHERE,
            python=NOWHERE,
            made=self.made,
        )
