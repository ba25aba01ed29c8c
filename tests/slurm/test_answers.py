"""Slurm's own words, as they were printed by 22.05, and what is made of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.answers import (
    expand_nodes,
    job_state,
    parse_accounting,
    parse_cluster_name,
    parse_job,
    parse_max_elements,
    parse_nodes,
    parse_queue,
)
from slurm.cluster import JobState
from storage.errors import SlurmError

QUEUE = """\
12|RUNNING|n[1-2]|None|demo-train-0001-aa
13|PENDING||Resources|demo-train-0002-bb
14|COMPLETING|n3|None|demo-smoke-0001-cc
15|NODE_FAIL|n[1,4]|None|demo-train-0003-dd
16|PENDING||ReqNodeNotAvail, UnavailableNodes:n2|odd|name
17|LAUNCH_ODDITY|n1|None|demo-train-0004-ee
"""

ACCOUNTING = """\
12|FAILED|1:0|0:0|4G||n[1-2]|first
12.batch|FAILED|1:0|||3336K|n1|batch
12.0|OUT_OF_MEMORY|0:125|||4194304K|n[1-2]|python
13|CANCELLED by 1000|0:0|0:0|1G||None assigned|second
12|COMPLETED|0:0|0:9|4G||n4|first
12.batch|COMPLETED|0:0|||12K|n4|batch
"""

ARRAY = """\
1_[3-9%3]|PENDING||JobArrayTaskLimit|arr
1_0|COMPLETED|n1|None|arr
1_1|FAILED|n2|NonZeroExitCode|arr
1_2|RUNNING|n[1-2]|None|arr
7_4|CANCELLED||None|ended
7_5|COMPLETED|n2|None|ended
8_[1,5-9]|PENDING||Priority|waiting
9+0|RUNNING|n1|None|mixed
9+1|RUNNING|n3|None|mixed
"""

TWO_OF_A_NAME = """\
5|FAILED|n1|NonZeroExitCode|late
6|RUNNING|n2|None|late
9|COMPLETED|n3|None|early
10|FAILED|n4|NonZeroExitCode|early
"""

JOB = (
    "JobId=12 JobName=first UserId=root(0) GroupId=root(0) Priority=1 JobState=FAILED "
    "Reason=NonZeroExitCode Dependency=(null) Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 "
    "ExitCode=9:0 DerivedExitCode=0:15 RunTime=00:00:01 NodeList=n[1-2] BatchHost=n1 "
    "Command=/tmp/a job=2.sh WorkDir=/tmp StdErr=/tmp/%x Power=\n"
)

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


def test_an_array_is_one_job_whose_elements_are_told_together() -> None:
    found = parse_queue(ARRAY)
    running = found["arr"]
    assert (running.job_id, running.state, running.raw_state) == ("1", JobState.RUNNING, "RUNNING")
    assert running.nodes == ("n1", "n2")
    ended = found["ended"]
    assert (ended.job_id, ended.state, ended.raw_state) == ("7", JobState.ENDED, "CANCELLED")
    waiting = found["waiting"]
    assert (waiting.job_id, waiting.state, waiting.reason) == ("8", JobState.PENDING, "Priority")
    assert (found["mixed"].job_id, found["mixed"].nodes) == ("9", ("n1", "n3"))


def test_of_two_jobs_of_a_name_the_living_one_is_told_then_the_newest() -> None:
    found = parse_queue(TWO_OF_A_NAME)
    assert (found["late"].job_id, found["late"].state) == ("6", JobState.RUNNING)
    assert (found["early"].job_id, found["early"].raw_state) == ("10", "FAILED")
    backwards = "\n".join(reversed(TWO_OF_A_NAME.splitlines()))
    assert parse_queue(backwards) == found


def test_only_the_jobs_that_are_asked_for_are_read_but_all_lines_are_looked_at() -> None:
    assert set(parse_queue(QUEUE, names={"odd|name", "none"})) == {"odd|name"}
    with pytest.raises(SlurmError, match="cannot read squeue's line"):
        parse_queue(QUEUE + "what\n", names={"none"})


def test_accounting_gives_the_newest_record_of_each_job_with_its_steps() -> None:
    found = parse_accounting(ACCOUNTING)
    newest = found["first"]
    assert (newest.raw_state, newest.derived_exit_code, newest.memory_asked) == (
        "COMPLETED",
        "0:9",
        "4G",
    )
    assert [step.name for step in newest.steps] == ["batch"]
    assert found["second"].state is JobState.ENDED
    assert found["second"].nodes == ()
    older = parse_accounting("".join(ACCOUNTING.splitlines(keepends=True)[:3]))["first"]
    assert [(step.name, step.state, step.exit_code, step.max_rss) for step in older.steps] == [
        ("batch", "FAILED", "1:0", "3336K"),
        ("0", "OUT_OF_MEMORY", "0:125", "4194304K"),
    ]


def test_an_array_in_accounting_has_ended_when_all_its_elements_have() -> None:
    lines = (
        "1_0|COMPLETED|0:0|0:0|1G||n1|arr\n1_0.batch|COMPLETED|0:0|||9K|n1|batch\n"
        "1_1|TIMEOUT|0:0|0:0|1G||n2|arr\n1_1.batch|CANCELLED|0:15|||8K|n2|batch\n"
    )
    ended = parse_accounting(lines)["arr"]
    assert (ended.job_id, ended.raw_state, ended.nodes) == ("1", "TIMEOUT", ("n1", "n2"))
    assert [step.exit_code for step in ended.steps] == ["0:15"]
    still = parse_accounting(lines + "1_[2-9%2]|PENDING|0:0|0:0|1G||None assigned|arr\n")["arr"]
    assert still.state is JobState.PENDING


def test_the_controllers_own_memory_of_a_job_is_read_if_the_name_is_right() -> None:
    job = parse_job(JOB, token="first")
    assert job is not None
    assert (job.job_id, job.state, job.raw_state) == ("12", JobState.ENDED, "FAILED")
    assert (job.exit_code, job.derived_exit_code) == ("9:0", "0:15")
    assert (job.reason, job.nodes) == ("NonZeroExitCode", ("n1", "n2"))
    assert parse_job(JOB, token="another") is None


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


def test_an_arrays_worst_end_is_told_and_slurms_verdict_before_a_mere_exit() -> None:
    def states(*states: str) -> str:
        lines = (f"1_{n}|{state}|1:0|0:0|1G||n{n}|arr\n" for n, state in enumerate(states))
        return parse_accounting("".join(lines))["arr"].raw_state

    assert states("COMPLETED", "CANCELLED by 0", "COMPLETED") == "CANCELLED by 0"
    assert states("CANCELLED by 0", "FAILED", "COMPLETED") == "FAILED"
    assert states("FAILED", "PREEMPTED", "NODE_FAIL", "TIMEOUT") == "NODE_FAIL"
    assert states("NODE_FAIL", "OUT_OF_MEMORY") == "OUT_OF_MEMORY"
    assert states("COMPLETED", "COMPLETED") == "COMPLETED"


@pytest.mark.parametrize(
    ("size", "parameters", "elements"),
    [
        ("1001", "(null)", 1001),
        ("0", "(null)", 1),
        ("1001", "bf_interval=1,max_array_tasks=50", 50),
    ],
)
def test_a_site_bounds_arrays_by_their_size_and_by_their_tasks(
    size: str, parameters: str, elements: int
) -> None:
    config = f"MaxArraySize            = {size}\nSchedulerParameters     = {parameters}\n"
    assert parse_max_elements(config) == elements
