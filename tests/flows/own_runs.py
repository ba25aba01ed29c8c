"""Runs of a shell line in place of training: quick, and at their end when a test says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flows.opening import open_ledger
from flows.spec import PipelineSpec
from slurm.cluster import open_cluster
from storage import embedded
from storage.attempts import Attempt
from storage.ledger import Ledger
from storage.records import Stage

WAITS = "echo step 1; touch begun; until [ -e go ]; do sleep 0.05; done"


@dataclass(frozen=True)
class Place:
    """A folder with a home and a store of its own, in which a test's runs are.

    What a test leaves running on this host, its jobs and the store, ends with it.
    """

    folder: Path

    def spec(self, run: str, line: str = WAITS, **blocks: Any) -> PipelineSpec:
        """A run of one node of this host, whose training is the shell line, in a folder `run`."""
        (self.folder / run).mkdir(exist_ok=True)
        fields = {
            "run": run,
            "workdir": self.folder / "work",
            "store": {"embedded": {"directory": self.folder / "store"}},
            "command": {
                "argv": ["bash", "-c", f"cd {self.folder / run}; {line}"],
                "progress": "step (?P<step>[0-9]+)",
            },
            "retry": {"heartbeat_s": 0.5, "backoff_s": 0.1},
        }
        return PipelineSpec.model_validate(fields | blocks).anchored(self.folder)

    def file(self, spec: PipelineSpec) -> Path:
        path = self.folder / f"{spec.run}.yaml"
        path.write_text(json.dumps(spec.model_dump(mode="json")))
        return path

    def let_end(self, run: str) -> None:
        (self.folder / run / "go").touch()

    def has_begun(self, run: str) -> bool:
        return (self.folder / run / "begun").exists()

    def attempts(self, spec: PipelineSpec, stage: Stage = Stage.TRAIN) -> tuple[Attempt, ...]:
        with self.ledger(spec) as ledger:
            return ledger.attempts(stage)

    @contextmanager
    def ledger(self, spec: PipelineSpec) -> Iterator[Ledger]:
        with open_ledger(spec) as (_, ledger):
            yield ledger


@contextmanager
def a_place(folder: Path) -> Iterator[Place]:
    place = Place(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_HOME", str(folder / "home"))
        try:
            yield place
        finally:
            spec = place.spec("any")
            cluster = open_cluster(spec.cluster, workdir=spec.workdir)
            for token, job in cluster.queue().items():
                cluster.cancel(job_id=job.job_id or "", token=token)
            server = embedded.store_of(spec.store, workdir=spec.workdir)
            assert server is not None
            server.stop()
