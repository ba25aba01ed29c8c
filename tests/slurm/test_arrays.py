"""Arrays of jobs: one attempt in many elements, whose parts come together as one job's would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from slurm.cluster import JobState, Resources
from slurm.commands import CommandResult
from slurm.evidence import gather
from slurm.job_logs import batch_log, element_folder, node_logs
from slurm.snapshot import take_snapshot
from slurm.spec import ClusterSpec, RetrySpec
from slurm.submit import SlurmCluster
from storage.attempts import Attempt
from storage.keys import DatasetKeys, RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.records import ExitCode, Kind, Stage, new_nonce
from storage.shards.build import ShardJob, build_dataset, plan_shards
from storage.shards.manifest import Manifest, load_manifest
from storage.spec import DataSpec, StoreSpec
from tasks.context import RunContext
from tasks.eyes import Unseen
from tasks.runner import carry_out
from tasks.shard import units
from tests.slurm.array_entries import VICTIM
from tests.slurm.jobs import Workplace, wait_for

ELEMENTS = 6
FILES = 20


class Ears(Unseen):
    """Hears what is said aloud, and how far it is."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: list[int] = []

    def say(self, message: str) -> None:
        self.said.append(message)

    def attempt_progress(self, attempt: Attempt, *, step: int, numbers: object) -> None:
        if attempt.number == 2:
            self.steps.append(step)


class Nobody:
    """Watches a build that runs here."""

    def progress(self, *, step: int, **numbers: float) -> None: ...

    def is_fenced(self) -> bool:
        return False


def shard_job(folder: Path) -> ShardJob:
    """A task for each of its files."""
    folder.mkdir()
    for number in range(FILES):
        words = " ".join(f"{number}.{word}" for word in range(40 * (number % 5 + 1)))
        (folder / f"{number:02d}.txt").write_text(words)
    spec = DataSpec(inputs=(str(folder),), shard_tokens=1000, validation_fraction=0.2)
    return plan_shards(spec).model_copy(update={"task_bytes": 1})


def stored_bytes(store: ObjectStore, manifest: Manifest) -> Iterator[tuple[str, bytes, bytes]]:
    for shard in manifest.shards:
        yield shard.split, store.get(shard.data.key), store.get(shard.ends.key)


@pytest.mark.slurm
def test_an_array_with_a_killed_element_makes_the_data_set_that_one_job_makes(
    slurm_spec: ClusterSpec, bridge_store: StoreSpec, tmp_path: Path
) -> None:
    job = shard_job(tmp_path / "documents")
    (unit,) = units(job, jobs=ELEMENTS)
    assert unit.elements == ELEMENTS
    store = ObjectStore(bridge_store)
    name = f"run-{new_nonce()}"
    ears = Ears()
    context = RunContext(
        run=name,
        workdir=tmp_path,
        cluster=SlurmCluster(slurm_spec),
        cluster_spec=slurm_spec,
        retry=RetrySpec(backoff_s=0.1, heartbeat_s=1.0),
        store=bridge_store,
        ledger=Ledger(store, RunKeys(prefix=bridge_store.prefix, run=name)),
        snapshot=take_snapshot(tmp_path),
        eyes=ears,
    )
    unit = replace(unit, entry="array_entries")
    result = carry_out(context, Stage.SHARD, [unit], fingerprint="f.0")["shard"]

    first, second = context.ledger.attempts(Stage.SHARD)
    assert first.start is not None
    assert first.start.job is not None
    assert [one.number for one in first.elements] == list(range(ELEMENTS))
    jobs = {one.start.job for one in first.elements if one.start is not None}
    assert {one.job_id for one in jobs if one is not None} == {first.start.job.job_id}
    codes = [one.exit.code for one in first.elements if one.exit is not None]
    assert codes == [137 if one == VICTIM else 0 for one in range(ELEMENTS)]
    assert first.exit == first.elements[VICTIM].exit
    assert first.end is not None
    assert first.end.diagnosis.kind is Kind.UNKNOWN
    told = "\n".join(first.end.diagnosis.evidence)
    assert f"of element {VICTIM}" in told, told
    assert "a last line before the end" in told, told
    assert any(f"element {VICTIM} of attempt 1 has left" in one for one in ears.said), ears.said

    assert result.attempt.number == second.number == 2
    assert second.exit is not None
    assert second.exit.code == ExitCode.DONE
    assert ears.steps == sorted(ears.steps)
    assert ears.steps[-1] == FILES
    for element in range(ELEMENTS):
        folder = element_folder(context.attempt_folder(Stage.SHARD, 2), element)
        assert batch_log(folder).exists()
        assert len(node_logs(folder)) == 1

    whole = load_manifest(store, result.outputs["manifest_key"])
    keys = DatasetKeys(prefix=name, build="alone")
    lone = build_dataset(job, store=store, keys=keys, watcher=Nobody())
    assert lone is not None
    assert whole.dataset_id == lone.dataset_id == result.outputs["dataset_id"]
    assert list(stored_bytes(store, whole)) == list(stored_bytes(store, lone))


@pytest.mark.slurm
def test_an_array_is_seen_as_one_job_and_ends_as_one(there: Workplace) -> None:
    job = there.job(ranks=1, part="wait")
    job = replace(job, intent=replace(job.intent, elements=3))
    job_id = there.submit(job, elements=3)
    wait_for(lambda: len(there.attempt(job).elements) == 3, what="all elements to start")
    seen = there.look(job)
    assert (seen.state, seen.job_id) == (JobState.RUNNING, job_id)
    assert list(there.cluster.queue()).count(job.intent.token) == 1
    wait_for(lambda: len(there.attempt(job).heartbeats) == 3, what="a heartbeat of each element")

    there.cluster.cancel(job_id=job_id, token=job.intent.token)
    seen = there.wait_for_end(job)
    assert seen.job_id == job_id
    assert seen.raw_state.startswith("CANCELLED")
    attempt = there.attempt(job)
    assert attempt.exit is None
    assert {one.exit.code for one in attempt.elements if one.exit} == {ExitCode.RESUME}
    evidence = gather(attempt, seen, nodes=(), folder=job.folder, now=attempt.intent.created_at)
    assert len(evidence.nodes) == 1


class Config:
    """A Slurm that is only asked for its configuration, and how often it was."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.asked = 0

    def run(self, command: Sequence[str], *, timeout_s: float = 60.0) -> CommandResult:
        assert list(command) == ["scontrol", "show", "config"]
        self.asked += 1
        return CommandResult(command=tuple(command), returncode=0, stdout=self.text, stderr="")


def test_the_sites_bound_is_asked_for_once_with_its_name() -> None:
    config = Config("ClusterName = c\nMaxArraySize            = 4\n")
    cluster = SlurmCluster(ClusterSpec(kind="slurm"), commands=config)
    assert (cluster.max_elements, cluster.name, cluster.max_elements) == (4, "c", 4)
    assert config.asked == 1


def test_the_script_names_the_elements_and_a_folder_of_logs_for_each(here: Workplace) -> None:
    cluster = SlurmCluster(ClusterSpec(kind="slurm"), commands=Config(""))
    job = here.job(ranks=1)
    one = cluster.script(job, Resources(nodes=1, ranks_per_node=1))
    assert "--array" not in one
    assert "%a" not in one
    job = replace(job, intent=replace(job.intent, elements=3))
    text = cluster.script(job, Resources(nodes=1, ranks_per_node=1, elements=3))
    assert "#SBATCH --array=0-2\n" in text
    assert f"#SBATCH --output={job.folder}/element.%a/batch.log\n" in text
    assert f"--output={job.folder}/element.%a/node.%N.log" in text
