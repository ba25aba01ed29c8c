"""The whole spec: what each package owns, composed, and what only the whole can check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from slurm.spec import ClusterSpec, RetrySpec, ValidateSpec
from storage.records import Stage
from storage.spec import DataSpec, FolderOrFile, LogsSpec, Model, RetentionSpec, StoreSpec
from tasks.spec import SmokeSpec
from trainer.spec import CommandSpec, TrainSpec

BYTES = "bytes"

RunName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$")]


class PipelineSpec(Model):
    """One YAML file: what to train, on which nodes, with which gates."""

    run: RunName = Field(
        description="The run's stable name: lower-case letters, digits and '-', 48 at most."
    )
    workdir: FolderOrFile = Field(
        Path(".headrace"),
        description="Folder for logs, scripts and code, on a file system that all nodes share.",
    )
    cluster: ClusterSpec = ClusterSpec()
    store: StoreSpec = StoreSpec()
    validation: ValidateSpec = ValidateSpec()
    command: CommandSpec | None = Field(
        None, description="A training script of one's own, in place of data, smoke and train."
    )
    data: DataSpec | None = Field(
        None, validate_default=True, description="What the built-in trainer learns from."
    )
    smoke: SmokeSpec = SmokeSpec()
    train: TrainSpec = TrainSpec()
    retention: RetentionSpec = RetentionSpec()
    retry: RetrySpec = RetrySpec()
    logs: LogsSpec = LogsSpec()

    @field_validator("data")
    @classmethod
    def _something_is_trained(cls, data: DataSpec | None, info: ValidationInfo) -> DataSpec | None:
        if data is None and info.data.get("command", ...) is None:
            raise ValueError(
                "data is missing: name the documents to train on (data.inputs), or a script of "
                "your own (command.argv)"
            )
        return data

    @model_validator(mode="after")
    def _one_trainer_is_named(self) -> PipelineSpec:
        plain = type(self).model_construct(run=self.run)
        for name in ("data", "smoke", "train", "retention"):
            if self.command is not None and getattr(self, name) != getattr(plain, name):
                raise ValueError(
                    f"{name} means nothing to a script of your own, which command.argv names; "
                    f"leave out {name} or command"
                )
        return self

    @property
    def documents(self) -> DataSpec:
        """The data of a run of the built-in trainer."""
        assert self.data is not None
        return self.data

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that the run has: a command brings its own data, and keeps its own house."""
        return tuple(Stage) if self.command is None else (Stage.VALIDATE, Stage.TRAIN)

    @property
    def total_steps(self) -> dict[Stage, int]:
        """The last step of each stage that counts steps, where it is known."""
        if self.command is None:
            return {Stage.TRAIN: self.train.steps, Stage.SMOKE: self.smoke.steps}
        return {} if self.command.steps is None else {Stage.TRAIN: self.command.steps}

    @model_validator(mode="after")
    def _parts_fit_each_other(self) -> PipelineSpec:
        if self.command is None:
            # What the most ranks can share, fewer can as well.
            self.train.accumulation(self.cluster.most_nodes * self.cluster.ranks_per_node)
        if (
            self.cluster.spans_hosts
            and self.store.is_embedded
            and self.store.embedded.host in ("127.0.0.1", "localhost", "::1")
        ):
            raise ValueError(
                f"store.embedded.host {self.store.embedded.host} is loopback, which nodes of "
                "`kind: slurm` cannot reach; name store.endpoint_url, or bind an address of this "
                "host that the nodes reach"
            )
        if max(self.smoke.ladder(self.cluster.most_nodes)) > self.cluster.most_nodes:
            raise ValueError(
                f"smoke.rungs {list(self.smoke.rungs or ())} must not go beyond cluster.nodes "
                f"{self.cluster.nodes}; drop the higher rungs"
            )
        return self

    def renamed(self, run: str) -> Self:
        """The same spec for a run of another name.

        Raises:
            ValidationError: it is no name for a run.
        """
        return type(self).model_validate(self.model_dump() | {"run": run})

    def anchored(self, base: Path) -> Self:
        """The same spec with its relative paths taken from `base`: it then means the same in any
        process, whatever its working directory. What Headrace itself writes is then no input."""

        def at(path: Path | None) -> Path | None:
            return None if path is None else base / path.expanduser()

        def text_at(text: str) -> str:
            return text if "://" in text else str(at(Path(text)))

        data, store, cluster, command = self.data, self.store, self.cluster, self.command
        own = [self.workdir, *filter(None, [store.embedded.directory])]
        embedded = store.embedded.model_copy(update={"directory": at(store.embedded.directory)})
        return self.model_copy(
            update={
                "workdir": at(self.workdir),
                "cluster": cluster.model_copy(
                    update={"slurm_conf": at(cluster.slurm_conf), "python": at(cluster.python)}
                ),
                "store": store.model_copy(
                    update={
                        "credentials_file": at(store.credentials_file),
                        "claims": at(store.claims),
                        "embedded": embedded,
                    }
                ),
                "command": command
                and command.model_copy(
                    update={"cwd": at(command.cwd), "checkpoints": at(command.checkpoints)}
                ),
                "data": data
                and data.model_copy(
                    update={
                        "inputs": tuple(text_at(item) for item in data.inputs),
                        # Once each, so that what is anchored already stays as it is.
                        "exclude": tuple(
                            dict.fromkeys(text_at(str(item)) for item in (*data.exclude, *own))
                        ),
                        "tokenizer": data.tokenizer
                        if data.tokenizer == BYTES
                        else text_at(data.tokenizer),
                    }
                ),
            }
        )
