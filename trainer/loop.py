"""The training itself: resume, step, look, save, until the last step or until asked to leave."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

import torch.distributed as dist

from storage.checkpoints.load import load_fork_point, load_newest
from storage.errors import SpecError
from storage.job import JobExit
from storage.records import ExitCode
from trainer.checkpoint import Checkpointer
from trainer.engine import Engine
from trainer.model import model_hash
from trainer.parallel.mesh import set_timeout
from trainer.schedule import learning_rate
from trainer.state import Cursor
from trainer.step import StepResult
from trainer.vitals.metrics import MetricsLine, MetricsLog
from trainer.vitals.split import Part, StepClock
from trainer.vitals.watchdog import Watchdog

MEDIAN_STEPS = 1024
"""The speed that is reported at the end is the median over this many steps."""


def run_training(engine: Engine) -> dict[str, Any]:
    """Trains to the last step of the spec. Collective; every rank returns the same.

    Raises:
        JobExit: asked to leave (everything is saved), fenced, or diverged; or a save failed that
            had to stand.
        CheckpointError: there are commits, but none can be loaded.
        SpecError: the run is beyond the spec's last step, or took its samples in another order.
    """
    with (
        MetricsLog(engine.context) as metrics,
        Watchdog(
            engine.context, spec=engine.train.watchdog, collectives=engine.collectives
        ) as watchdog,
    ):
        training = _Training(engine, metrics, watchdog)
        with training.saves:
            return training.run()


class _Training:
    def __init__(self, engine: Engine, metrics: MetricsLog, watchdog: Watchdog) -> None:
        self._engine = engine
        self._train = engine.train
        self._context = engine.context
        self._metrics = metrics
        self._watchdog = watchdog
        self._clock = StepClock(engine.collectives, separable=engine.device.type == "cpu")
        self._model_hash = model_hash(engine.state.model)
        self.saves = Checkpointer(
            engine, self._state(), model_hash=self._model_hash, clock=self._clock, watchdog=watchdog
        )
        self._cursor = Cursor()
        self._logged_step = 0
        self._step_s: deque[float] = deque(maxlen=MEDIAN_STEPS)

    def run(self) -> dict[str, Any]:
        train_loss = self._resume()
        val_loss: float | None = None
        while self._cursor.step < self._train.steps:
            result = self._step()
            train_loss, val_loss, stop = result.loss, None, result.stop
            save = self.saves.wanted(self._cursor.step)
            if not stop and self._is_due(self._train.validate_every_steps):
                val_loss, stop = self._validate()
            is_last = stop or self._cursor.step == self._train.steps
            if save or is_last or val_loss is not None or self._is_due(self._train.log_every_steps):
                self._log(result, val_loss)
            if is_last:
                self.saves.last(self._cursor, _measured(result, val_loss))
            elif save:
                self.saves.begin(self._cursor, _measured(result, val_loss))
            if stop:
                raise self._asked_to_leave()
        if val_loss is None:
            val_loss, stop = self._validate()
            if stop:
                raise self._asked_to_leave()
        self._metrics.upload()
        return {
            "final_step": self._cursor.step,
            "train_loss": train_loss,
            "val_loss": val_loss,
            "tokens_per_s": self._tokens_per_s(),
            "commits": self.saves.commits,
        }

    def _resume(self) -> float | None:
        """Loads the newest commit, if there is one, and returns the loss at its step."""
        state = self._state()
        commit = load_newest(
            self._context,
            state,
            model_hash=self._model_hash,
            dataset_id=self._engine.manifest.dataset_id,
        )
        if commit is not None:
            self._require_not_beyond(commit.step)
            self._require_same_order(state["data_order"])
            self._engine.state.loaded()
            self._cursor = Cursor.of(commit)
            self._say(f"resumed from step {commit.step} of attempt {commit.attempt}")
        else:
            self._begin(state)
        if self._cursor.step < self._train.steps:
            self.saves.prepare()
        elif commit is not None:
            self.saves.keep(commit, self._cursor)
        dist.barrier()
        set_timeout(self._engine.mesh, timeout_s=self._train.step_timeout_s)
        self._logged_step = self._cursor.step
        self._clock.read(steps=1)
        return None if commit is None else commit.metrics.get("loss")

    def _begin(self, state: dict[str, Any]) -> None:
        """At step 0, or at the step that the run was forked at, with none of its samples taken."""
        origin = load_fork_point(self._context, state, model_hash=self._model_hash)
        if origin is not None:
            self._require_not_beyond(origin.step)
            self._engine.state.loaded()
            self._cursor = Cursor(step=origin.step)
            self._say(f"forked from step {origin.step} of run {origin.run}")

    def _state(self) -> dict[str, Any]:
        """What is saved: the tensors, and what gives the count of consumed samples its meaning.

        A dictionary of its own each time, since loading replaces what is no tensor in it; the
        optimizer's counts are meant to be replaced.
        """
        order = {"seed": self._train.seed, "sequence": self._train.sequence}
        state = self._engine.state
        return {**state.tensors(), "optimizer": state.counts, "data_order": order}

    def _require_not_beyond(self, committed: int) -> None:
        """With no step left to take, the longer run's model would pass for the shorter one's."""
        if committed > self._train.steps:
            raise SpecError(
                f"train.steps {self._train.steps} must be at least {committed}, the step that the "
                f"run has committed; raise train.steps to at least {committed}, or give the run "
                "another name"
            )

    def _require_same_order(self, saved: dict[str, int]) -> None:
        for name, value in saved.items():
            here = getattr(self._train, name)
            if here != value:
                raise SpecError(
                    f"train.{name} {here} must stay {value}: the run's samples so far were "
                    "consumed in the order that it gives; set it back, or start a run under a "
                    "new name"
                )

    def _step(self) -> StepResult:
        start = time.perf_counter()
        step, batch = self._cursor.step + 1, self._train.global_batch
        with self._clock.part(Part.DATA):
            samples = self._engine.samples(self._engine.data, self._cursor.samples_consumed, batch)
        with self._clock.part(Part.COMPUTE):
            result = self._engine.step.train(
                samples, batch=batch, rate=self._rate(step), step=step, beside=self.saves
            )
        self._cursor = self._cursor.after_step(samples=batch)
        self._step_s.append(time.perf_counter() - start)
        self.saves.stepped(self._step_s[-1])
        self._watchdog.stepped(step)
        return result

    def _validate(self) -> tuple[float | None, bool]:
        """The held-out split's loss, always on the same samples, and whether to leave instead."""
        available, batch = self._engine.held_out.num_samples, self._train.global_batch
        if available == 0:
            return None, False
        batches = max(1, min(self._train.validate_batches, available // batch))
        losses = []
        with self._watchdog.suspended(), self._clock.part(Part.VALIDATE):
            for number in range(batches):
                samples = self._engine.samples(self._engine.held_out, number * batch, batch)
                loss, stop = self._engine.step.evaluate(samples, batch=batch)
                if stop:
                    return None, True
                losses.append(loss)
        return statistics.fmean(losses), False

    def _log(self, result: StepResult, val_loss: float | None) -> None:
        step, steps = self._cursor.step, self._train.steps
        window = self._clock.read(steps=step - self._logged_step)
        self._logged_step = step
        tokens_per_s = self._train.global_batch * self._train.sequence / window.step_s
        line = MetricsLine(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=self._rate(step),
            tokens=self._cursor.samples_consumed * self._train.sequence,
            tokens_per_s=tokens_per_s,
            step_s=window.step_s,
            split=window.split,
            val_loss=val_loss,
            attempt=self._context.attempt,
        )
        self._metrics.write(line)
        self._context.progress(
            step=step,
            loss=result.loss,
            tokens_per_s=tokens_per_s,
            eta_s=(steps - step) * window.step_s,
        )
        held_out = "" if val_loss is None else f", validation loss {val_loss:.4f}"
        self._say(
            f"step {step}/{steps}: loss {result.loss:.4f}{held_out}, {tokens_per_s:,.0f} tokens/s"
        )

    def _asked_to_leave(self) -> JobExit:
        step = self._cursor.step
        return JobExit(
            ExitCode.RESUME,
            f"{self._engine.step.stop}; step {step} of {self._train.steps} is committed",
            outputs={"step": step, "commits": self.saves.commits},
        )

    def _is_due(self, every_steps: int) -> bool:
        step = self._cursor.step
        return step % every_steps == 0 or step == self._train.steps

    def _rate(self, step: int) -> float:
        return learning_rate(step, schedule=self._train.schedule, steps=self._train.steps)

    def _tokens_per_s(self) -> float | None:
        """At the median step of this attempt; None where it had nothing left to do."""
        if not self._step_s:
            return None
        tokens = self._train.global_batch * self._train.sequence
        return tokens / statistics.median(self._step_s)

    def _say(self, text: str) -> None:
        if self._context.identity.rank == 0:
            print(text, flush=True)


def _measured(result: StepResult, val_loss: float | None) -> dict[str, float]:
    """What a commit says of the model that it holds."""
    measured = {"loss": result.loss, "grad_norm": result.grad_norm}
    return measured if val_loss is None else measured | {"val_loss": val_loss}
