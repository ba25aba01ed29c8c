"""All that a resumed run needs: weights, Adam's moments, and how far the data were consumed.

Kept as one flat dictionary of tensors, so that a checkpoint holds no objects and is loaded in
place. No random number is drawn after the weights are: there is no generator to save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from storage.checkpoint_records import Commit
from storage.shards.order import extend_hash
from trainer.model import Decoder
from trainer.spec import OptimizerSpec


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Where the run stands, the same on every rank."""

    step: int = 0
    samples_consumed: int = 0
    samples_hash: str = ""

    def after_step(self, *, samples: int) -> Cursor:
        return Cursor(
            step=self.step + 1,
            samples_consumed=self.samples_consumed + samples,
            samples_hash=extend_hash(self.samples_hash, start=self.samples_consumed, count=samples),
        )

    @classmethod
    def of(cls, commit: Commit) -> Cursor:
        return cls(
            step=commit.step,
            samples_consumed=commit.samples_consumed,
            samples_hash=commit.samples_hash,
        )


class TrainState:
    """This rank's shards of the weights and the optimizer's moments."""

    def __init__(self, model: Decoder, spec: OptimizerSpec) -> None:
        """Takes a model that is sharded and filled; its parameters must not be replaced later."""
        self.model = model
        self.parameters = dict(model.named_parameters())
        matrices = [p for p in self.parameters.values() if p.ndim > 1]
        vectors = [p for p in self.parameters.values() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": spec.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            fused=True,
        )
        # AdamW would make these at its first step; made here, there is something to load into
        # without a step that is none.
        for parameter in self.parameters.values():
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self._tensors = self._named()
        self._counts = {"steps": 0}

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @property
    def counts(self) -> dict[str, int]:
        """How many updates Adam has made: a plain number, which every rank's node gets to know."""
        return self._counts

    def updated(self) -> None:
        """To be called after each of the optimizer's steps."""
        self._counts["steps"] += 1

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The state by name, sharing memory with what is trained; the same objects each time."""
        return self._tensors

    def loaded(self) -> None:
        """To be called when the state was overwritten: hands Adam its number of updates."""
        for parameter in self.parameters.values():
            self.optimizer.state[parameter]["step"].fill_(self._counts["steps"])

    def _named(self) -> Mapping[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            moments = self.optimizer.state[parameter]
            tensors[f"model.{name}"] = parameter.detach()
            tensors[f"optimizer.exp_avg.{name}"] = moments["exp_avg"]
            tensors[f"optimizer.exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        return tensors
