"""The smoke stage's part of the spec: the ladder and its gate."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from storage.spec import Model


class SmokeSpec(Model):
    """The real trainer at growing node counts, the load a rank kept constant (weak scaling)."""

    rungs: Annotated[tuple[int, ...], Field(min_length=1)] | None = Field(
        None,
        description="Node counts; by default 1, 2, 4 … up to cluster.nodes, or as many of a range "
        "as there are.",
    )
    steps: int = Field(20, ge=4, description="Steps a rung.")
    warmup_steps: int = Field(5, ge=1, description="Steps a rung that are not measured.")
    min_ratio: float = Field(1.6, gt=1, le=2, description="Least gain of a doubling.")
    min_efficiency: float = Field(0.8, gt=0, le=1, description="Least at the top rung.")

    @field_validator("rungs")
    @classmethod
    def _rungs_grow(cls, rungs: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if rungs is not None and (list(rungs) != sorted(set(rungs)) or rungs[0] < 1):
            raise ValueError(f"rungs {list(rungs)} must be positive and grow, as in [1, 2, 4]")
        return rungs

    @model_validator(mode="after")
    def _some_steps_are_measured(self) -> SmokeSpec:
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} must be below steps {self.steps}, "
                "of which it is a part; raise steps"
            )
        return self

    def ladder(self, nodes: int) -> tuple[int, ...]:
        """The node counts to run for a training job of `nodes` nodes."""
        if self.rungs is not None:
            return self.rungs
        rungs = [1]
        while rungs[-1] * 2 <= nodes:
            rungs.append(rungs[-1] * 2)
        return tuple(rungs) if rungs[-1] == nodes else (*rungs, nodes)
