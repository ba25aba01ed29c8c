"""What the tests of `slurm` need to make jobs of attempts, and to wait for their ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from slurm.cluster import Cluster, JobObservation, JobState, Resources
from slurm.snapshot import take_snapshot
from storage.attempts import Attempt
from storage.job import JobDescription
from storage.records import Exit, Intent, Stage, Why, new_nonce
from storage.spec import StoreSpec

ENTRIES = Path(__file__).resolve().parent
DEADLINE_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """A cluster, a store and a folder: where a test submits its jobs."""

    cluster: Cluster
    store: StoreSpec
    workdir: Path
    name: str

    def job(
        self, *, attempt: int = 1, nodes: int = 1, ranks: int = 2, **payload: Any
    ) -> JobDescription:
        intent = Intent(
            run=self.name,
            stage=Stage.TRAIN,
            unit=f"unit-{attempt}",
            attempt=attempt,
            token=f"{self.name}-train-{attempt}-{new_nonce()}",
            nonce=new_nonce(),
            cluster=self.cluster.name,
            user="tester",
            why=Why.FIRST,
            after=None,
            nodes=nodes,
            ranks_per_node=ranks,
            fingerprint="f",
            created_at=datetime.now(UTC),
        )
        return JobDescription(
            intent=intent,
            store=self.store,
            entry="entries",
            payload=payload,
            folder=self.workdir / self.name / "train" / f"{attempt:04d}",
            code=take_snapshot(self.workdir).path,
            python=Path(sys.executable),
            heartbeat_s=0.5,
        )

    def submit(self, job: JobDescription, **resources: Any) -> str:
        job.open_ledger().claim_intent(job.intent)
        asked: dict[str, Any] = {
            "nodes": job.intent.nodes,
            "ranks_per_node": job.intent.ranks_per_node,
            "time_limit_min": 2,
            "signal_lead_s": 30,
            **resources,
        }
        return self.cluster.submit(job, Resources(**asked))

    def look(self, job: JobDescription) -> JobObservation:
        return self.cluster.observe([job.intent.token])[job.intent.token]

    def wait_for_end(self, job: JobDescription) -> JobObservation:
        seen = wait_for(lambda: _if_ended(self.look(job)), what=f"the end of {job.intent.token}")
        assert seen is not None
        return seen

    def attempt(self, job: JobDescription) -> Attempt:
        attempt = job.open_ledger().attempt(job.intent.stage, job.intent.attempt)
        assert attempt is not None
        return attempt

    def exit(self, job: JobDescription) -> Exit:
        record = self.attempt(job).exit
        assert record is not None, logs(job)
        return record


@dataclass(frozen=True)
class Sent:
    """A job that was submitted, and where."""

    place: Workplace
    job: JobDescription
    job_id: str

    @cached_property
    def seen(self) -> JobObservation:
        return self.place.wait_for_end(self.job)

    @property
    def word(self) -> Exit:
        assert self.seen
        return self.place.exit(self.job)

    @property
    def attempt(self) -> Attempt:
        assert self.seen
        return self.place.attempt(self.job)

    @property
    def logs(self) -> str:
        return logs(self.job)


def logs(job: JobDescription) -> str:
    """Everything that the job wrote, for the message of a test that fails."""
    files = sorted(job.folder.glob("*.log"))
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in files)


def wait_for(ask: Callable[[], Any], *, what: str) -> Any:
    """The first true answer; a deadline far away only keeps a broken test from hanging."""
    deadline = time.monotonic() + DEADLINE_S
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s in vain for {what}"
        time.sleep(0.1)
    return answer


def wait_for_file(path: Path) -> None:
    wait_for(path.exists, what=str(path))


def _if_ended(seen: JobObservation) -> JobObservation | None:
    """An end with its exit code, for which accounting may need a moment."""
    return seen if seen.state is JobState.ENDED and seen.exit_code else None
