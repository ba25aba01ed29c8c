"""A node's log holds whole lines that say whose they are, and each rank's end is found in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm.job_logs import (
    RankTail,
    label,
    lines_by_rank,
    node_log,
    node_logs,
    node_tails,
    rank_tail,
    split_label,
)
from slurm.rank_output import LINE_BYTES, RankOutput


def run_ranks(folder: Path, *scripts: str, nodes: tuple[str, ...] = ("n1",)) -> None:
    """Each script as a rank, in turns on the nodes, until all have ended."""
    with RankOutput(folder) as output:
        ranks = []
        for rank, script in enumerate(scripts):
            process = subprocess.Popen(
                [sys.executable, "-c", script],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
            )
            assert process.stdout is not None
            output.add(process.stdout, rank=rank, node=nodes[rank % len(nodes)])
            ranks.append(process)
        while any(rank.poll() is None for rank in ranks):
            output.pump(0.02)


@pytest.mark.parametrize(
    ("line", "rank", "words"),
    [
        ("3: text", 3, "text"),
        (" 3:   indented", 3, "  indented"),
        ("12: ", 12, ""),
        ("12:", 12, ""),
        ("0: 4: 5", 0, "4: 5"),
        ("slurmstepd: error", None, "slurmstepd: error"),
        ("no label", None, "no label"),
    ],
)
def test_a_label_names_the_rank_and_the_rest_is_as_it_was_written(
    line: str, rank: int | None, words: str
) -> None:
    assert split_label(line) == (rank, words)


def test_a_label_is_read_as_it_is_written() -> None:
    assert split_label(label(17).decode() + "text") == (17, "text")


def test_lines_that_nobody_signed_belong_to_no_rank() -> None:
    text = "0: a\nslurmstepd: error: oom\n1: b\n0: c"
    assert lines_by_rank(text) == {0: ["a", "c"], 1: ["b"]}


def test_each_rank_of_a_node_has_an_end_of_its_own(tmp_path: Path) -> None:
    flood = "".join(f"1: line {number} of many\n" for number in range(2000))
    node_log(tmp_path, "n1").write_text(f"0: first\n0: last\n{flood}2: tail\n")
    tails = node_tails(tmp_path, "n1", size_bytes=30)
    assert [one.rank for one in tails] == [0, 1, 2]
    assert tails[0] == RankTail(rank=0, node="n1", text="first\nlast")
    assert tails[1].text == "line 1999 of many"
    assert tails[2].text == "tail"


def test_a_last_line_that_is_too_long_is_cut_and_not_left_out(tmp_path: Path) -> None:
    node_log(tmp_path, "n1").write_text(f"0: {'x' * 100}END\n")
    assert node_tails(tmp_path, "n1", size_bytes=10)[0].text == "x" * 7 + "END"


def test_a_rank_is_found_on_whichever_node_it_ran(tmp_path: Path) -> None:
    node_log(tmp_path, "n1").write_text("0: zero\n")
    node_log(tmp_path, "n2").write_text("1: one\n")
    assert rank_tail(tmp_path, rank=1, nodes=["n1", "n2", "n3"], size_bytes=100) == "one"
    assert rank_tail(tmp_path, rank=7, nodes=["n1", "n2", "n3"], size_bytes=100) == ""
    assert node_logs(tmp_path).keys() == {"n1", "n2"}


def test_a_log_by_a_nodes_short_name_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "node.gpu7.log").write_text("0: here\n")
    assert node_tails(tmp_path, "gpu7.cluster.example", size_bytes=100)[0].text == "here"


def test_lines_of_ranks_that_write_at_once_stay_whole(tmp_path: Path) -> None:
    script = """
import os
for number in range(2000):
    os.write(1, b"half of %d " % number)
    os.write(2, b"and the rest\\n")
"""
    run_ranks(tmp_path, script, script, script, script, nodes=("n1", "n2"))
    for node, ranks in (("n1", (0, 2)), ("n2", (1, 3))):
        lines = lines_by_rank(node_log(tmp_path, node).read_text())
        whole = [f"half of {number} and the rest" for number in range(2000)]
        assert {rank: said for rank, said in lines.items() if any(said)} == {
            rank: [*whole, ""][: len(lines[rank])] for rank in ranks
        }


def test_what_a_rank_says_right_before_it_is_killed_is_kept(tmp_path: Path) -> None:
    script = "import os; os.write(1, b'last words'); os.kill(os.getpid(), 9)"
    run_ranks(tmp_path, script)
    assert node_log(tmp_path, "n1").read_text() == "0: last words\n"


def test_any_bytes_and_lines_of_any_length_are_taken(tmp_path: Path) -> None:
    script = f"import os; os.write(1, b'x' * {2 * LINE_BYTES + 1}); os.write(1, b'\\n\\xff\\0')"
    run_ranks(tmp_path, script)
    *lines, rest = node_log(tmp_path, "n1").read_bytes().split(b"\n")
    assert [len(line) - len(label(0)) for line in lines] == [LINE_BYTES, LINE_BYTES, 1, 2]
    assert lines[-1] == b"0: \xff\0"
    assert rest == b""


def test_a_child_that_keeps_the_pipe_open_keeps_nobody_waiting(tmp_path: Path) -> None:
    script = """
import subprocess, sys
print("rank")
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=0)
print(child.pid)
"""
    reading, writing = os.pipe()
    with RankOutput(tmp_path) as output:
        rank = subprocess.Popen(
            [sys.executable, "-c", script], stdin=reading, stdout=subprocess.PIPE, bufsize=0
        )
        assert rank.stdout is not None
        output.add(rank.stdout, rank=0, node="n1")
        while rank.poll() is None:
            output.pump(0.02)
    os.close(reading)
    os.close(writing)
    assert lines_by_rank(node_log(tmp_path, "n1").read_text())[0][0] == "rank"


def test_a_full_disk_ends_no_rank_and_what_was_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full.log"
    full.symlink_to("/dev/full")
    there = tmp_path / "node.n1.log"
    monkeypatch.setattr("slurm.rank_output.node_log", lambda *_: full)
    reading, writing = os.pipe()
    with RankOutput(tmp_path) as output, os.fdopen(reading, "rb", buffering=0) as pipe:
        output.add(pipe, rank=0, node="n1")
        os.write(writing, b"lost\n")
        output.pump(1.0)
        os.dup2(os.open(there, os.O_WRONLY | os.O_CREAT), output._logs[full])
        os.write(writing, b"kept\n")
        os.close(writing)
        output.pump(1.0)
    assert there.read_text() == "\nheadrace: 8 bytes could not be written here\n0: kept\n"
