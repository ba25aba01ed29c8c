"""Every key that Headrace uses in a bucket, built in one place.

The layout is a promise to old runs: keys may be added, none may change its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

RECORD_SUFFIX = ".json"
"""Of every record. Consoles and people leave other objects in a bucket."""


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class RunKeys:
    """Keys of one run, below `<prefix>/<run>/`."""

    prefix: str
    run: str

    @property
    def root(self) -> str:
        return _join(self.prefix, self.run)

    @property
    def run_record(self) -> str:
        return f"{self.root}/run.json"

    @property
    def probes(self) -> str:
        """Where the store's own probe works; nothing there outlives the probe."""
        return f"{self.root}/probe"

    def report(self, name: str) -> str:
        return f"{self.root}/reports/{name}"

    def stage_records(self, stage: str) -> str:
        return f"{self.root}/stages/{stage}/"

    def stage_record(self, stage: str, *, fingerprint: str, generation: int) -> str:
        return f"{self.root}/stages/{stage}/{fingerprint}.{generation}.json"

    def refusal(self, stage: str) -> str:
        """Why the stage gave up last; overwritten each time."""
        return f"{self.root}/refusals/{stage}.json"

    @property
    def cancels(self) -> str:
        """Wishes that whoever carries the run out should stop, a record each."""
        return f"{self.root}/cancels/"

    def attempts(self, stage: str) -> str:
        return f"{self.root}/attempts/{stage}/"

    def intent(self, stage: str, attempt: int) -> str:
        return f"{self.root}/attempts/{stage}/{attempt:04d}.json"

    def attempt_record(self, stage: str, attempt: int, kind: str) -> str:
        """Key of a record beside the intent: start, resume, loading, cancel, exit, end."""
        return f"{self.root}/attempts/{stage}/{attempt:04d}.{kind}.json"

    def element_record(self, stage: str, attempt: int, element: int, kind: str) -> str:
        """Key of a record of one element of an array: start, exit."""
        return f"{self.elements(stage, attempt)}{element}.{kind}.json"

    def elements(self, stage: str, attempt: int) -> str:
        return f"{self.root}/attempts/{stage}/{attempt:04d}.element."

    def heartbeat(self, stage: str, attempt: int, node: str, *, element: int | None = None) -> str:
        whose = node if element is None else f"{element}.{node}"
        return f"{self.root}/attempts/{stage}/{attempt:04d}.heartbeat.{whose}.json"

    def heartbeats(self, stage: str, attempt: int) -> str:
        return f"{self.root}/attempts/{stage}/{attempt:04d}.heartbeat."

    def metrics(self, stage: str, attempt: int) -> str:
        """The attempt's metrics so far, JSON lines; rewritten before each commit and at the end."""
        return f"{self.root}/attempts/{stage}/{attempt:04d}.metrics.jsonl"

    @property
    def checkpoints(self) -> str:
        return f"{self.root}/checkpoints/"

    def attempt_saves(self, attempt: int) -> str:
        return f"{self.root}/checkpoints/data/{attempt:04d}/"

    def save(self, attempt: int, *, step: int, save: str) -> str:
        """Folder of one save, with its trailing slash."""
        return f"{self.root}/checkpoints/data/{attempt:04d}/{step:012d}.{save}/"

    def done(self, attempt: int, *, step: int, save: str, rank: int) -> str:
        return f"{self.save(attempt, step=step, save=save)}done.{rank}.json"

    @property
    def commits(self) -> str:
        return f"{self.root}/checkpoints/commits/"

    def commit(self, attempt: int, *, step: int) -> str:
        return f"{self.root}/checkpoints/commits/{step:012d}.{attempt:04d}.json"

    @property
    def pins(self) -> str:
        return f"{self.root}/checkpoints/pins/"

    @property
    def quarantine(self) -> str:
        return f"{self.root}/checkpoints/quarantine/"

    def doubt(self, attempt: int, *, step: int, save: str, host: str) -> str:
        """What one host says against a checkpoint, below `quarantine`."""
        return f"{self.quarantine}{step:012d}.{attempt:04d}.{save}/{host}.json"

    @property
    def readers(self) -> str:
        """Markers of those who read checkpoints outside a job; they expire unless renewed."""
        return f"{self.root}/checkpoints/readers/"

    @property
    def sweeps(self) -> str:
        return f"{self.root}/checkpoints/sweeps/"

    def sweep(self, sweep_id: str) -> str:
        return f"{self.root}/checkpoints/sweeps/{sweep_id}.json"


@dataclass(frozen=True, kw_only=True)
class DatasetKeys:
    """Keys of one data set, below `<prefix>/datasets/<build>/`. Its id is its manifest's hash."""

    prefix: str
    build: str

    @property
    def root(self) -> str:
        return _join(self.prefix, "datasets", self.build)

    def shard(self, name: str) -> str:
        return f"{self.root}/shards/{name}"

    @property
    def tasks(self) -> str:
        return f"{self.root}/tasks/"

    def task_record(self, task: int) -> str:
        return f"{self.tasks}{task:06d}.json"

    @property
    def manifest(self) -> str:
        return f"{self.root}/manifest.json"
