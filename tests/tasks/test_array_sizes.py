"""How large an array is: as the work wants it, as the cluster allows it, and less where it was one
too many for the site."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.records import Kind
from tests.tasks.world import STAGE, Answer, Landing, Plan, World

FOLDER = Path("/nonexistent/headrace-model")


def sizes(elements: int, *, at_most: int, refusals: int = 0) -> list[int]:
    landings = (Landing(answer=Answer.LIMIT),) * refusals
    world = World(Plan(engines=1, elements=elements, landings=landings), FOLDER)
    world.cluster.max_elements = at_most
    world.run()
    world.check_rest()
    attempts = world.open_ledger().attempts(STAGE)
    ends = [one.end.diagnosis.kind for one in attempts if one.end is not None]
    assert ends == [Kind.LIMIT] * refusals + [Kind.DONE]
    return [one.intent.elements for one in attempts]


@pytest.mark.parametrize(
    ("wanted", "at_most", "made"), [(1, 9, 1), (4, 9, 4), (12, 9, 9), (12, 1, 1)]
)
def test_an_array_has_as_many_elements_as_are_wanted_and_allowed(
    wanted: int, at_most: int, made: int
) -> None:
    assert sizes(wanted, at_most=at_most) == [made]


def test_an_array_that_is_one_too_many_for_the_site_is_halved_down_to_one_job() -> None:
    assert sizes(12, at_most=9, refusals=5) == [9, 4, 2, 1, 1, 1]
