"""Evidence is gathered from the logs' ends and from what was seen; it knows its attempt's nodes."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from slurm.cluster import JobObservation, JobState, NodeState
from slurm.diagnosis.facts import lagging_nodes, silent_nodes
from slurm.evidence import Evidence, gather, read_logs
from slurm.job_logs import batch_log, element_folder
from slurm.log_tails import shorten, tail
from storage.attempts import Attempt, Element
from storage.records import Exit, Heartbeat
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


def an_array(*elements: Element, **records: Any) -> Attempt:
    attempt = an_attempt(elements=elements, **records)
    return replace(attempt, intent=replace(attempt.intent, elements=4))


def element(number: int, *, age_s: float = 0.0, word: Exit | None = None) -> Element:
    start = an_attempt().start
    assert start is not None
    begun = replace(start, element=number, nodes=(f"n{number}",), at=NOW - timedelta(seconds=age_s))
    return Element(number=number, start=begun, exit=word)


def beat_of(number: int, *, age_s: float) -> Heartbeat:
    return replace(beat(f"n{number}", age_s=age_s, step=number), element=number)


def of_array(attempt: Attempt, folder: Path) -> Evidence:
    return gather(attempt, None, nodes=(), folder=folder, now=NOW)


def test_evidence_of_an_array_is_that_of_the_element_which_speaks_for_it(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = element_folder(tmp_path, number)
        folder.mkdir()
        (folder / f"node.n{number}.log").write_text(f"0: the words of {number}\n")
    word = an_exit(1, "boom", element=2, node="n2")
    attempt = an_array(
        element(1, word=an_exit(0, element=1)),
        element(2, word=word),
        heartbeats=(beat_of(1, age_s=600.0), beat_of(2, age_s=1.0)),
        exit=word,
    )
    evidence = of_array(attempt, tmp_path)
    assert evidence.nodes == ("n2",)
    assert [one.node for one in evidence.attempt.heartbeats] == ["n2"]
    assert [part.text for part in evidence.logs] == ["the words of 2"]
    assert silent_nodes(evidence) == lagging_nodes(evidence) == ()


def test_of_elements_without_a_word_the_one_that_fell_silent_first_is_looked_at(
    tmp_path: Path,
) -> None:
    attempt = an_array(
        element(0, age_s=900.0, word=an_exit(0, element=0)),
        element(1, age_s=800.0),
        element(2, age_s=800.0),
        heartbeats=(beat_of(1, age_s=20.0), beat_of(2, age_s=300.0)),
    )
    assert of_array(attempt, tmp_path).nodes == ("n2",)


def test_of_an_array_that_never_started_the_first_batch_log_is_read(tmp_path: Path) -> None:
    attempt = an_array(start=None)
    assert of_array(attempt, tmp_path).logs == ()
    for number in (2, 10):
        folder = element_folder(tmp_path, number)
        folder.mkdir()
        batch_log(folder).write_text(f"line of {number}\n")
    assert [part.text for part in of_array(attempt, tmp_path).logs] == ["line of 2"]
