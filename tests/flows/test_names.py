"""An attempt's title and end read the same wherever they are shown."""

from __future__ import annotations

import pytest

from flows.names import attempt_title, end_text, progress_text
from storage.checkpoint_records import CommitRef
from storage.records import Stage, Why
from tests.flows.attempts import attempt, dead_node, end, resumed


def test_a_title_names_stage_attempt_origin_and_who_is_left_out() -> None:
    floor = CommitRef(step=1500, attempt=1, save="s")
    assert attempt_title(attempt()) == "train · attempt 1"
    assert (
        attempt_title(attempt(2, why=Why.RESUMED, floor=floor, excluded=("n3",)))
        == "train · attempt 2 · from step 1500 · without n3"
    )
    assert attempt_title(attempt(2)) == "train · attempt 2 · again"


def test_a_title_says_what_was_really_loaded_once_that_is_known() -> None:
    floor = CommitRef(step=1500, attempt=1, save="s")
    shown = attempt(3, floor=floor, resume=resumed(1600, 2))
    assert attempt_title(shown) == "train · attempt 3 · from step 1600"


def test_a_title_names_the_unit_of_a_stage_that_has_several() -> None:
    assert attempt_title(attempt(stage=Stage.VALIDATE, unit="n4")) == "validate · n4 · attempt 1"


def test_a_long_list_of_nodes_is_cut() -> None:
    nodes = tuple(f"n{number}" for number in range(20))
    assert attempt_title(attempt(excluded=nodes)).endswith("without n0, n1, n2, n3 and 16 more")


def test_an_end_is_diagnosis_and_decision() -> None:
    assert end_text(attempt()) == "open"
    assert end_text(attempt(end=end())) == "done"
    assert (
        end_text(attempt(end=dead_node()))
        == "hardware on n3: NODE_FAIL → retry elsewhere (node n3 is excluded)"
    )


def test_progress_has_units() -> None:
    numbers = {"loss": 2.3456789, "tokens_per_s": 12345.6}
    assert progress_text(4, numbers, total=10) == "step 4 of 10 · loss 2.346 · 12,346 tokens/s"
    assert progress_text(4, {}, total=None) == "step 4"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(5, "5 s"), (119, "119 s"), (180, "3 min"), (9000, "2 h"), (400_000, "5 days")],
)
def test_what_is_left_is_said_in_a_unit_that_fits(seconds: float, expected: str) -> None:
    assert progress_text(1, {"eta_s": seconds}, total=9) == f"step 1 of 9 · {expected} to go"
