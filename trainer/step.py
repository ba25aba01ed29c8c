"""One optimizer step and one validation batch, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn import functional

from storage.job import JobExit
from storage.records import ExitCode
from trainer.loss import IGNORED, partial_loss
from trainer.parallel.agree import sum_over_ranks
from trainer.parallel.clip import scale_to_norm, sum_of_squares
from trainer.parallel.clock import CollectiveClock
from trainer.signals import StopFlag
from trainer.state import TrainState


class Beside(Protocol):
    """What goes on beside the steps, and has to be agreed by all ranks: the saves."""

    def flags(self, step: int) -> Sequence[float]:
        """What this rank adds to the numbers that are summed in this step."""

    def heard(self, sums: Sequence[float]) -> None:
        """The sums of the flags of all ranks."""

    def before_update(self) -> None:
        """The weights are about to change."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What all ranks know after a step. `stop`: a rank was asked to leave."""

    loss: float
    grad_norm: float
    stop: bool


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """Runs a rank's samples through the model; every method is collective."""

    state: TrainState
    device: torch.device
    clock: CollectiveClock
    stop: StopFlag
    micro_batch: int
    clip_norm: float

    def train(
        self,
        samples: NDArray[np.int64],
        *,
        batch: int,
        rate: float,
        step: int,
        beside: Beside | None = None,
    ) -> StepResult:
        """An optimizer step on a global batch, of which this rank has `samples`.

        Args:
            samples: (batch / world size, rounded up or down; sequence + 1) token ids.
            batch: samples of all ranks together.
            rate: the learning rate.
            step: its number.
            beside: heard and told in the step's one all-reduce.

        Raises:
            JobExit: loss or gradient is not finite; on every rank, before the weights change.
        """
        parameters = list(self.state.parameters.values())
        self.state.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.device)
        for inputs, targets in self._micro_batches(samples, batch=batch):
            part = partial_loss(
                self.state.model(inputs), targets, valid_tokens=batch * targets.shape[1]
            )
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        share = sum_of_squares(parameters)
        flags = () if beside is None else beside.flags(step)
        mean_loss, squares, stops, *sums = sum_over_ranks(
            [loss, share], [self._stop(), *flags], device=self.device, clock=self.clock
        )
        if beside is not None:
            beside.heard(sums)
        norm = math.sqrt(squares)
        if not (math.isfinite(mean_loss) and math.isfinite(norm)):
            raise JobExit(
                ExitCode.DIVERGED,
                f"step {step}: loss {mean_loss} and gradient norm {norm} must be finite; lower "
                "train.schedule.peak_lr, or lengthen its warm-up",
            )
        scale_to_norm(parameters, norm=norm, max_norm=self.clip_norm)
        self.state.set_learning_rate(rate)
        if beside is not None:
            beside.before_update()
        self.state.optimizer.step()
        self.state.updated()
        return StepResult(loss=mean_loss, grad_norm=norm, stop=stops > 0)

    @torch.no_grad()
    def evaluate(self, samples: NDArray[np.int64], *, batch: int) -> tuple[float, bool]:
        """Mean loss of a global batch, and whether a rank was asked to leave."""
        loss = torch.zeros((), device=self.device)
        for inputs, targets in self._micro_batches(samples, batch=batch):
            loss += partial_loss(
                self.state.model(inputs), targets, valid_tokens=batch * targets.shape[1]
            )
        mean_loss, stops = sum_over_ranks(
            [loss], [self._stop()], device=self.device, clock=self.clock
        )
        return mean_loss, stops > 0

    def _micro_batches(
        self, samples: NDArray[np.int64], *, batch: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets of each pass, as many on every rank, since ranks pass together.

        A rank with one sample less than others takes one in its place that is not scored.
        """
        tokens = torch.from_numpy(samples).to(self.device, non_blocking=True)
        lacking = -(-batch // dist.get_world_size()) - len(samples)
        inputs = functional.pad(tokens[:, :-1], (0, 0, 0, lacking))
        targets = functional.pad(tokens[:, 1:], (0, 0, 0, lacking), value=IGNORED)
        return zip(
            torch.split(inputs, self.micro_batch),
            torch.split(targets, self.micro_batch),
            strict=True,
        )

    def _stop(self) -> float:
        return float(self.stop.is_set)
