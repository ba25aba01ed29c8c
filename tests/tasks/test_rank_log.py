"""Whoever watches a run is shown one rank's lines, once each, and no more than can be read."""

from __future__ import annotations

from pathlib import Path

from slurm.job_logs import node_log
from tasks.rank_log import PIECE_BYTES, PIECE_LINES, LogFollower


def append(folder: Path, text: str) -> None:
    with node_log(folder, "n1").open("a") as log:
        log.write(text)


def follow(folder: Path) -> LogFollower:
    return LogFollower(folder, node="n1", rank=0)


def test_whole_lines_of_the_rank_are_told_once_without_their_label(tmp_path: Path) -> None:
    follower = follow(tmp_path)
    assert follower.new_lines() == ()
    append(tmp_path, "0: one\n1: another's\n0: tw")
    assert follower.new_lines() == ("one",)
    append(tmp_path, "o\nslurmstepd: error\n10: no\n0:   three\n")
    assert follower.new_lines() == ("two", "  three")
    assert follower.new_lines() == ()


def test_of_a_flood_the_last_lines_are_told_and_that_there_were_more(tmp_path: Path) -> None:
    follower = follow(tmp_path)
    append(tmp_path, "".join(f"0: {number}\n" for number in range(PIECE_LINES + 5)))
    note, *lines = follower.new_lines()
    assert str(node_log(tmp_path, "n1")) in note
    assert lines == [str(number) for number in range(5, PIECE_LINES + 5)]
    append(tmp_path, "1: " + "x" * PIECE_BYTES + "\n0: end\n")
    note, *lines = follower.new_lines()
    assert "more than can be shown" in note
    assert lines == ["end"]


def test_a_log_by_the_nodes_short_name_is_followed(tmp_path: Path) -> None:
    append(tmp_path, "0: here\n")
    assert LogFollower(tmp_path, node="n1.cluster.example", rank=0).new_lines() == ("here",)


def test_what_a_rank_left_without_an_end_of_line_is_told_at_the_end(tmp_path: Path) -> None:
    follower = follow(tmp_path)
    append(tmp_path, "0: one\n0: its last wo")
    assert follower.new_lines() == ("one",)
    append(tmp_path, "rds")
    assert follower.last_lines() == ("its last words",)
    assert follower.last_lines() == ()
    append(tmp_path, "\n1: another's")
    assert follower.last_lines() == ()
