"""A run under a fault: a real engine in a thread of its own, and what became of it.

Several go side by side, since nearly all of their time is waiting. Each is a run of its own with
its own exclusions; which nodes it may use is said, so that none is hit by another's fault.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from slurm.commands import SystemCommands
from slurm.node_count import spell
from slurm.spec import ClusterSpec, RetrySpec
from slurm.submit import SlurmCluster
from storage.attempts import Attempt
from storage.checkpoint_records import CommitRef
from storage.errors import HeadraceError
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.records import Decision, Diagnosis, Intent, Stage
from storage.spec import StoreSpec
from tasks.context import RunContext, Unit
from tasks.engine import Engine
from tasks.eyes import Unseen
from tasks.runner import UnitResult, carry_out
from tasks.situation import Patience
from tests.faults.sites import Site

T = TypeVar("T")

ENTRIES = Path(__file__).resolve().parent / "entries"
STAGE = Stage.TRAIN
UNIT = "train"
DEADLINE_S = 280.0
_POLL_S = 0.2

RETRY = RetrySpec(backoff_s=0.5, backoff_max_s=2.0, heartbeat_s=0.5, lost_after_s=60.0)
PATIENCE = Patience(doubt_s=4.0, linger_s=6.0, hopeless_s=4.0)


class Listener(Unseen):
    """Keeps what the loop says."""

    def __init__(self, closing: threading.Event) -> None:
        self.said: list[str] = []
        self._closing = closing

    def cancel_requested(self) -> bool:
        return self._closing.is_set()

    def say(self, message: str) -> None:
        self.said.append(message)


@dataclass(kw_only=True)
class FaultRun:
    """One run, its engine, and what is done to it."""

    site: Site
    name: str
    context: RunContext
    unit: Unit
    patience: Patience = PATIENCE
    listener: Listener
    works: Future[Mapping[str, UnitResult]] | None = None
    deed: Future[None] | None = None

    def start(self, deed: Callable[[FaultRun], None] | None = None) -> FaultRun:
        """Set the engine to work, and whatever shall happen to its jobs."""
        engine = Engine(patience=self.patience)
        self.works = self.site.pool.submit(
            carry_out, self.context, STAGE, [self.unit], fingerprint="f.0", engine=engine
        )
        if deed is not None:
            self.deed = self.site.pool.submit(deed, self)
        return self

    @property
    def folder(self) -> Path:
        return self.context.workdir / self.context.run

    def attempts(self) -> tuple[Attempt, ...]:
        return self.context.ledger.attempts(STAGE)

    @cached_property
    def outcome(self) -> Outcome:
        """Waits for the engine's end, good or bad."""
        error: HeadraceError | None = None
        assert self.works is not None, f"{self.name} was not started"
        try:
            self.works.result(timeout=DEADLINE_S)
        except HeadraceError as caught:
            error = caught
        if self.deed is not None:
            self.deed.result(timeout=DEADLINE_S)
        return Outcome(run=self, attempts=self.attempts(), error=error)

    def until(self, what: str, ask: Callable[[], T | None]) -> T:
        """The first answer that is none of None, False and nothing."""
        deadline = time.monotonic() + DEADLINE_S
        while not (answer := ask()):
            if self.works is not None and self.works.done():
                # The engine's own words say more than that nothing came.
                self.works.result()
            is_hopeless = time.monotonic() > deadline or self.site.closing.is_set()
            assert not is_hopeless, f"{self.name}: in vain for {what}"
            time.sleep(_POLL_S)
        return answer

    def marks(self, name: str, attempt: int = 1) -> tuple[Path, ...]:
        return tuple(sorted(self.context.attempt_folder(STAGE, attempt).rglob(f"{name}.*.*")))

    def wait_for_marks(self, name: str = "worked", attempt: int = 1) -> tuple[Path, ...]:
        """All ranks of an attempt have come that far."""
        ranks = self.unit.nodes * self.unit.ranks_per_node

        def all_marks() -> tuple[Path, ...] | None:
            found = self.marks(name, attempt)
            return found if len(found) == ranks and all(one.read_text() for one in found) else None

        return self.until(f"{name} of attempt {attempt}", all_marks)

    def wait_for_end(self, attempt: int = 1) -> Attempt:
        def ended() -> Attempt | None:
            found = self.context.ledger.attempt(STAGE, attempt)
            return found if found is not None and found.end is not None else None

        return self.until(f"the end of attempt {attempt}", ended)

    def wait_for_heartbeats(self, attempt: int = 1) -> Attempt:
        def beats() -> Attempt | None:
            found = self.context.ledger.attempt(STAGE, attempt)
            enough = found is not None and len(found.heartbeats) == self.unit.nodes
            return found if enough else None

        return self.until(f"heartbeats of attempt {attempt}", beats)

    def kill_rank(self, rank: int, attempt: int = 1) -> None:
        self.wait_for_heartbeats(attempt)
        (mark,) = (
            one for one in self.wait_for_marks(attempt=attempt) if one.name.endswith(f".{rank}")
        )
        os.kill(int(mark.read_text()), signal.SIGKILL)

    def job_id(self, attempt: int = 1) -> str:
        found = self.context.ledger.attempt(STAGE, attempt)
        assert found is not None
        assert found.start is not None
        assert found.start.job is not None
        return found.start.job.job_id


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: its attempts, and the error that its engine raised, if any."""

    run: FaultRun
    attempts: tuple[Attempt, ...]
    error: HeadraceError | None

    @property
    def done(self) -> bool:
        return self.error is None

    def diagnosis(self, attempt: int = 1) -> Diagnosis:
        end = self.attempts[attempt - 1].end
        assert end is not None, self.story
        return end.diagnosis

    def decision(self, attempt: int = 1) -> Decision:
        end = self.attempts[attempt - 1].end
        assert end is not None, self.story
        return end.decision

    def intent(self, attempt: int) -> Intent:
        assert len(self.attempts) >= attempt, self.story
        return self.attempts[attempt - 1].intent

    def newly_excluded(self, attempt: int) -> set[str]:
        """Nodes that an attempt was submitted without, beside those that the spec forbids."""
        return set(self.intent(attempt).excluded) - set(self.run.context.cluster_spec.exclude)

    def commit(self, step: int, attempt: int = 1) -> CommitRef:
        """The commit that an attempt's job left."""
        from storage.checkpoints.commits import read_commit

        found = read_commit(self.run.context.ledger, attempt=attempt, step=step)
        assert found is not None, self.story
        return found.ref

    @property
    def story(self) -> str:
        """What happened, for the message of a test that fails."""
        lines = [f"{self.run.name}: {self.error or 'done'}", *self.run.listener.said]
        for one in self.attempts:
            excluded, why = ",".join(one.intent.excluded), one.intent.why
            lines.append(f"- attempt {one.number} ({why}, without {excluded}): {one.start}")
            lines.append(f"  exit {one.exit}")
            lines.append(f"  end {one.end}")
            folder = self.run.context.attempt_folder(STAGE, one.number)
            for log in sorted(folder.rglob("*.log*")):
                with contextlib.suppress(OSError):
                    lines.append(f"  {log.name}: {log.read_text(errors='replace')[-1500:]}")
        return "\n".join(lines)


def make_run(
    site: Site,
    name: str,
    *,
    on: tuple[str, ...],
    part: str = "wait",
    nodes: int = 1,
    most_nodes: int | None = None,
    ranks_per_node: int = 1,
    time_limit_min: int = 10,
    faulty_until: int = 1,
    payload: Mapping[str, Any] | None = None,
    patience: Patience = PATIENCE,
    retry: RetrySpec = RETRY,
    store: StoreSpec | None = None,
    path: Path | None = None,
    cluster: Mapping[str, Any] | None = None,
) -> FaultRun:
    """A run whose jobs may use the nodes `on` alone; `path` comes before the engine's own PATH."""
    store = store or site.store
    run = f"{name}-{secrets.token_hex(4)}"
    spec = ClusterSpec(
        **{
            "kind": "slurm",
            "nodes": spell(nodes, most_nodes or nodes),
            "ranks_per_node": ranks_per_node,
            "slurm_conf": site.cluster.slurm_conf,
            "exclude": tuple(sorted(set(site.cluster.shape.nodes) - set(on))),
            "memory_per_node": "200M",
            "time_limit_min": time_limit_min,
            "signal_lead_s": 20,
            "env": {"PYTHONPATH": str(ENTRIES)},
            **(cluster or {}),
        }
    )
    environ = dict(os.environ)
    if path is not None:
        environ["PATH"] = f"{path}:{environ['PATH']}"
    listener = Listener(site.closing)
    context = RunContext(
        run=run,
        workdir=site.workdir,
        cluster=SlurmCluster(
            spec, commands=SystemCommands(slurm_conf=spec.slurm_conf, environ=environ)
        ),
        cluster_spec=spec,
        retry=retry,
        store=store,
        ledger=Ledger(ObjectStore(store), RunKeys(prefix=store.prefix, run=run)),
        snapshot=site.snapshot,
        eyes=listener,
    )
    unit = Unit(
        name=UNIT,
        entry="faulty",
        payload={"part": part, "faulty_until": faulty_until, **(payload or {})},
        nodes=nodes,
        most_nodes=most_nodes,
        ranks_per_node=ranks_per_node,
        resumes=True,
    )
    return FaultRun(
        site=site,
        name=name,
        context=context,
        unit=unit,
        patience=patience,
        listener=listener,
    )
