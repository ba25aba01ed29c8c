"""Evidence is gathered from the logs' ends and from what was seen; it knows its attempt's nodes."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from slurm.cluster import JobObservation, JobState, NodeState
from slurm.evidence import Evidence, gather, read_logs
from slurm.log_tails import shorten, tail
from tests.slurm.attempts import NOW, an_attempt, an_exit, beat


def write(path: Path, *lines: str) -> None:
    path.write_text("\n".join(lines) + "\n")


def test_the_failing_ranks_log_comes_first_then_those_with_errors_of_their_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "batch.log").write_text("x" * 10_000 + "\nthe batch step's end\n")
    (tmp_path / "srun.log").write_text("")
    write(tmp_path / "node.n1.log", "0: all is well", "1: Connection reset by peer")
    write(tmp_path / "node.n2.log", "2: fine", "3: MemoryError")
    found = read_logs(tmp_path, an_attempt(exit=an_exit(rank=1)))
    assert [(part.name, part.text) for part in found] == [
        ("batch.log", "the batch step's end"),
        ("rank 1 on n1", "Connection reset by peer"),
        ("rank 3 on n2", "MemoryError"),
        ("rank 0 on n1", "all is well"),
        ("rank 2 on n2", "fine"),
    ]
    assert read_logs(tmp_path / "nowhere", an_attempt()) == ()


def test_without_an_exit_record_the_rank_that_srun_names_comes_first(tmp_path: Path) -> None:
    write(tmp_path / "srun.log", "srun: error: n2: task 2: Killed")
    write(tmp_path / "node.n1.log", "0: all is well")
    write(tmp_path / "node.n2.log", "2: the last words", "3: and a neighbour's")
    names = [part.name for part in read_logs(tmp_path, an_attempt())]
    assert names[:2] == ["srun.log", "rank 2 on n2"]


def test_of_a_large_job_a_bounded_part_is_read(tmp_path: Path) -> None:
    for node in range(100):
        write(tmp_path / f"node.n{node}.log", *(f"{node}: line {n}" for n in range(50)))
    suspect = an_attempt(exit=an_exit(rank=77, node="n77.site"))
    found = read_logs(tmp_path, suspect)
    assert len(found) == 8
    assert (found[0].rank, found[0].node) == (77, "n77")


def test_a_tail_begins_with_a_whole_line_and_takes_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes("first ligne é\nsecond\n".encode())
    assert tail(path, size_bytes=9) == "second"
    path.write_bytes(b"\xff\xfe odd\n")
    assert tail(path, size_bytes=100).endswith(" odd")


def test_a_shortened_text_says_how_much_is_missing() -> None:
    assert shorten("short", size=10) == "short"
    text = shorten("a" * 50 + "b" * 50, size=40)
    assert text.startswith("a" * 10 + "\n")
    assert text.endswith("\n" + "b" * 30)
    assert "60 characters left out" in text


def test_the_attempts_own_start_says_which_nodes_it_had() -> None:
    job = JobObservation(token="t", state=JobState.ENDED, nodes=("n9",))
    assert Evidence(attempt=an_attempt(), job=job, now=NOW).nodes == ("n1", "n2")
    unstarted = replace(an_attempt(), start=None)
    assert Evidence(attempt=unstarted, job=job, now=NOW).nodes == ("n9",)
    assert Evidence(attempt=unstarted, job=None, now=NOW).nodes == ()


def test_an_end_is_dated_by_the_last_sign_of_life() -> None:
    attempt = an_attempt(exit=an_exit(at=NOW - timedelta(seconds=7)))
    assert Evidence(attempt=attempt, job=None, now=NOW).ended_at == NOW - timedelta(seconds=7)
    beating = an_attempt(heartbeats=(beat("n1", age_s=30), beat("n2", age_s=10)))
    assert Evidence(attempt=beating, job=None, now=NOW).ended_at == NOW - timedelta(seconds=10)


def test_gather_reads_the_logs_and_names_the_owner(tmp_path: Path) -> None:
    write(tmp_path / "node.n1.log", "1: Connection reset by peer")
    node = NodeState(name="n2", raw_state="down*", responds=False, idle=False)
    found = gather(an_attempt(), None, nodes=[node], folder=tmp_path, now=NOW, heartbeat_s=2.0)
    assert "Connection reset by peer" in found.log_text
    assert found.node_states == {"n2": node}
    assert (found.uid, found.heartbeat_s) == (os.getuid(), 2.0)
