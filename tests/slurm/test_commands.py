"""Slurm's own words, as they were printed by 22.05, and what is made of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.answers import (
    expand_nodes,
    job_state,
    parse_accounting,
    parse_cluster_name,
    parse_nodes,
    parse_queue,
)
from slurm.cluster import JobState
from slurm.commands import (
    CommandFailed,
    CommandMissing,
    CommandTimedOut,
    SystemCommands,
    command_environment,
    run_checked,
)
from storage.errors import SlurmError, SpecError

QUEUE = """\
12|RUNNING|n[1-2]|None|demo-train-0001-aa
13|PENDING||Resources|demo-train-0002-bb
14|COMPLETING|n3|None|demo-smoke-0001-cc
15|NODE_FAIL|n[1,4]|None|demo-train-0003-dd
16|PENDING||ReqNodeNotAvail, UnavailableNodes:n2|odd|name
17|LAUNCH_ODDITY|n1|None|demo-train-0004-ee
"""

ACCOUNTING = """\
12|FAILED|1:0|n[1-2]|first
12.batch|FAILED|1:0|n1|batch
12.0|OUT_OF_MEMORY|0:125|n[1-2]|python
13|CANCELLED by 1000|0:0|None assigned|second
12|COMPLETED|0:0|n4|first
12.batch|COMPLETED|0:0|n4|batch
"""

NODES = """\
dev*|n1|idle|none
dev*|n2|down*|Not responding
dev*|n3|draining|too hot | or so
dev*|n4|mixed|none
dev*|n5|idle~|none
dev*|n6|drained*|gone
dev*|n7|planned|none
dev*|n8|idle$|none
big|n1|idle|none
big|m1|unknown*|none
"""


def test_the_queue_is_read_by_job_name() -> None:
    found = parse_queue(QUEUE)
    running = found["demo-train-0001-aa"]
    assert (running.job_id, running.state, running.nodes) == ("12", JobState.RUNNING, ("n1", "n2"))
    waiting = found["demo-train-0002-bb"]
    assert (waiting.state, waiting.reason, waiting.nodes) == (JobState.PENDING, "Resources", ())
    assert found["demo-smoke-0001-cc"].state is JobState.RUNNING
    assert found["demo-train-0003-dd"].state is JobState.ENDED
    assert found["odd|name"].reason == "ReqNodeNotAvail, UnavailableNodes:n2"
    assert found["demo-train-0004-ee"].state is JobState.UNKNOWN


def test_accounting_gives_the_newest_record_of_each_job_with_its_steps() -> None:
    found = parse_accounting(ACCOUNTING)
    assert found["first"].raw_state == "COMPLETED"
    assert [step.name for step in found["first"].steps] == ["batch"]
    assert found["second"].state is JobState.ENDED
    assert found["second"].nodes == ()
    older = parse_accounting("".join(ACCOUNTING.splitlines(keepends=True)[:3]))["first"]
    assert [(step.name, step.state, step.exit_code) for step in older.steps] == [
        ("batch", "FAILED", "1:0"),
        ("0", "OUT_OF_MEMORY", "0:125"),
    ]


def test_nodes_of_the_default_partition_or_the_named_one() -> None:
    default = {node.name: node for node in parse_nodes(NODES, partition=None)}
    assert list(default) == ["n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8"]
    assert {name for name, node in default.items() if not node.responds} == {"n2", "n6"}
    assert {name for name, node in default.items() if node.idle} == {"n1", "n5", "n7"}
    assert default["n2"].reason == "Not responding"
    assert default["n3"].reason == "too hot | or so"
    assert default["n1"].reason == ""
    big = parse_nodes(NODES, partition="big")
    assert [(node.name, node.responds) for node in big] == [("n1", True), ("m1", False)]
    assert parse_nodes(NODES, partition="none such") == ()


@pytest.mark.parametrize("state", ["SUSPENDED", "RESIZING", "COMPLETING", "STAGE_OUT"])
def test_odd_states_of_a_running_job_are_alive(state: str) -> None:
    assert job_state(state) is JobState.RUNNING


@pytest.mark.parametrize("state", ["CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"])
def test_a_job_that_will_run_again_is_alive(state: str) -> None:
    assert job_state(state) is JobState.PENDING


@pytest.mark.parametrize("state", ["CANCELLED by 0", "CANCELLED+", "NODE_FAIL", "TIMEOUT"])
def test_ends_are_ends_with_whatever_follows(state: str) -> None:
    assert job_state(state) is JobState.ENDED


@given(st.text())
def test_no_word_is_too_strange(state: str) -> None:
    assert job_state(state) in JobState


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("", ()),
        ("(null)", ()),
        ("None assigned", ()),
        ("n1", ("n1",)),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("n[08-11,2],gpu5", ("n08", "n09", "n10", "n11", "n2", "gpu5")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("a-[1-2]-ib.x,b", ("a-1-ib.x", "a-2-ib.x", "b")),
    ],
)
def test_short_lists_of_nodes_are_written_out(short: str, names: tuple[str, ...]) -> None:
    assert expand_nodes(short) == names


@given(st.integers(0, 2000), st.integers(0, 300), st.integers(1, 5))
def test_a_range_holds_every_number_with_its_zeros(first: int, more: int, width: int) -> None:
    names = expand_nodes(f"n[{first:0{width}d}-{first + more:0{width}d}]")
    assert names == tuple(f"n{n:0{width}d}" for n in range(first, first + more + 1))


@pytest.mark.parametrize("text", ["12|RUNNING", "slurm_load_jobs error: what"])
def test_what_cannot_be_read_is_an_error_and_not_an_empty_queue(text: str) -> None:
    with pytest.raises(SlurmError, match="cannot read squeue's line"):
        parse_queue(text)


def test_the_clusters_name_is_found() -> None:
    assert parse_cluster_name("AccountingStorageHost = x\nClusterName             = big\n") == "big"
    with pytest.raises(SlurmError, match="ClusterName"):
        parse_cluster_name("")


def test_only_what_a_job_may_see_is_passed_on() -> None:
    environ = {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_PROFILE": "team",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "BASH_FUNC_module%%": "() { true; }",
        "HOME": "/home/me",
        "LC_ALL": "C",
        "PATH": "/bin",
        "PREFECT_API_AUTH_STRING": "secret",
        "PYTHONPATH": "/mine",
        "SBATCH_PARTITION": "other",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JOB_ID": "5",
        "SQUEUE_FORMAT": "%i",
    }
    kept = {"AWS_PROFILE", "BASH_FUNC_module%%", "HOME", "LC_ALL", "PATH", "SLURM_CONF"}
    assert set(command_environment(environ)) == kept
    named = command_environment(environ, slurm_conf=Path("/other.conf"))
    assert named["SLURM_CONF"] == "/other.conf"


def test_a_slurm_conf_that_cannot_be_read_is_refused_before_slurm_retries_it(
    tmp_path: Path,
) -> None:
    gone = tmp_path / "gone.conf"
    with pytest.raises(
        SpecError, match=r"^cluster\.slurm_conf '.*gone\.conf' cannot be read: No s"
    ):
        SystemCommands(slurm_conf=gone, environ={}).run(["sinfo"])
    with pytest.raises(SpecError, match=r"^SLURM_CONF .* correct the path, or leave SLURM_CONF"):
        SystemCommands(environ={"SLURM_CONF": str(gone)}).run(["sinfo"])
    gone.touch()
    found = SystemCommands(slurm_conf=gone, environ={"SLURM_CONF": "/overruled"})
    assert found.run([sys.executable, "-c", ""]).returncode == 0


def test_a_command_that_stays_silent_is_killed() -> None:
    with pytest.raises(CommandTimedOut, match=r"within 0\.2 s"):
        SystemCommands().run([sys.executable, "-c", "while True: pass"], timeout_s=0.2)


def test_a_command_that_does_not_exist_says_what_to_install() -> None:
    with pytest.raises(CommandMissing, match="slurm-client"):
        SystemCommands().run(["no-such-command"])


def test_a_command_that_fails_gives_its_code_and_words() -> None:
    program = "import sys; sys.exit('slurm_load_jobs error: Unable to contact')"
    with pytest.raises(CommandFailed, match="ended with 1: slurm_load_jobs error") as caught:
        run_checked(SystemCommands(), [sys.executable, "-c", program])
    assert caught.value.result.returncode == 1
