"""The loss curve has each step once, whatever attempts it was put together from."""

from __future__ import annotations

import json

import pytest

from storage.checkpoints.lineage import trace
from storage.errors import LedgerError
from tasks.curves import read_metrics, resumes, stitch
from tests.flows.attempts import attempt, fresh, resumed


def lines(first: int, last: int, loss: float) -> list[dict[str, float]]:
    return [{"step": step, "loss": loss} for step in range(first, last + 1)]


def test_what_was_lost_with_an_attempt_is_not_in_the_curve() -> None:
    attempts = (attempt(1, resume=fresh()), attempt(2, resume=resumed(6, 1)))
    points = stitch({1: lines(1, 9, 3.0), 2: lines(7, 12, 2.0)}, trace(attempts))
    assert [point.step for point in points] == list(range(1, 13))
    assert [point.attempt for point in points] == [1] * 6 + [2] * 6
    assert resumes(points) == (7,)


def test_a_branch_that_nobody_went_on_from_is_not_in_the_curve() -> None:
    attempts = (
        attempt(1, resume=fresh()),
        attempt(2, resume=resumed(4, 1)),
        attempt(3, resume=resumed(2, 1)),
    )
    metrics = {1: lines(1, 5, 3.0), 2: lines(5, 8, 9.0), 3: lines(3, 6, 2.0)}
    points = stitch(metrics, trace(attempts))
    assert [(point.step, point.attempt) for point in points] == [
        (1, 1), (2, 1), (3, 3), (4, 3), (5, 3), (6, 3)
    ]  # fmt: skip


def test_an_attempt_that_died_before_it_loaded_changes_nothing() -> None:
    attempts = (attempt(1, resume=fresh()), attempt(2))
    assert len(stitch({1: lines(1, 5, 3.0)}, trace(attempts))) == 5


def test_a_run_that_has_not_begun_has_no_points() -> None:
    assert stitch({}, trace(())) == ()


def test_validation_loss_is_taken_from_the_lines_that_have_one() -> None:
    body = b"\n".join(
        json.dumps(line).encode()
        for line in ({"step": 1, "loss": 2}, {"step": 2, "loss": None, "val_loss": 1.5})
    )
    points = stitch({1: read_metrics(body)}, trace((attempt(1, resume=fresh()),)))
    assert [(point.loss, point.val_loss) for point in points] == [(2.0, None), (None, 1.5)]


@pytest.mark.parametrize("body", [b"{not json}", b"[1]"])
def test_metrics_that_are_none_are_told_with_their_line(body: bytes) -> None:
    with pytest.raises(LedgerError, match="line 2"):
        read_metrics(b'{"step": 1}\n' + body)
