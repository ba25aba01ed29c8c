"""The trainer's part of the spec: model, batch, schedule, checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from storage.spec import FolderOrFile, Model

MAX_STEPS = 10**9
EVERY_STEPS = 500
DISK_EVERY_S = 60.0


class ModelSpec(Model):
    """A Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    dim: int = Field(128, ge=8, le=2**20, description="Width of the residual stream.")
    layers: int = Field(4, ge=1, le=2**14)
    heads: int = Field(4, ge=1, le=2**14)
    kv_heads: int | None = Field(None, ge=1, le=2**14, description="By default as many as heads.")
    ffn_dim: int | None = Field(
        None, ge=8, le=2**22, description="By default 8/3 · dim, up to 64s."
    )
    vocab: int | None = Field(
        None, ge=2, le=2**24, description="By default the tokenizer's, up to 64s."
    )
    rope_theta: float = Field(10_000.0, gt=0)
    norm_eps: float = Field(1e-5, gt=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelSpec:
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"dim {self.dim} must be an even multiple of heads {self.heads}; "
                f"the nearest above is {-(-self.dim // (2 * self.heads)) * 2 * self.heads}"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
        return self


class ScheduleSpec(Model):
    """Learning rate as a pure function of the step: linear warm-up, then cosine."""

    peak_lr: float = Field(3e-4, gt=0)
    warmup_steps: int | None = Field(
        None, ge=0, le=MAX_STEPS, description="By default a tenth of the steps, 100 at most."
    )
    min_ratio: float = Field(0.1, ge=0, le=1, description="Final rate as a part of the peak.")

    def warmup(self, steps: int) -> int:
        """Steps of warm-up in a run of `steps`."""
        return min(100, steps // 10) if self.warmup_steps is None else self.warmup_steps


class OptimizerSpec(Model):
    """AdamW and gradient clipping."""

    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    clip_norm: float = Field(1.0, gt=0)


class DiskSpec(Model):
    """A nearer tier: a folder on a disk of each node, or on one that they share.

    A job that starts again where it was loads from there what is newer than in the store, or as
    new. The newest two saves stay.
    """

    folder: FolderOrFile = Field(description="Absolute; each run has a folder of its own in it.")
    every_steps: int | None = Field(None, ge=1, le=MAX_STEPS)
    every_s: float | None = Field(
        None, gt=0, description="By default 60, unless every_steps is given."
    )

    @model_validator(mode="before")
    @classmethod
    def _has_an_interval(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping) and not (fields.get("every_steps") or fields.get("every_s")):
            given = {name: value for name, value in fields.items() if value is not None}
            return {"every_s": DISK_EVERY_S} | given
        return fields

    @model_validator(mode="after")
    def _has_one_interval(self) -> DiskSpec:
        if self.every_steps is not None and self.every_s is not None:
            raise ValueError(
                f"disk.every_steps {self.every_steps} and disk.every_s {self.every_s:g} exclude "
                "each other; keep one of them"
            )
        if not self.folder.is_absolute():
            raise ValueError(
                f"disk.folder {str(self.folder)!r} must be an absolute path; write it from '/'"
            )
        return self


class CheckpointSpec(Model):
    """When a checkpoint is saved, and through what memory: `every_steps`, `every_s` or `auto`.

    `auto` is no default, for where saves cost little it saves often, which fills a bucket.
    """

    every_steps: int | None = Field(
        None, ge=1, le=MAX_STEPS, description="By default 500, unless every_s or auto is given."
    )
    every_s: float | None = Field(None, gt=0, description="Seconds from one save to the next.")
    auto: bool = Field(
        False, description="By what a save is measured to cost and failures_per_node_day."
    )
    failures_per_node_day: float = Field(
        0.0065,
        gt=0,
        le=10**4,
        description="For `auto`. The default is what Kokolis et al. (2024) saw on a research "
        "cluster: 6.5 failures in a thousand node-days.",
    )
    buffers: Literal[1, 2] = Field(
        2, description="Copies of a rank's state in memory; with 1 a save awaits the one before."
    )
    buffer_dir: FolderOrFile = Field(
        Path("/dev/shm"), description="Memory of each node that its ranks and its flusher share."
    )
    disk: DiskSpec | None = Field(None, description="Saves on a disk, beside those in the store.")
    last_save_timeout_s: float = Field(
        1800.0, gt=0, description="Bound on the wait for the last save to be committed."
    )

    @model_validator(mode="before")
    @classmethod
    def _has_an_interval(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping) and not any(
            fields.get(name) for name in ("every_steps", "every_s", "auto")
        ):
            given = {name: value for name, value in fields.items() if value is not None}
            return {"every_steps": EVERY_STEPS} | given
        return fields

    @model_validator(mode="after")
    def _has_one_interval(self) -> CheckpointSpec:
        given = {
            "every_steps": self.every_steps,
            "every_s": self.every_s,
            "auto": self.auto or None,
        }
        told = [f"{name} {value}" for name, value in given.items() if value is not None]
        if len(told) > 1:
            raise ValueError(f"{' and '.join(told)} exclude each other; keep one of them")
        if not self.buffer_dir.is_absolute():
            raise ValueError(
                f"buffer_dir {str(self.buffer_dir)!r} must be an absolute path; write it from '/'"
            )
        return self

    def __str__(self) -> str:
        """How often, in words."""
        if self.every_steps is not None:
            return f"every {self.every_steps:,} steps"
        if self.every_s is not None:
            return f"every {self.every_s:g} s"
        return "as often as Young/Daly says once saves are measured"


class WatchdogSpec(Model):
    """When a rank that makes no step counts as hung."""

    factor: float = Field(10.0, gt=1, description="Times the median step.")
    floor_s: float = Field(120.0, gt=0, description="Never sooner than this.")


class TrainSpec(Model):
    """The training job. A global batch is `global_batch` sequences of `sequence` tokens."""

    model: ModelSpec = ModelSpec()
    steps: int = Field(1_000, ge=1, le=MAX_STEPS)
    sequence: int = Field(512, ge=2, le=2**24, description="Tokens a sequence.")
    global_batch: int = Field(64, ge=1, le=2**24, description="Sequences a step, over all ranks.")
    micro_batch: int = Field(4, ge=1, le=2**24, description="Sequences a rank takes at once.")
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = Field(0, ge=0, lt=2**63)
    schedule: ScheduleSpec = ScheduleSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    validate_every_steps: int = Field(500, ge=1, le=MAX_STEPS)
    validate_batches: int = Field(
        8, ge=1, le=10**6, description="Global batches of the held-out split."
    )
    log_every_steps: int = Field(10, ge=1, le=MAX_STEPS)
    start_timeout_s: float = Field(600.0, gt=0, description="Bound on start-up collectives.")
    step_timeout_s: float = Field(300.0, gt=0, description="Bound on collectives in training.")
    watchdog: WatchdogSpec = WatchdogSpec()
    threads: int = Field(1, ge=1, le=4096, description="CPU threads a rank.")

    @model_validator(mode="after")
    def _warmup_is_shorter(self) -> TrainSpec:
        if self.schedule.warmup(self.steps) > self.steps:
            raise ValueError(
                f"schedule.warmup_steps {self.schedule.warmup_steps} must be at most "
                f"steps {self.steps}; lower one or raise the other"
            )
        return self

    def accumulation(self, world_size: int) -> int:
        """Micro-batches that each rank runs before each optimizer step.

        Raises:
            ValueError: there are more ranks than sequences in the global batch.
        """
        if self.global_batch < world_size:
            raise ValueError(
                f"global_batch {self.global_batch} must be at least the {world_size} ranks, each "
                "of which takes a sequence a step; raise it, or use fewer nodes"
            )
        return -(-self.largest_share(world_size) // self.micro_batch)

    def padding(self, world_size: int) -> float:
        """The part of a step that is spent on sequences without weight.

        Where the ranks cannot share the global batch evenly, some take one sequence more than the
        others, which meanwhile run one that does not count.
        """
        return 1 - self.global_batch / (self.largest_share(world_size) * world_size)

    def largest_share(self, world_size: int) -> int:
        """Sequences a step of the ranks that take the most of them."""
        return -(-self.global_batch // world_size)


class SmokeRun(Model):
    """A rung: run so many steps, measure those after the warm-up, save nothing."""

    steps: int = Field(ge=2, le=MAX_STEPS)
    warmup_steps: int = Field(ge=1, le=MAX_STEPS)


class TrainerJob(Model):
    """The payload of a `trainer.main` job. `smoke` is None for the training itself."""

    train: TrainSpec
    manifest_key: str
    smoke: SmokeRun | None = None


class CommandSpec(Model):
    """Somebody's own training script, in place of the built-in trainer."""

    argv: Annotated[
        tuple[Annotated[str, StringConstraints(min_length=1)], ...], Field(min_length=1)
    ] = Field(description="The program and its arguments, such as [torchrun, train.py].")
    per: Literal["node", "rank"] = Field(
        "node", description="Start it once a node, as torchrun wants it, or once a rank."
    )
    cwd: Path = Field(Path(), description="The folder it is started in, on every node.")
    checkpoints: Path | None = Field(
        None,
        description="Folder for its checkpoints, told to it as HEADRACE_CHECKPOINTS; by default "
        "one below the workdir that all attempts of the run share.",
    )
    stop_signal: Literal["TERM", "INT", "USR1", "USR2"] = Field(
        "TERM", description="The signal on which it saves and leaves."
    )
    progress: str | None = Field(
        None,
        description="Regular expression that finds the step in a line of its output, such as "
        "'step (?P<step>[0-9]+) loss (?P<loss>[0-9.]+)'.",
    )
    steps: int | None = Field(None, ge=1, le=MAX_STEPS, description="Its last step, to be shown.")
    hang_after_s: float | None = Field(
        None, gt=0, description="No new step for so long is a hang; needs `progress`."
    )
    start_timeout_s: float = Field(
        1800.0, gt=0, description="With `hang_after_s`: no first step for so long is one, too."
    )

    @field_validator("progress")
    @classmethod
    def _progress_names_the_step(cls, progress: str | None) -> str | None:
        if progress is None:
            return None
        try:
            groups = re.compile(progress).groupindex
        except re.error as error:
            raise ValueError(f"progress {progress!r} is no regular expression: {error}") from None
        if "step" not in groups:
            raise ValueError(
                f"progress {progress!r} must have a group named step; write it as "
                "'step (?P<step>[0-9]+)'"
            )
        return progress

    @model_validator(mode="after")
    def _a_hang_can_be_seen(self) -> CommandSpec:
        if self.hang_after_s is not None and self.progress is None:
            raise ValueError(
                f"hang_after_s {self.hang_after_s:g} needs progress, by which new steps are seen; "
                "add it or leave hang_after_s out"
            )
        return self


class CommandJob(Model):
    """The payload of a `trainer.command` job."""

    command: CommandSpec
    checkpoints: Path
    ranks_per_node: int = Field(ge=1)
