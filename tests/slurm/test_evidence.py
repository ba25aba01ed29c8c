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


def test_logs_are_read_from_their_ends_the_failing_rank_first(tmp_path: Path) -> None:
    (tmp_path / "batch.log").write_text("x" * 10_000 + "\nthe batch step's end\n")
    (tmp_path / "srun.log").write_text("")
    (tmp_path / "rank.0.log").write_text("zero\n")
    (tmp_path / "rank.1.log").write_text("one\n")
    (tmp_path / "rank.40.log").write_text("forty\n")
    assert read_logs(tmp_path, first_rank=40) == (
        "==> batch.log\nthe batch step's end\n==> rank.40.log\nforty\n"
        "==> rank.0.log\nzero\n==> rank.1.log\none"
    )
    assert read_logs(tmp_path / "nowhere") == ""


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
    (tmp_path / "rank.1.log").write_text("Connection reset by peer\n")
    node = NodeState(name="n2", raw_state="down*", responds=False, idle=False)
    found = gather(an_attempt(), None, nodes=[node], folder=tmp_path, now=NOW, heartbeat_s=2.0)
    assert "Connection reset by peer" in found.log_tail
    assert found.node_states == {"n2": node}
    assert (found.uid, found.heartbeat_s) == (os.getuid(), 2.0)
