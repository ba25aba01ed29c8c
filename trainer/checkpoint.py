"""Saving while training goes on: when, whether all ranks can, and what has become of it.

A save is agreed on in the step's one all-reduce, so all ranks begin it or none does. The snapshot
is taken beside the next forward and backward pass; a flusher sends and commits it. Rank 0 hears
what became of a save, and only what is committed is ever called so.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from storage.checkpoint_records import Commit, SaveFacts
from storage.checkpoints import flusher
from storage.checkpoints.buffers import BufferFolder, Outcome, Result, Tier
from storage.checkpoints.commits import read_commit
from storage.checkpoints.ranks import Ranks
from storage.checkpoints.staging import Stager
from storage.errors import CheckpointError
from storage.job import JobContext, JobExit
from storage.records import ExitCode
from trainer.engine import Engine
from trainer.interval import Pace
from trainer.parallel.mesh import SHARD_AXIS
from trainer.state import Cursor
from trainer.vitals.split import Part, StepClock
from trainer.vitals.watchdog import Watchdog

POLL_S = 0.02
GRACE_S = 60.0
"""Ranks that wait for others do so for this much longer than those wait for the flusher."""
SILENCE_S = 5.0
"""A wait for the store that is longer than this is told."""
FLUSHER_END_S = 60.0
ID_BITS = 52
"""A float64 sums so many without a loss."""


@dataclass(frozen=True, kw_only=True)
class _Agreed:
    """What the ranks said in the last step's all-reduce, summed up."""

    tiers: tuple[Tier, ...] = ()
    busy_ranks: int = 0
    save: str = ""
    is_fenced: bool = False


class Checkpointer:
    """The saves of one rank, driven by the loop; a `trainer.step.Beside`.

    After each step the loop asks `wanted` and then `begin`s a save or not; the one that it leaves
    with is `last`, which waits. `commits` counts those that this attempt has made, on rank 0 as
    they come and on all ranks after the last.
    """

    def __init__(
        self,
        engine: Engine,
        state: Mapping[str, Any],
        *,
        model_hash: str,
        clock: StepClock,
        watchdog: Watchdog,
    ) -> None:
        """`state` names what is saved; its tensors may change, but must stay the same ones."""
        context, spec = engine.context, engine.train.checkpoint
        self.commits = 0
        self._engine = engine
        self._context: JobContext = context
        self._spec = spec
        self._state = state
        self._model_hash = model_hash
        self._clock = clock
        self._watchdog = watchdog
        self._ranks = Ranks()
        self._folder = BufferFolder.of_job(context.job, node=context.identity.node)
        self._stager = Stager(self._folder, buffers=spec.buffers)
        nodes, now_s = len(context.identity.nodes), time.monotonic()
        self._pace = Pace(spec, nodes=nodes, now_s=now_s)
        self._paces = {Tier.STORE: self._pace}
        if spec.disk is not None:
            self._paces[Tier.DISK] = Pace(spec.disk, nodes=nodes, now_s=now_s)
        self._flusher: _FlusherThread | None = None
        self._agreed = _Agreed()
        self._due_since: int | None = None
        self._blocked_s: dict[int, float] = {}
        self._unfinished: int | None = None
        self._settled: Outcome | None = None
        self._fence = ""

    def prepare(self) -> None:
        """Makes the buffers, before the first step. Collective.

        Raises:
            JobExit: with BAD_CONFIG, when a node does not let them be made where the spec says;
                with OUT_OF_MEMORY, when it has no room for them.
        """
        self._ranks.from_all(self._make_folder)
        try:
            self._stager.prepare(dict(self._state))
        except CheckpointError as error:
            raise JobExit(ExitCode.OUT_OF_MEMORY, str(error)) from error
        self._say(
            f"checkpoints {self._spec}: {self._spec.buffers} "
            f"{'buffers' if self._spec.buffers > 1 else 'buffer'} of "
            f"{spell_size(self._stager.size_bytes)} a rank in {self._spec.buffer_dir}"
        )
        if self._spec.disk is not None:
            self._tell_of_disk(self._spec.disk.folder)
        if self._context.job.sidecar is None and self._context.identity.local_rank == 0:
            self._flusher = _FlusherThread(self._context)
            self._flusher.start()

    def _tell_of_disk(self, folder: Path) -> None:
        """Each node has its own, or none: saves go to the store in any case."""
        identity = self._context.identity
        if identity.local_rank == 0 and not os.access(folder, os.W_OK | os.X_OK):
            print(
                f"no checkpoint goes to train.checkpoint.disk.folder {folder} of {identity.node}: "
                "it is not there, or not to be written to; make it on every node",
                flush=True,
            )
        else:
            self._say(f"checkpoints also go to {folder}, where the newest two stay")

    def flags(self, step: int) -> Sequence[float]:
        """This rank's word on a save after this step: no buffer, its id, fenced, due in a tier."""
        is_busy = not self._stager.is_free
        if not self._ranks.is_first:
            return (float(is_busy), 0.0, 0.0, *(0.0 for _ in self._paces))
        self._look()
        now_s = time.monotonic()
        return (
            float(is_busy),
            float(secrets.randbits(ID_BITS)),
            float(bool(self._fence)),
            *(float(pace.is_due(step, now_s=now_s)) for pace in self._paces.values()),
        )

    def heard(self, sums: Sequence[float]) -> None:
        """What all ranks said."""
        busy, save, fenced, *due = sums
        self._agreed = _Agreed(
            tiers=tuple(tier for tier, wishes in zip(self._paces, due, strict=True) if wishes > 0),
            busy_ranks=round(busy),
            save=f"{int(save):0{ID_BITS // 4}x}",
            is_fenced=fenced > 0,
        )

    def before_update(self) -> None:
        """Waits for what is left of a snapshot: the weights are about to change.

        Raises:
            JobExit: with STORAGE, when the snapshot could not be completed.
        """
        if self._unfinished is not None:
            with self._standing_still(self._unfinished), _storage_fails():
                self._stager.finish()
            self._unfinished = None

    def stepped(self, step_s: float) -> None:
        """What the last step took."""
        self._pace.stepped(step_s, is_flushing=bool(self._blocked_s))

    def wanted(self, step: int) -> bool:
        """Whether a save is to be begun after this step; the same on every rank.

        Raises:
            JobExit: with FENCED, when another job has the attempt, or it is closed.
        """
        agreed = self._agreed
        if agreed.is_fenced:
            raise self._fenced(step)
        if not agreed.tiers:
            return False
        if agreed.busy_ranks == 0:
            return True
        if self._due_since is None:
            self._due_since = step
            self._say(
                f"the save of step {step} waits: on {agreed.busy_ranks} of "
                f"{self._ranks.world_size} ranks no buffer is free, since saves before it are "
                "still on their way to the store"
            )
        return False

    def begin(self, cursor: Cursor, metrics: Mapping[str, float]) -> None:
        """Begins the save that is `wanted`; training goes on.

        Raises:
            JobExit: with STORAGE, when the snapshot before it could not be completed.
        """
        self._begin(cursor, metrics, tiers=self._agreed.tiers)

    def _begin(
        self, cursor: Cursor, metrics: Mapping[str, float], *, tiers: tuple[Tier, ...]
    ) -> None:
        if self._ranks.is_first and Tier.STORE in tiers:
            self._blocked_s[cursor.step] = 0.0
        self._unfinished = cursor.step
        self._due_since = None
        with self._standing_still(cursor.step), _storage_fails():
            self._stager.begin(self._state, self._facts(cursor, metrics), tiers=tiers)
        for tier in tiers:
            self._paces[tier].begun(now_s=time.monotonic())

    def last(self, cursor: Cursor, metrics: Mapping[str, float]) -> None:
        """Saves, and returns when the commit stands. Collective.

        Raises:
            JobExit: with STORAGE, when it does not within the spec's bound or cannot; with FENCED.
        """
        step, save = cursor.step, self._agreed.save
        limit_s = self._spec.last_save_timeout_s
        until = time.monotonic() + limit_s
        patience_s = limit_s + GRACE_S
        with self._watchdog.suspended(), _storage_fails():
            self._ranks.from_late_all(
                lambda: self._wait(lambda: self._stager.is_free, until, step),
                name=f"headrace/buffers/{save}",
                timeout_s=patience_s,
            )
            self._begin(cursor, metrics, tiers=tuple(self._paces))
            self.before_update()
            with self._clock.part(Part.CHECKPOINT):
                self.commits = self._ranks.from_late_first(
                    lambda: self._await_commit(step, until),
                    name=f"headrace/commit/{save}",
                    timeout_s=patience_s,
                )

    def keep(self, loaded: Commit, cursor: Cursor) -> None:
        """Saves anew what was loaded at the last step, unless it is committed. Collective.

        Whoever left it on a disk was killed before.

        Raises:
            As `prepare` and `last`.
        """
        place = {"attempt": loaded.attempt, "step": loaded.step}
        if not self._ranks.from_first(
            lambda: read_commit(self._context.ledger, **place) is not None
        ):
            self.prepare()
            self._agreed = _Agreed(save=loaded.save)
            self.last(cursor, loaded.metrics)

    def close(self) -> None:
        """Completes a snapshot that was begun, and leaves it to the flusher.

        Raises:
            CheckpointError: the snapshot could not be completed.
        """
        try:
            self._stager.close()
        finally:
            if self._flusher is not None:
                self._flusher.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if kind is None:
                raise
            # Whatever ended the training is what is to be heard.
            print(f"headrace: {error}", flush=True)

    def _make_folder(self) -> None:
        try:
            self._folder.make()
        except OSError as error:
            raise JobExit(
                ExitCode.BAD_CONFIG,
                f"train.checkpoint.buffer_dir {str(self._spec.buffer_dir)!r} must be memory that "
                f"{self._context.identity.node} may write to: {error}; leave it out for /dev/shm",
            ) from error

    def _await_commit(self, step: int, until: float) -> int:
        """Rank 0's part: how many commits there are when that of `step` stands."""

        def is_settled() -> bool:
            return self._settled is not None and self._settled.step == step

        self._wait(is_settled, until, step)
        assert self._settled is not None
        if self._settled.result is not Result.COMMITTED:
            raise JobExit(
                ExitCode.STORAGE, f"step {step} is not committed: {self._settled.message}"
            )
        return self.commits

    def _wait(self, is_over: Callable[[], bool], until: float, step: int) -> None:
        tell_at = time.monotonic() + SILENCE_S
        while True:
            if self._ranks.is_first:
                self._look()
            if self._fence:
                raise self._fenced(step)
            if is_over():
                return
            now = time.monotonic()
            if now >= until:
                raise JobExit(
                    ExitCode.STORAGE,
                    f"step {step} is not committed: its save did not reach the store within "
                    f"train.checkpoint.last_save_timeout_s {self._spec.last_save_timeout_s:g}; "
                    "the flusher's log says why",
                )
            if now >= tell_at:
                tell_at = float("inf")
                self._say(f"waiting until step {step} is committed")
            time.sleep(POLL_S)

    def _look(self) -> None:
        """Rank 0 hears what has become of saves."""
        if not self._blocked_s:
            return
        for outcome in self._folder.take_outcomes():
            blocked_s = self._blocked_s.pop(outcome.step, None)
            if blocked_s is None:
                # Told already, by a flusher that was killed before it had noted so.
                continue
            self._settled = outcome
            if outcome.result is Result.FENCED:
                self._fence = outcome.message
            elif outcome.result is Result.FAILED:
                self._say(f"step {outcome.step} is not committed: {outcome.message}")
                self._pace.failed()
            else:
                self.commits += 1
                self._say(
                    f"committed step {outcome.step}, {outcome.durable_s:.3g} s after its "
                    f"snapshot, which held the loop up for {blocked_s:.3g} s"
                )
                self._pace.measured(blocked_s=blocked_s, durable_s=outcome.durable_s)
                if (news := self._pace.news()) is not None:
                    self._say(news)

    def _fenced(self, step: int) -> JobExit:
        return JobExit(
            ExitCode.FENCED,
            self._fence
            or f"attempt {self._context.attempt} is closed, or another job has it; "
            f"what was trained up to step {step} is not committed",
        )

    @contextmanager
    def _standing_still(self, step: int) -> Iterator[None]:
        """What the loop waits for here is the price of the save of `step`."""
        start = time.perf_counter()
        with self._clock.part(Part.CHECKPOINT):
            yield
        if step in self._blocked_s:
            self._blocked_s[step] += time.perf_counter() - start

    def _facts(self, cursor: Cursor, metrics: Mapping[str, float]) -> SaveFacts:
        return SaveFacts(
            step=cursor.step,
            save=self._agreed.save,
            world_size=self._ranks.world_size,
            mesh={SHARD_AXIS: self._engine.mesh.size()},
            samples_consumed=cursor.samples_consumed,
            samples_hash=cursor.samples_hash,
            dataset_id=self._engine.manifest.dataset_id,
            model_hash=self._model_hash,
            metrics=dict(metrics),
        )

    def _say(self, text: str) -> None:
        if self._ranks.is_first:
            print(text, flush=True)


class _FlusherThread(threading.Thread):
    """Stands in for the sidecar of a node, in a job that has none."""

    def __init__(self, context: JobContext) -> None:
        super().__init__(name="flusher", daemon=True)
        self._context = context
        self._leave = threading.Event()

    def run(self) -> None:
        flusher.run(self._context, self._leave)

    def end(self) -> None:
        self._leave.set()
        self.join(FLUSHER_END_S)


@contextmanager
def _storage_fails() -> Iterator[None]:
    """A save that could not be made is no checkpoint that could not be loaded."""
    try:
        yield
    except CheckpointError as error:
        raise JobExit(ExitCode.STORAGE, str(error)) from error


def spell_size(size_bytes: int) -> str:
    """A size of memory."""
    if size_bytes < 2**30:
        return f"{size_bytes / 2**20:.2f} MiB"
    return f"{size_bytes / 2**30:.2f} GiB"
