"""The report shows what the ledger holds of a run, at any moment of it."""

from __future__ import annotations

import math
import struct
from datetime import UTC, datetime
from typing import Any

import pytest

from storage.checkpoint_records import Commit, FileRecord
from storage.records import Refusal, RunRecord, Stage
from tasks.curves import Point
from tasks.documents import Picture, Table, to_markdown
from tasks.plots import Measured, loss_plot, scaling_plot
from tasks.report import RunView, compose, summary
from tests.flows.attempts import attempt, dead_node, end, record, resumed
from tests.storage.checkpoints.facts import make_commit

VALIDATE = record(
    Stage.VALIDATE,
    healthy=["n1", "n2"],
    unfit=["n3"],
    nodes=[
        {"node": "n1", "verdict": "ok", "findings": [], "measures": {"matmul": "41 GFLOP/s"}},
        {"node": "n2", "verdict": "ok", "findings": [], "measures": {}},
        {"node": "n3", "verdict": "critical", "findings": ["disk is slow"], "measures": {}},
    ],
    allreduce_gb_per_s=1.5,
)
SMOKE = record(
    Stage.SMOKE,
    rungs=[
        {"nodes": 1, "world_size": 1, "tokens_per_s": 1000.0, "efficiency": 1.0, "ratio": None},
        {"nodes": 2, "world_size": 2, "tokens_per_s": 1800.0, "efficiency": 0.9, "ratio": 1.8},
    ],
    gated=True,
    passed=True,
    reason="scales to 2 nodes with efficiency 0.90",
)


def commit(step: int, number: int) -> Commit:
    file = FileRecord(key="k", size_bytes=1_000_000, crc64nvme="")
    return make_commit(step, attempt=number, metadata=file, files=(file,), metrics={"loss": 2.5})


def view(**changes: Any) -> RunView:
    fields: dict[str, Any] = {
        "run": "r",
        "record": None,
        "stages": {},
        "attempts": {},
        "points": (),
        "commits": (),
        "counting": frozenset(),
    }
    return RunView(**(fields | changes))


def table_after(markdown: str, heading: str) -> list[str]:
    lines = markdown.split(f"## {heading}\n", 1)[1].splitlines()
    rows = [line for line in lines if line.startswith("|")]
    return rows[2:]


def test_a_stage_that_found_nowhere_to_go_says_that_and_not_what_it_meant_to_try() -> None:
    reason = "train needs 2 nodes and 1 of 3 are left"
    refusal = Refusal(
        stage=Stage.TRAIN,
        unit="train",
        reason=reason,
        after=1,
        by="e",
        at=datetime(2026, 1, 2, tzinfo=UTC),
    )
    tried = {Stage.TRAIN: (attempt(1, end=dead_node()),)}
    seen = view(attempts=tried, refusals={Stage.TRAIN: refusal})
    rows = table_after(to_markdown(compose(seen)), "Attempts")
    assert "retry elsewhere" in rows[0]
    assert f"| train | gave up | {reason} | 1 |" in to_markdown(compose(seen))
    went_on = {Stage.TRAIN: (*tried[Stage.TRAIN], attempt(2))}
    later = to_markdown(compose(view(attempts=went_on, refusals={Stage.TRAIN: refusal})))
    assert "| train | under way | attempt 2 has no end yet | 2 |" in later


def test_a_run_that_has_not_begun_has_a_report() -> None:
    blocks = compose(view())
    (table,) = [block for block in blocks if isinstance(block, Table)]
    assert [row[:2] for row in table.rows] == [(stage.value, "not begun") for stage in Stage]


@pytest.mark.parametrize(
    ("probe", "told"),
    [
        ({"conditional_writes": True, "checksums_enforced": True}, "honours conditional writes"),
        (
            {"conditional_writes": False, "checksums_enforced": False, "claims": "/shared/claims"},
            "Warning: the store has no conditional writes. Claims are made in /shared/claims",
        ),
    ],
)
def test_what_the_store_was_seen_to_do_is_told(probe: dict[str, Any], told: str) -> None:
    begun = RunRecord(
        run="r",
        spec={},
        code="c",
        git_commit=None,
        git_dirty=None,
        store_probe=probe,
        nonce="n",
        at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    assert told in to_markdown(compose(view(record=begun)))


def test_each_node_is_shown_with_its_verdict_figures_and_findings() -> None:
    markdown = to_markdown(compose(view(stages={Stage.VALIDATE: VALIDATE})))
    rows = table_after(markdown, "Nodes")[:3]
    assert rows == [
        "| n1 | ok | 41 GFLOP/s | – |",
        "| n2 | ok | – | – |",
        "| n3 | critical | – | disk is slow |",
    ]
    assert "1.5 GB/s" in markdown


def test_scaling_is_a_table_and_a_picture() -> None:
    blocks = compose(view(stages={Stage.SMOKE: SMOKE}))
    markdown = to_markdown(blocks)
    assert "| 2 | 2 | 1,800 | 0.90 | 1.80 | – |" in markdown
    assert [block.title for block in blocks if isinstance(block, Picture)] == ["Scaling"]


def test_attempts_are_shown_with_diagnosis_and_decision() -> None:
    attempts = (
        attempt(1, end=dead_node()),
        attempt(2, resume=resumed(40, 1), excluded=("n3",), end=end()),
        attempt(3),
    )
    rows = table_after(to_markdown(compose(view(attempts={Stage.TRAIN: attempts}))), "Attempts")
    assert "hardware on n3: NODE_FAIL | retry elsewhere: node n3 is excluded |" in rows[0]
    assert "| step 40 | n3 | done | done |" in rows[1]
    assert "| open | – |" in rows[2]


def test_checkpoints_say_what_stays_and_why() -> None:
    prune = record(
        Stage.PRUNE,
        kept=[{"step": 20, "attempt": 1, "save": "s", "reason": "one of the newest two"}],
        deleted=[{"step": 10, "attempt": 1, "save": "s", "reason": "no rule keeps it"}],
    )
    shown = view(
        stages={Stage.PRUNE: prune},
        commits=(commit(20, 1), commit(25, 1), commit(30, 2)),
        counting=frozenset({(20, 1), (30, 2)}),
    )
    assert table_after(to_markdown(compose(shown)), "Checkpoints") == [
        "| 20 | 1 | 2.0 MB | 2.5 | there | one of the newest two |",
        "| 25 | 1 | 2.0 MB | 2.5 | there, but no longer in the lineage | "
        "newer than the last pruning |",
        "| 30 | 2 | 2.0 MB | 2.5 | there | newer than the last pruning |",
        "| 10 | 1 | – | – | deleted | no rule keeps it |",
    ]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (VALIDATE, "2 of 3 nodes are fit; unfit: n3"),
        (record(Stage.SHARD, tokens=1234, documents=5), "1,234 tokens of 5 documents"),
        (SMOKE, "efficiency 0.90 at 2 nodes"),
        (record(Stage.SMOKE, passed=False, reason="gain 1.2"), "refused: gain 1.2"),
        (
            record(Stage.TRAIN, final_step=9, train_loss=2.0, val_loss=None, tokens_per_s=1234.5),
            "step 9, loss 2, 1,234 tokens/s",
        ),
        (record(Stage.PRUNE, kept=[1, 2], deleted=[3]), "2 checkpoints kept, 1 deleted"),
    ],
)
def test_a_stage_is_summed_up_in_one_line(found: Any, expected: str) -> None:
    assert summary(found) == expected


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_plots_are_pictures_even_of_little_or_broken_data() -> None:
    one = [Measured(nodes=1, tokens_per_s=10.0)]
    assert size_of(scaling_plot(one, min_efficiency=0.8)) == (770, 440)
    points = [
        Point(step=1, attempt=1, loss=2.0, val_loss=None),
        Point(step=2, attempt=2, loss=math.nan, val_loss=1.0),
        Point(step=3, attempt=2, loss=None, val_loss=None),
    ]
    assert size_of(loss_plot(points)) == (770, 440)
    assert size_of(loss_plot([Point(step=1, attempt=1, loss=None, val_loss=1.0)])) == (770, 440)
