"""Jobs on a real Slurm: what they run, what they see, how they end, and what is said of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from slurm.cluster import (
    JobState,
    Resources,
    SubmitDoubtful,
    SubmitLimited,
)
from slurm.commands import CommandResult, CommandTimedOut, SystemCommands
from slurm.devcluster import DevCluster
from slurm.job_logs import node_tails
from slurm.spec import ClusterSpec
from slurm.submit import SlurmCluster, read_answer
from storage.errors import SlurmError, SubmitRejected
from storage.records import ExitCode, Start, new_nonce
from storage.spec import StoreSpec
from tests.slurm.jobs import Sent, Workplace, logs, wait_for_file

SECRET = "hunter2hunter2"


@dataclass
class Recorder:
    """Real commands, of which some are told beforehand what to answer."""

    real: SystemCommands | None = None
    answers: dict[str, CommandResult | SlurmError] = field(default_factory=dict)
    seen: list[list[str]] = field(default_factory=list)

    def run(self, command: Sequence[str], *, timeout_s: float = 60.0) -> CommandResult:
        self.seen.append(list(command))
        answer = self.answers.get(command[0])
        if isinstance(answer, SlurmError):
            raise answer
        if answer is not None:
            return replace(answer, command=tuple(command))
        assert self.real is not None, command
        return self.real.run(command, timeout_s=timeout_s)


def says(stdout: str = "", *, returncode: int = 0, stderr: str = "") -> CommandResult:
    return CommandResult(command=("x",), returncode=returncode, stdout=stdout, stderr=stderr)


@pytest.fixture(scope="module")
def sent(slurm_spec: ClusterSpec, bridge_store: StoreSpec, shared_folder: Path) -> dict[str, Sent]:
    """Jobs of many ends, submitted together, since most of a job's time is spent waiting."""
    environ = {
        **os.environ,
        "AWS_PROFILE": "a-profile",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "PREFECT_API_KEY": SECRET,
        "SBATCH_PARTITION": "nowhere",
        "SLURM_NTASKS": "77",
    }
    commands = SystemCommands(slurm_conf=slurm_spec.slurm_conf, environ=environ)
    good = SlurmCluster(slurm_spec, commands=commands)
    bad_spec = slurm_spec.model_copy(update={"setup": ("ls /no/such/module", "true")})
    place = Workplace(
        cluster=good, store=bridge_store, workdir=shared_folder, name=f"run-{new_nonce()}"
    )
    badly_set_up = replace(place, cluster=SlurmCluster(bad_spec))

    def send(name: str, place: Workplace, *nodes: str, ranks: int = 2, **payload: Any) -> None:
        job = place.job(attempt=len(all_sent) + 1, nodes=len(nodes), ranks=ranks, **payload)
        if name == "void":
            void = Start(job=None, nonce=new_nonce(), at=datetime.now(UTC))
            job.open_ledger().claim_start(job.intent, void)
        memory = "150M" if name == "greedy" else "900M"
        job_id = place.submit(job, node_list=nodes, memory_per_node=memory)
        all_sent[name] = Sent(place, job, job_id)

    all_sent: dict[str, Sent] = {}
    send("meet", place, "n1", "n2", part="meet")
    send("fail", place, "n3", "n4", part="fail", rank=3)
    send("killed", place, "n3", "n4", part="killed", rank=2)
    send("greedy", place, "n1", ranks=1, part="greedy", megabytes=1000)
    send("void", place, "n2", ranks=1, part="meet")
    send("setup", badly_set_up, "n1", ranks=1, part="meet")
    return all_sent


@pytest.mark.slurm
def test_a_job_runs_its_entry_on_every_rank_and_tells_what_came_out(sent: dict[str, Sent]) -> None:
    one = sent["meet"]
    word, seen, nodes = one.word, one.seen, ("n1", "n2")
    assert word.code == ExitCode.DONE, one.logs
    assert (seen.job_id, seen.raw_state, seen.exit_code) == (one.job_id, "COMPLETED", "0:0")
    assert {step.name for step in seen.steps} >= {"batch", "0"}
    assert seen.nodes == nodes
    assert word.outputs["nodes"] == list(nodes)
    assert word.outputs["places"] == ["n1 0 4", "n1 1 4", "n2 0 4", "n2 1 4"]
    assert word.outputs["folder"] == str(one.job.folder)

    start = one.attempt.start
    assert start is not None
    assert start.job is not None
    assert (start.job.job_id, start.job.token) == (one.job_id, one.job.intent.token)
    assert start.nodes == nodes
    assert {beat.node for beat in one.attempt.heartbeats} == set(nodes)


@pytest.mark.slurm
def test_a_nodes_log_holds_whole_lines_with_their_ranks(
    sent: dict[str, Sent],
) -> None:
    one = sent["meet"]
    assert one.word.code == ExitCode.DONE, one.logs
    for node, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
        tails = node_tails(one.job.folder, node, size_bytes=1000)
        assert [(tail.rank, tail.text) for tail in tails] == [
            (rank, "half a line, and its end") for rank in ranks
        ]
    assert sorted(path.name for path in one.job.folder.glob("*.log")) == [
        "batch.log",
        "node.n1.log",
        "node.n2.log",
        "srun.log",
    ]


@pytest.mark.slurm
def test_a_job_sees_an_allow_list_of_the_environment_and_no_secret(sent: dict[str, Sent]) -> None:
    one = sent["meet"]
    environment = one.word.outputs["environment"]
    assert SECRET not in environment.values()
    assert SECRET not in "".join(path.read_text() for path in one.job.folder.glob("*.*"))
    assert environment["SLURM_NTASKS"] == "4"
    assert environment["AWS_PROFILE"] == "a-profile"
    assert environment["SET_UP"] == "by a line"
    assert environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.slurm
def test_a_job_runs_the_snapshots_code_and_starts_light(sent: dict[str, Sent]) -> None:
    one = sent["meet"]
    assert one.word.outputs["path"][0] == str(one.job.code)
    loaded = {name.partition(".")[0] for name in one.word.outputs["modules"]}
    assert not loaded & {"torch", "prefect", "submitit", "flows", "tasks", "trainer"}


@pytest.mark.slurm
def test_the_rank_that_fails_says_why_and_ends_the_others(sent: dict[str, Sent]) -> None:
    one = sent["fail"]
    word = one.word
    assert (word.code, word.rank, word.node) == (ExitCode.BAD_DATA, 3, "n4"), one.logs
    assert word.error == "document 7 cannot be read"
    assert (one.seen.raw_state, one.seen.exit_code) == ("FAILED", f"{ExitCode.BAD_DATA.value}:0")


@pytest.mark.slurm
def test_a_killed_rank_comes_out_though_others_say_resume_me(sent: dict[str, Sent]) -> None:
    one = sent["killed"]
    assert (one.word.code, one.word.rank, one.word.node) == (137, 2, "n4"), one.logs
    assert "a last line before the end" in one.word.error


@pytest.mark.slurm
def test_memory_over_the_limit_is_out_of_memory(sent: dict[str, Sent]) -> None:
    one = sent["greedy"]
    assert one.word.code == ExitCode.OUT_OF_MEMORY, one.logs
    assert "OUT_OF_MEMORY" in {step.state for step in one.seen.steps}


@pytest.mark.slurm
def test_a_job_of_a_void_attempt_leaves_before_any_step(sent: dict[str, Sent]) -> None:
    one = sent["void"]
    assert one.seen.exit_code == f"{ExitCode.FENCED.value}:0", one.logs
    assert [step.name for step in one.seen.steps if step.name.isdigit()] == []
    assert one.attempt.exit is None
    assert one.attempt.start is not None
    assert one.attempt.start.is_void


@pytest.mark.slurm
def test_a_setup_line_that_fails_ends_the_job(sent: dict[str, Sent]) -> None:
    one = sent["setup"]
    assert one.seen.exit_code == f"{ExitCode.BAD_CONFIG.value}:0"
    assert "cluster.setup line 1 failed: ls /no/such/module" in one.logs
    assert one.attempt.start is None


@pytest.mark.slurm
def test_the_warning_before_the_time_limit_reaches_the_ranks_alone(
    there: Workplace, dev_cluster: DevCluster
) -> None:
    job = there.job(part="wait")
    job_id = there.submit(job)
    for rank in range(2):
        wait_for_file(job.folder / f"waiting.{rank}")
    SystemCommands(slurm_conf=dev_cluster.slurm_conf).run(["scancel", "--signal=USR2", job_id])
    there.wait_for_end(job)
    assert there.exit(job).code == ExitCode.RESUME, logs(job)
    assert (job.folder / "told.0").read_text() == "12"


@pytest.mark.slurm
def test_cancel_ends_the_job_that_bears_the_token_and_no_other(there: Workplace) -> None:
    job = there.job(ranks=1, part="wait")
    job_id = there.submit(job)
    wait_for_file(job.folder / "waiting.0")
    there.cluster.cancel(job_id=job_id, token="another-token")
    assert there.look(job).state is JobState.RUNNING
    there.cluster.cancel(job_id=job_id, token=job.intent.token)
    seen = there.wait_for_end(job)
    assert seen.raw_state == f"CANCELLED by {os.getuid()}"
    there.cluster.cancel(job_id=job_id, token=job.intent.token)
    there.cluster.cancel(job_id="4000000", token=job.intent.token)


@pytest.mark.slurm
def test_jobs_are_told_apart_by_their_tokens(sent: dict[str, Sent]) -> None:
    tokens = {name: one.job.intent.token for name, one in sent.items()}
    found = sent["meet"].place.cluster.observe([*tokens.values(), "no-such-token"])
    assert found["no-such-token"].state is JobState.ABSENT
    assert {name: found[token].job_id for name, token in tokens.items()} == {
        name: one.job_id for name, one in sent.items()
    }


@pytest.mark.slurm
def test_an_unknown_partition_is_a_rejection_in_slurms_words(
    there: Workplace, slurm_spec: ClusterSpec
) -> None:
    spec = slurm_spec.model_copy(update={"partition": "nowhere"})
    there = replace(there, cluster=SlurmCluster(spec))
    with pytest.raises(SubmitRejected, match="invalid partition"):
        there.submit(there.job(part="meet"))
    with pytest.raises(SlurmError, match=r"cluster\.partition"):
        there.cluster.nodes()


@pytest.mark.slurm
def test_nodes_are_the_partitions_with_their_states(
    there: Workplace, dev_cluster: DevCluster
) -> None:
    nodes = there.cluster.nodes()
    assert [node.name for node in nodes] == ["n1", "n2", "n3", "n4"]
    assert all(node.responds for node in nodes)
    assert there.cluster.name == dev_cluster.shape.name
    assert there.cluster.gates


def a_cluster(**answers: CommandResult | SlurmError) -> tuple[SlurmCluster, Recorder]:
    recorder = Recorder(answers=dict(answers))
    return SlurmCluster(ClusterSpec(kind="slurm"), commands=recorder), recorder


DOWN = says(
    returncode=1,
    stderr="slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
)


def test_a_controller_that_is_down_is_an_error_and_no_end_of_a_job() -> None:
    cluster, _ = a_cluster(squeue=DOWN)
    with pytest.raises(SlurmError, match="Unable to contact slurm controller"):
        cluster.observe(["a"])
    with pytest.raises(SlurmError, match="Unable to contact slurm controller"):
        cluster.cancel(job_id="1", token="a")


@pytest.mark.parametrize(
    "words",
    [
        "sbatch: error: Batch job submission failed: Invalid account or account/partition "
        "combination specified",
        "sbatch: error: Memory specification can not be satisfied\n"
        "sbatch: error: Batch job submission failed: Requested node configuration is not available",
        "sbatch: unrecognized option '--nonsense'\nTry \"sbatch --help\" for more information",
    ],
)
def test_an_explicit_refusal_is_a_rejection(words: str) -> None:
    with pytest.raises(SubmitRejected):
        read_answer(says(returncode=1, stderr=words))


@pytest.mark.parametrize(
    ("words", "is_limit"),
    [
        (
            "sbatch: error: QOSMaxSubmitJobPerUserLimit\n"
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job "
            "submit limit, user's size and/or time limits)",
            True,
        ),
        (
            "sbatch: error: AssocMaxSubmitJobLimit\n"
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job "
            "submit limit, user's size and/or time limits)",
            True,
        ),
        (
            "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying.\n"
            "sbatch: error: Batch job submission failed: Resource temporarily unavailable",
            True,
        ),
        (
            "sbatch: error: QOSMaxWallDurationPerJobLimit\n"
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job "
            "submit limit, user's size and/or time limits)",
            False,
        ),
    ],
)
def test_one_job_too_many_for_now_is_told_from_a_job_that_is_too_large(
    words: str, is_limit: bool
) -> None:
    with pytest.raises(SubmitRejected) as caught:
        read_answer(says(returncode=1, stderr=words))
    assert isinstance(caught.value, SubmitLimited) is is_limit


@pytest.mark.parametrize(
    "answer",
    [
        says(returncode=-9),
        says(returncode=1),
        says(returncode=1, stderr="Segmentation fault"),
        says("no number here"),
        says(
            returncode=1,
            stderr="sbatch: error: Batch job submission failed: Unable to contact slurm "
            "controller (connect failure)",
        ),
        says(
            returncode=1,
            stderr="sbatch: error: Batch job submission failed: Socket timed out on send/recv "
            "operation",
        ),
    ],
)
def test_anything_less_than_a_refusal_is_doubt(answer: CommandResult) -> None:
    with pytest.raises(SubmitDoubtful):
        read_answer(answer)


def test_sbatch_that_is_killed_at_its_deadline_is_doubt(here: Workplace) -> None:
    cluster, recorder = a_cluster(sbatch=CommandTimedOut("`sbatch` did not answer"))
    with pytest.raises(SubmitDoubtful, match="did not answer"):
        cluster.submit(here.job(part="meet"), Resources(nodes=1, ranks_per_node=1))
    assert [command[0] for command in recorder.seen] == ["sbatch"]


def test_the_script_shown_is_the_script_sent(here: Workplace) -> None:
    cluster, recorder = a_cluster(sbatch=says("Submitted batch job 12\n"))
    job = here.job(part="meet")
    asked = Resources(
        nodes=2,
        ranks_per_node=4,
        cpus_per_rank=3,
        gpus_per_node=4,
        memory_per_node="64G",
        node_list=("n1", "n2"),
        excluded=("n2", "n7"),
        time_limit_min=1,
        signal_lead_s=120,
    )
    shown = cluster.script(job, asked)
    assert cluster.submit(job, asked) == "12"
    assert recorder.seen[0][-1] == str(job.folder / "job.sh")
    assert (job.folder / "job.sh").read_text() == shown
    lines = shown.splitlines()
    for line in (
        f"#SBATCH --job-name={job.intent.token}",
        "#SBATCH --no-requeue",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --cpus-per-task=3",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --mem=64G",
        "#SBATCH --nodelist=n1,n2",
        "#SBATCH --exclude=n7",
        "#SBATCH --time=1",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={job.folder}/batch.log",
    ):
        assert line in lines
    assert "#SBATCH --signal=USR2@30" in lines, "a lead beyond the limit would fire at once"
    assert lines[-1] == f"exec {sys.executable} -P -m slurm.batch {job.folder}/job.json"
    for absent in ("wckey", "partition", "reservation", ".pkl", "--error"):
        assert absent not in shown
    (ranks,) = (line for line in lines if "srun" in line)
    assert ranks.startswith("# its ranks: srun --nodes="), "the batch step calls it, not the script"
    assert "--kill-on-bad-exit=1" in ranks
    assert "--mpi" not in ranks


def test_a_range_is_asked_for_as_slurm_writes_it(here: Workplace) -> None:
    """A node's CPUs as one task: of so many tasks a node, Slurm gives no more than the least."""
    asked = Resources(nodes=14, most_nodes=16, ranks_per_node=4, cpus_per_rank=3)
    lines = a_cluster()[0].script(here.job(part="meet"), asked).splitlines()
    assert "#SBATCH --nodes=14-16" in lines
    assert "#SBATCH --cpus-per-task=12" in lines
    assert not any("#SBATCH --ntasks" in line for line in lines)
    (ranks,) = (line for line in lines if "srun" in line)
    assert "srun --nodes=16 " in ranks, "as many as it may be"
    at_least = a_cluster()[0].script(here.job(part="meet"), replace(asked, most_nodes=14))
    assert "#SBATCH --nodes=14\n" in at_least


def test_what_a_site_wants_is_asked_for_and_shown(here: Workplace) -> None:
    extra = {
        "switches": "1@00:10:00",
        "exclusive": True,
        "contiguous": False,
        "comment": "it's $5",
    }
    spec = ClusterSpec(
        kind="slurm",
        partition=["gpu", "gpu-spare"],  # type: ignore[arg-type]
        account="lab",
        qos="high",
        reservation="night",
        constraint="a100&nvlink",
        wckey="k",
        mpi="pmix",
        extra=extra,
    )
    lines = SlurmCluster(spec).script(here.job(), Resources(nodes=1, ranks_per_node=1)).splitlines()
    for line in (
        "#SBATCH --partition=gpu,gpu-spare",
        "#SBATCH --account=lab",
        "#SBATCH --qos=high",
        "#SBATCH --reservation=night",
        "#SBATCH --constraint='a100&nvlink'",
        "#SBATCH --wckey=k",
        "#SBATCH --switches=1@00:10:00",
        "#SBATCH --exclusive",
        """#SBATCH --comment='it'"'"'s $5'""",
    ):
        assert line in lines
    assert not [line for line in lines if "contiguous" in line]
    (ranks,) = (line for line in lines if line.startswith("# its ranks: "))
    assert " --mpi=pmix " in ranks


def test_the_nodes_of_several_partitions_are_those_of_each_once() -> None:
    shown = "gpu|n1|idle|none\ngpu|n2|mixed|none\nspare|n2|mixed|none\nspare|n3|idle|none\n"
    recorder = Recorder(answers={"sinfo": says(shown)})
    spec = ClusterSpec(kind="slurm", partition=["gpu", "spare"])  # type: ignore[arg-type]
    cluster = SlurmCluster(spec, commands=recorder)
    assert [node.name for node in cluster.nodes()] == ["n1", "n2", "n3"]
    assert "--partition=gpu,spare" in recorder.seen[0]
    missing = spec.model_copy(update={"partition": ("gpu", "gone")})
    with pytest.raises(SlurmError, match="no node of the partition 'gone'"):
        SlurmCluster(missing, commands=recorder).nodes()


def test_a_host_without_slurm_can_show_a_script_but_submits_nothing(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/no/such/folder")
    cluster = SlurmCluster(ClusterSpec(kind="slurm"), commands=SystemCommands())
    job, asked = here.job(part="meet"), Resources(nodes=1, ranks_per_node=1)
    assert "slurm.batch" in cluster.script(job, asked)
    with pytest.raises(SubmitRejected, match="no command 'sbatch'"):
        cluster.submit(job, asked)
