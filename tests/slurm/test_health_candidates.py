"""Which nodes are probed now, and which keep their verdict."""

from __future__ import annotations

import pytest

from slurm.answers import parse_nodes
from slurm.cluster import NodeState
from slurm.health.candidates import Standing, choose, standing
from storage.errors import SpecError


def nodes(**states: str) -> tuple[NodeState, ...]:
    """Nodes as sinfo prints them."""
    lines = [f"dev*|{name}|{state}|Kill task failed" for name, state in states.items()]
    return parse_nodes("\n".join(lines), partition=None)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("idle", Standing.IDLE),
        ("allocated", Standing.BUSY),
        ("mixed", Standing.BUSY),
        ("completing", Standing.BUSY),
        ("idle*", Standing.OUT),
        ("allocated*", Standing.OUT),
        ("down", Standing.OUT),
        ("drained", Standing.OUT),
        ("draining", Standing.OUT),
        ("maint", Standing.OUT),
        ("something new", Standing.OUT),
    ],
)
def test_a_node_stands_where_slurm_says(state: str, expected: Standing) -> None:
    (node,) = nodes(n1=state)
    assert standing(node) is expected


def test_idle_nodes_are_probed_and_the_others_are_findings() -> None:
    chosen = choose(nodes(n1="idle", n2="down*", n3="drained", n4="idle"), needed=4)
    assert chosen.probe == ("n1", "n4")
    assert set(chosen.out) == {"n2", "n3"}
    assert "does not respond: Slurm says down* (Kill task failed)" in chosen.out["n2"]
    assert "kept out of use: Slurm says drained" in chosen.out["n3"]


def test_busy_nodes_keep_a_good_verdict_and_are_not_waited_for() -> None:
    states = nodes(n1="allocated", n2="allocated", n3="idle", n4="mixed")
    chosen = choose(states, last_healthy={"n1", "n2", "n3"}, needed=3)
    assert chosen.probe == ("n3",)
    assert chosen.kept == ("n1", "n2")
    assert chosen.out == {}


def test_busy_nodes_without_a_verdict_are_probed_only_as_far_as_they_are_needed() -> None:
    states = nodes(n1="idle", n2="allocated", n3="completing", n4="allocated")
    assert choose(states, needed=3).probe == ("n1", "n2", "n3")
    assert choose(states, needed=1).probe == ("n1",)


def test_named_nodes_are_the_only_candidates_and_excluded_ones_never_are() -> None:
    states = nodes(n1="idle", n2="idle", n3="down", n4="idle")
    chosen = choose(states, named=["n4", "n1"], excluded=["n1"], needed=1)
    assert chosen.probe == ("n4",)
    assert chosen.out == {}


def test_a_name_that_does_not_exist_is_a_mistake_in_the_spec() -> None:
    with pytest.raises(SpecError, match=r"validation\.nodes names n9, .* only n1, n2"):
        choose(nodes(n1="idle", n2="idle"), named=["n1", "n9"], needed=1)
