"""The five stages: what they skip, what they refuse, and what they hand on.

Probes and rungs are judged from attempts that the ledger holds already, as it does after a crash of
the engine; the cheap stages run their real jobs on this host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from slurm.cluster import NodeState, Resources
from slurm.local import LocalCluster
from slurm.snapshot import Snapshot, take_snapshot
from slurm.spec import ClusterSpec, RetrySpec, ValidateSpec
from storage.checkpoint_records import CommitRef, SweepJournal
from storage.embedded import EmbeddedStore, resolved
from storage.errors import SpecError, StageFailed, SubmitRejected
from storage.job import JobDescription
from storage.keys import DatasetKeys, RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.records import (
    Action,
    Decision,
    Diagnosis,
    End,
    Exit,
    ExitCode,
    Intent,
    Kind,
    Stage,
    StageRecord,
    Why,
    encode,
    new_nonce,
)
from storage.shards.build import build_dataset, plan_shards
from storage.shards.manifest import load_manifest
from storage.spec import DataSpec, RetentionSpec, StoreSpec
from tasks import prune as prune_stage
from tasks import smoke as smoke_stage
from tasks import validate as validate_stage
from tasks.context import RunContext
from tasks.eyes import Unseen
from tasks.failures import AttemptFailed
from tasks.prune import prune
from tasks.shard import shard
from tasks.smoke import smoke
from tasks.spec import SmokeSpec
from tasks.stage import fingerprint
from tasks.train import inputs as train_inputs
from tasks.train import units as train_units
from tasks.validate import validate
from tests.slurm.measures import GOOD
from trainer.spec import TrainSpec

pytestmark = pytest.mark.s3


@dataclass
class Notebook(Unseen):
    """Writes down what the stages tell."""

    skipped: list[Stage] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def stage_skipped(self, record: StageRecord) -> None:
        self.skipped.append(record.stage)

    def say(self, message: str) -> None:
        self.said.append(message)


class Here(LocalCluster):
    """This host, with nodes in the states that a test wants; jobs are counted, or refused."""

    def __init__(self, spec: ClusterSpec, *, workdir: Path) -> None:
        super().__init__(spec, workdir=workdir)
        self.gates_here = True
        self.replaces_here = True
        self.takes_jobs = True
        self.submitted: list[str] = []
        self.states: dict[str, str] = {}

    @property
    def gates(self) -> bool:
        return self.gates_here

    @property
    def replaces_nodes(self) -> bool:
        return self.replaces_here

    def nodes(self) -> tuple[NodeState, ...]:
        return tuple(
            replace(
                node,
                raw_state=(state := self.states.get(node.name, "idle")),
                responds=state != "down",
                idle=state == "idle",
            )
            for node in super().nodes()
        )

    def submit(self, job: JobDescription, resources: Resources) -> str:
        if not self.takes_jobs:
            raise SubmitRejected("sbatch: error: Batch job submission failed: no job is taken here")
        self.submitted.append(job.intent.unit)
        return super().submit(job, resources)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    server = EmbeddedStore(
        directory=tmp_path_factory.mktemp("store"), host="127.0.0.1", bucket="headrace"
    )
    opened = ObjectStore(resolved(StoreSpec(), server.ensure()))
    yield opened
    opened.close()
    server.stop()


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return take_snapshot(tmp_path_factory.mktemp("code"))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, with its cluster and eyes in reach of the test."""

    context: RunContext
    cluster: Here
    eyes: Notebook

    def forced(self, *stages: Stage) -> RunContext:
        return replace(self.context, forced=frozenset(stages))

    def asked(self, stage: Stage, inputs: Mapping[str, Any], *, generation: int = 0) -> str:
        digest = fingerprint(stage, inputs, self.context.snapshot.digest)
        return f"{digest}.{generation}"

    def record(
        self,
        stage: Stage,
        unit: str,
        *,
        asked: str,
        outputs: Mapping[str, Any] | None,
        diagnosis: Diagnosis | None = None,
    ) -> None:
        """An attempt that has ended, as a crashed engine leaves it behind."""
        ledger, now = self.context.ledger, datetime.now(UTC)
        number = 1 + len(ledger.attempts(stage))
        intent = Intent(
            run=self.context.run,
            stage=stage,
            unit=unit,
            attempt=number,
            token=f"{self.context.run}-{stage}-{number}",
            nonce=new_nonce(),
            cluster=self.cluster.name,
            user="me",
            why=Why.FIRST,
            after=None,
            nodes=1,
            ranks_per_node=1,
            fingerprint=asked,
            created_at=now,
        )
        ledger.claim_intent(intent)
        if outputs is not None:
            done = Exit(
                code=ExitCode.DONE, rank=0, node="n", outputs=outputs, nonce=new_nonce(), at=now
            )
            ledger.claim_exit(intent, done)
        action = Action.DONE if outputs is not None else Action.GIVE_UP
        end = End(
            diagnosis=diagnosis or Diagnosis(kind=Kind.DONE),
            decision=Decision(action=action, reason="as the test wants it"),
            by="a crashed engine",
            nonce=new_nonce(),
            at=now,
        )
        ledger.claim_end(intent, end)


@pytest.fixture
def make_run(store: ObjectStore, snapshot: Snapshot, tmp_path: Path) -> Callable[..., Run]:
    def make(**cluster_fields: Any) -> Run:
        name = f"run-{new_nonce()}"
        spec = ClusterSpec.model_validate({"nodes": 2, **cluster_fields})
        cluster, eyes = Here(spec, workdir=tmp_path), Notebook()
        context = RunContext(
            run=name,
            workdir=tmp_path,
            cluster=cluster,
            cluster_spec=spec,
            retry=RetrySpec(heartbeat_s=1.0),
            store=store.spec,
            ledger=Ledger(store, RunKeys(prefix="", run=name)),
            snapshot=snapshot,
            eyes=eyes,
        )
        return Run(context=context, cluster=cluster, eyes=eyes)

    return make


def corpus(folder: Path) -> DataSpec:
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"document {number} " * 60)
    return DataSpec(inputs=(str(folder),), shard_tokens=2000, validation_fraction=0.2)


class TestShard:
    def test_the_stage_hands_on_a_data_set_and_is_done_once(
        self, make_run: Callable[..., Run], tmp_path: Path
    ) -> None:
        run, data = make_run(), corpus(tmp_path / "corpus")
        first = shard(run.context, data)
        manifest = load_manifest(run.context.ledger.store, first.outputs["manifest_key"])
        assert manifest.dataset_id == first.outputs["dataset_id"]
        assert manifest.tokens == first.outputs["tokens"]
        assert (manifest.documents, first.outputs["dropped"]) == (8, 0)

        assert shard(run.context, data) == first
        assert run.cluster.submitted == ["shard"]
        assert run.eyes.skipped == [Stage.SHARD]

        # Forced, it is built anew, beside what was stored, and comes out the same.
        again = shard(run.forced(Stage.SHARD), data)
        assert run.cluster.submitted == ["shard", "shard"]
        assert again.outputs["manifest_key"] != first.outputs["manifest_key"]
        assert again.outputs["dataset_id"] == first.outputs["dataset_id"]

    def test_a_changed_input_is_another_data_set_and_a_bad_one_is_told_at_once(
        self, make_run: Callable[..., Run], tmp_path: Path
    ) -> None:
        run, data = make_run(), corpus(tmp_path / "corpus")
        before = fingerprint_inputs(data)
        (tmp_path / "corpus" / "0.txt").write_text("changed")
        assert fingerprint_inputs(data) != before
        with pytest.raises(SpecError, match=r"data\.inputs\[0\] .* matches no file"):
            shard(run.context, DataSpec(inputs=(str(tmp_path / "*.none"),)))
        assert run.cluster.submitted == []

    def test_documents_past_the_limit_fail_the_stage_and_are_named(
        self, make_run: Callable[..., Run], tmp_path: Path
    ) -> None:
        run, data = make_run(), corpus(tmp_path / "corpus")
        (tmp_path / "corpus" / "9.txt").write_bytes(b"\xff")
        with pytest.raises(AttemptFailed, match="max_bad_documents 0"):
            shard(run.context, data)
        assert run.cluster.submitted == ["shard"]


def fingerprint_inputs(data: DataSpec) -> str:
    return plan_shards(data).build


OTHER_FAULTS = ((2, "matmul"), (3, "disk_write"))


def probe_outputs(node: str, **changes: Any) -> dict[str, Any]:
    measures = {
        name: {"value": value, "failure": "", "unknown": ""}
        for name, value in {**GOOD, **changes}.items()
    }
    return {"node": node, "measures": measures}


class TestValidate:
    SPEC = ValidateSpec(min_allreduce_gb_per_s=0.5)

    def fill(
        self,
        run: Run,
        *probes: Mapping[str, Any],
        spec: ValidateSpec = SPEC,
        gb_per_s: float | None = 2.0,
        generation: int = 0,
    ) -> None:
        """Puts the results of probes and of the all-reduce into the ledger."""
        inputs = validate_stage.inputs(run.context, spec, run.cluster.nodes())
        asked = run.asked(Stage.VALIDATE, inputs, generation=generation)
        for probe in probes:
            unit = f"probe-{probe['node']}"
            run.record(Stage.VALIDATE, unit, asked=asked, outputs=probe)
        if gb_per_s is not None:
            outputs = {"nodes": 2, "bus_gb_per_s": gb_per_s}
            run.record(Stage.VALIDATE, "all-reduce", asked=asked, outputs=outputs)

    def test_real_probes_and_a_real_all_reduce_find_this_host_fit(
        self, make_run: Callable[..., Run], tmp_path: Path
    ) -> None:
        run = make_run()
        spec = ValidateSpec(
            min_memory_copy_gb_per_s=1e-6,
            min_matmul_gflop_per_s=1e-6,
            min_disk_write_mb_per_s=1e-6,
            min_allreduce_gb_per_s=1e-9,
            scratch=tmp_path,
        )
        record = validate(run.context, spec)
        assert record.outputs["healthy"] == ["local1", "local2"]
        assert record.outputs["unfit"] == []
        assert record.outputs["allreduce_gb_per_s"] > 0
        assert {row["node"] for row in record.outputs["nodes"]} == {"local1", "local2"}
        assert "GB/s" in record.outputs["nodes"][0]["measures"]["memory_copy"]
        jobs = ["probe-local1", "probe-local2", "all-reduce"]
        assert run.cluster.submitted == jobs

        assert validate(run.context, spec) == record
        assert run.cluster.submitted == jobs

    def test_a_slow_node_is_unfit_with_its_reason_and_the_others_go_on(
        self, make_run: Callable[..., Run]
    ) -> None:
        run = make_run(nodes=3)
        spec = self.SPEC.model_copy(update={"min_healthy": 2})
        slow = probe_outputs("local2", disk_write=0.1)
        self.fill(run, probe_outputs("local1"), slow, probe_outputs("local3"), spec=spec)
        run.cluster.takes_jobs = False
        record = validate(run.context, spec)
        assert record.outputs["healthy"] == ["local1", "local3"]
        assert record.outputs["unfit"] == ["local2"]
        row = record.outputs["nodes"][1]
        assert (row["node"], row["verdict"]) == ("local2", "critical")
        assert "0.1 MB/s (expected: at least 10 MB/s" in row["findings"][0]
        assert any("local2 is unfit: disk write" in said for said in run.eyes.said)

    def test_too_few_fit_nodes_stop_the_run_and_are_measured_anew_the_next_time(
        self, make_run: Callable[..., Run]
    ) -> None:
        run = make_run()
        slow = probe_outputs("local2", matmul=0.01)
        self.fill(run, probe_outputs("local1"), slow, gb_per_s=None)
        with pytest.raises(StageFailed, match=r"1 nodes are fit and cluster\.nodes asks") as no:
            validate(run.context, self.SPEC)
        assert "local2: matmul: 0.01 GFLOP/s" in str(no.value)
        (refusal,) = run.context.ledger.stage_records(Stage.VALIDATE)
        assert (refusal.outputs["passed"], refusal.outputs["unfit"]) == (False, ["local2"])

        self.fill(run, probe_outputs("local1"), probe_outputs("local2"), generation=1)
        assert validate(run.context, self.SPEC).outputs["unfit"] == []
        assert run.cluster.submitted == []

    def test_of_a_range_of_nodes_the_least_have_to_be_fit(
        self, make_run: Callable[..., Run]
    ) -> None:
        run = make_run(nodes="2-3")
        run.cluster.takes_jobs = False
        slow = probe_outputs("local2", matmul=0.01)
        self.fill(run, probe_outputs("local1"), slow, probe_outputs("local3"))
        record = validate(run.context, self.SPEC)
        assert (record.outputs["passed"], record.outputs["unfit"]) == (True, ["local2"])

        run = make_run(nodes="2-3")
        others = (probe_outputs(f"local{k}", **{check: 0.01}) for k, check in OTHER_FAULTS)
        self.fill(run, probe_outputs("local1"), *others, gb_per_s=None)
        with pytest.raises(StageFailed, match=r"1 nodes are fit and cluster\.nodes asks for 2"):
            validate(run.context, self.SPEC)

    def test_a_node_that_cannot_run_the_probe_is_a_finding(
        self, make_run: Callable[..., Run]
    ) -> None:
        run = make_run(nodes=3)
        spec = self.SPEC.model_copy(update={"min_healthy": 2})
        self.fill(run, probe_outputs("local1"), probe_outputs("local3"), spec=spec)
        run.cluster.takes_jobs = False
        record = validate(run.context, spec)
        assert record.outputs["unfit"] == ["local2"]
        assert "no job is taken here" in record.outputs["nodes"][1]["findings"][0]

    @pytest.mark.parametrize("nodes", [1, 3])
    def test_a_refusal_of_every_probe_is_told_once_and_blames_no_node(
        self, make_run: Callable[..., Run], nodes: int
    ) -> None:
        run = make_run(nodes=nodes)
        run.cluster.takes_jobs = False
        with pytest.raises(StageFailed, match="so no node was looked at") as no:
            validate(run.context, self.SPEC)
        assert str(no.value).count("no job is taken here") == 1
        (record,) = run.context.ledger.stage_records(Stage.VALIDATE)
        assert record.outputs["unfit"] == []

    def test_a_check_that_most_nodes_fail_stops_the_run_and_blames_no_node(
        self, make_run: Callable[..., Run]
    ) -> None:
        run = make_run(nodes=3)
        probes = [probe_outputs(f"local{k}", memory_copy=0.1) for k in (1, 2, 3)]
        self.fill(run, *probes, gb_per_s=None)
        with pytest.raises(StageFailed, match="3 of 3 nodes fail the check 'memory_copy'"):
            validate(run.context, self.SPEC)
        (record,) = run.context.ledger.stage_records(Stage.VALIDATE)
        assert record.outputs["unfit"] == []

    def test_a_slow_network_stops_the_run_with_figure_and_limit(
        self, make_run: Callable[..., Run]
    ) -> None:
        run = make_run()
        self.fill(run, probe_outputs("local1"), probe_outputs("local2"), gb_per_s=0.1)
        with pytest.raises(StageFailed, match=r"0\.1 GB/s .*at least 0\.5 GB/s, validation\.min_"):
            validate(run.context, self.SPEC)

    def test_nodes_that_slurm_holds_back_are_unfit_and_busy_ones_keep_their_verdict(
        self, make_run: Callable[..., Run]
    ) -> None:
        run = make_run(nodes=3)
        spec = self.SPEC.model_copy(update={"min_healthy": 2})
        run.cluster.takes_jobs = False
        self.fill(run, *(probe_outputs(f"local{k}") for k in (1, 2, 3)), spec=spec)
        assert validate(run.context, spec).outputs["healthy"] == ["local1", "local2", "local3"]

        run.cluster.states = {"local1": "allocated", "local2": "allocated", "local3": "down"}
        record = validate(run.forced(Stage.VALIDATE), spec)
        assert record.outputs["healthy"] == ["local1", "local2"]
        assert record.outputs["unfit"] == ["local3"]
        assert "does not respond" in record.outputs["nodes"][2]["findings"][0]


class Quiet:
    """Nobody who watches a build."""

    def progress(self, *, step: int, **numbers: float) -> None:
        return

    def is_fenced(self) -> bool:
        return False


def rung_outputs(nodes: int, tokens_per_s: float) -> dict[str, Any]:
    return {
        "nodes": nodes,
        "world_size": nodes,
        "tokens_per_s": tokens_per_s,
        "step_s": [0.1, 0.1],
        "split_s": {"compute_s": 0.05, "comm_s": 0.01 * nodes},
        "slowest_rank": 0,
        "slowest_node": "local1",
    }


@pytest.fixture(scope="module")
def manifest_key(store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A data set that is there already."""
    job = plan_shards(corpus(tmp_path_factory.mktemp("data") / "corpus"))
    keys = DatasetKeys(prefix="", build=job.build)
    build_dataset(job, store=store, keys=keys, watcher=Quiet())
    return keys.manifest


OF_THE_STEP: list[dict[str, Any]] = [
    {"model": {"layers": 5}},
    {"sequence": 256},
    {"micro_batch": 2},
    {"param_dtype": "bfloat16"},
    {"threads": 2},
]
BESIDE_THE_STEP: list[dict[str, Any]] = [
    {"steps": 50},
    {"global_batch": 128},
    {"seed": 1},
    {"schedule": {"peak_lr": 1e-3}},
    {"optimizer": {"weight_decay": 0.2}},
    {"checkpoint": {"every_steps": 7}},
    {"validate_every_steps": 7},
    {"validate_batches": 1},
    {"log_every_steps": 1},
    {"start_timeout_s": 60},
    {"step_timeout_s": 60},
    {"watchdog": {"floor_s": 60}},
]


class TestSmoke:
    SPEC = SmokeSpec(steps=8, warmup_steps=2)
    TRAIN = TrainSpec()

    def fill(
        self, run: Run, manifest_key: str, speeds: Mapping[int, float], *, generation: int = 0
    ) -> None:
        inputs = smoke_stage.inputs(
            run.context, self.SPEC, train=self.TRAIN, manifest_key=manifest_key
        )
        asked = run.asked(Stage.SMOKE, inputs, generation=generation)
        for nodes, speed in speeds.items():
            outputs = rung_outputs(nodes, speed)
            run.record(Stage.SMOKE, f"rung-{nodes}", asked=asked, outputs=outputs)

    def asked(self, run: Run, manifest_key: str, changed: Mapping[str, Any]) -> str:
        train = TrainSpec.model_validate(changed)
        inputs = smoke_stage.inputs(run.context, self.SPEC, train=train, manifest_key=manifest_key)
        return run.asked(Stage.SMOKE, inputs)

    def climb(self, run: Run, manifest_key: str) -> StageRecord:
        return smoke(run.context, self.SPEC, train=self.TRAIN, manifest_key=manifest_key)

    def climb_again(self, run: Run, manifest_key: str) -> StageRecord:
        """With the rungs of one node and of two measured anew."""
        generation = len(run.context.ledger.stage_records(Stage.SMOKE))
        self.fill(run, manifest_key, {1: 1000, 2: 1900}, generation=generation)
        context = run.forced(Stage.SMOKE)
        return smoke(context, self.SPEC, train=self.TRAIN, manifest_key=manifest_key)

    def test_the_ladder_stops_at_the_first_rung_that_does_not_scale(
        self, make_run: Callable[..., Run], manifest_key: str
    ) -> None:
        run = make_run(nodes=4)
        run.cluster.takes_jobs = False
        # No result for four nodes: had it been asked for, the refused job would be the error.
        self.fill(run, manifest_key, {1: 1000, 2: 1200})
        with pytest.raises(StageFailed, match=r"2 nodes do 1\.20 times .*communication grew"):
            self.climb(run, manifest_key)
        (record,) = run.context.ledger.stage_records(Stage.SMOKE)
        assert [row["nodes"] for row in record.outputs["rungs"]] == [1, 2]

        self.fill(run, manifest_key, {1: 1000, 2: 1900, 4: 3700}, generation=1)
        passed = self.climb(run, manifest_key)
        assert [row["efficiency"] for row in passed.outputs["rungs"]] == [1.0, 0.95, 0.925]
        assert (passed.outputs["passed"], passed.outputs["gated"]) == (True, True)
        assert self.climb(run, manifest_key) == passed
        assert run.eyes.skipped == [Stage.SMOKE]

    def test_where_cores_are_shared_the_figures_are_reported_and_gate_nothing(
        self, make_run: Callable[..., Run], manifest_key: str
    ) -> None:
        run = make_run()
        run.cluster.gates_here = False
        self.fill(run, manifest_key, {1: 1000, 2: 1000})
        record = self.climb(run, manifest_key)
        assert (record.outputs["passed"], record.outputs["gated"]) == (True, False)
        assert "reported only" in record.outputs["reason"]

    def test_a_rung_without_a_result_stops_the_ladder(
        self, make_run: Callable[..., Run], manifest_key: str
    ) -> None:
        run = make_run()
        run.cluster.takes_jobs = False
        self.fill(run, manifest_key, {1: 1000})
        with pytest.raises(AttemptFailed, match="rung-2"):
            self.climb(run, manifest_key)
        assert run.context.ledger.stage_records(Stage.SMOKE) == ()

    def test_of_a_range_of_nodes_the_ladder_goes_up_to_those_that_are_there(
        self, make_run: Callable[..., Run], manifest_key: str
    ) -> None:
        run = make_run(nodes="2-4")
        run.cluster.takes_jobs = run.cluster.replaces_here = False
        run.cluster.states = {"local4": "down"}
        self.fill(run, manifest_key, {1: 1000, 2: 1900, 3: 2800})
        record = self.climb(run, manifest_key)
        assert [row["nodes"] for row in record.outputs["rungs"]] == [1, 2, 3]

    def test_nodes_that_are_lost_on_the_way_up_end_the_ladder_sooner(
        self,
        make_run: Callable[..., Run],
        manifest_key: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        run = make_run(nodes="2-4")
        run.cluster.replaces_here = False
        lost = ["local4"]

        def lose_a_node(job: JobDescription, _: Resources) -> str:
            run.cluster.states |= dict.fromkeys(lost, "down")
            raise SubmitRejected(f"no {job.intent.unit} any more")

        monkeypatch.setattr(run.cluster, "submit", lose_a_node)
        self.fill(run, manifest_key, {1: 1000, 2: 1900, 3: 2800})
        record = self.climb(run, manifest_key)
        assert [row["nodes"] for row in record.outputs["rungs"]] == [1, 2, 3]

        # Where nothing was lost, or too much, a rung without a result is what it always was.
        for others in ([], ["local3", "local4"]):
            lost[:], run.cluster.states = others, {}
            with pytest.raises(AttemptFailed, match="no rung-4 any more"):
                self.climb_again(run, manifest_key)

    @pytest.mark.parametrize("changed", OF_THE_STEP, ids=lambda changed: next(iter(changed)))
    def test_what_changes_the_measured_step_calls_for_a_new_ladder(
        self, make_run: Callable[..., Run], manifest_key: str, changed: Mapping[str, Any]
    ) -> None:
        assert self.asked(make_run(), manifest_key, changed) != self.asked(
            make_run(), manifest_key, {}
        )

    def test_a_new_field_of_the_training_is_placed_on_one_side(self) -> None:
        placed = [name for changed in (*OF_THE_STEP, *BESIDE_THE_STEP) for name in changed]
        assert sorted(placed) == sorted(TrainSpec.model_fields)

    @pytest.mark.parametrize("changed", BESIDE_THE_STEP, ids=lambda changed: next(iter(changed)))
    def test_what_leaves_the_measured_step_as_it_is_keeps_the_ladder(
        self, make_run: Callable[..., Run], manifest_key: str, changed: Mapping[str, Any]
    ) -> None:
        run = make_run()
        run.cluster.takes_jobs = False
        self.fill(run, manifest_key, {1: 1000, 2: 1900})
        record = self.climb(run, manifest_key)
        train = TrainSpec.model_validate(changed)
        assert smoke(run.context, self.SPEC, train=train, manifest_key=manifest_key) == record
        assert run.eyes.skipped == [Stage.SMOKE]

    def test_a_warm_up_as_long_as_the_rung_is_a_mistake_in_the_spec(self) -> None:
        with pytest.raises(ValidationError, match="warmup_steps 5 must be below steps 5"):
            SmokeSpec(steps=5, warmup_steps=5)


def test_the_training_is_one_job_over_all_ranks_that_resumes(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(nodes=3, ranks_per_node=2)
    (unit,) = train_units(run.context, TrainSpec(), manifest_key="datasets/x/manifest.json")
    assert (unit.nodes, unit.ranks_per_node, unit.resumes) == (3, 2, True)
    assert unit.payload["smoke"] is None
    assert unit.most_nodes is None
    assert unit.sidecar == "storage.checkpoints.flusher"
    (unit,) = train_units(make_run(nodes="3-5").context, TrainSpec(), manifest_key="none")
    assert (unit.nodes, unit.most_nodes) == (3, 5)


def test_saving_at_other_times_is_the_same_training(
    make_run: Callable[..., Run], manifest_key: str
) -> None:
    def asked(changed: Mapping[str, Any]) -> str:
        run, spec = make_run(), TrainSpec.model_validate(changed)
        return run.asked(Stage.TRAIN, train_inputs(run.context, spec, manifest_key=manifest_key))

    assert asked({"checkpoint": {"auto": True}}) == asked({})
    assert asked({"seed": 1}) != asked({})


class TestPrune:
    def test_an_empty_run_is_swept_once(self, make_run: Callable[..., Run]) -> None:
        run, spec = make_run(), RetentionSpec()
        record = prune(run.context, spec)
        assert (record.outputs["kept"], record.outputs["deleted"]) == ([], [])
        assert prune(run.context, spec) == record
        assert run.cluster.submitted == ["prune"]

    def test_what_a_sweep_deleted_does_not_call_for_another_one(
        self, make_run: Callable[..., Run]
    ) -> None:
        ledger = make_run().context.ledger
        before = prune_stage.inputs(ledger, RetentionSpec())
        ref = CommitRef(step=5, attempt=1, save="a")
        journal = SweepJournal(sweep="s", refs=(ref,), at=datetime.now(UTC))
        ledger.store.put(ledger.keys.sweep("s"), encode(journal))
        after = prune_stage.inputs(ledger, RetentionSpec())
        assert (before["commits"], after["commits"]) == ([], [ref])
        assert after["past_grace"] == [ref]
