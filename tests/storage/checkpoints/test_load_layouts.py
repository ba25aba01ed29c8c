"""A checkpoint loads on another number of ranks and another mesh, and costs no more there."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from storage.ledger import Ledger
from storage.records import Intent
from tests.storage.checkpoints import layouts, work
from tests.storage.checkpoints.layouts import LARGE, SMALL
from tests.storage.checkpoints.pool import RankPool

pytestmark = [pytest.mark.s3, pytest.mark.distributed]

LAYOUTS = ("fsdp", "hsdp", "tp", "fsdp and tp", "pp")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture
def on(pool: RankPool) -> Callable[..., list[Any]]:
    """`on(size, work, *arguments)`: what it returns on each of so many ranks."""

    def on(size: int, work_of_rank: Callable[..., Any], *arguments: Any) -> list[Any]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return pool.values(layouts.within, size, port, work_of_rank, *arguments)[:size]

    return on


@pytest.fixture
def intent(ledger: Ledger) -> Intent:
    intent = work.make_intent(1)
    assert ledger.claim_intent(intent).won
    return intent


@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_element_comes_back_in_every_other_layout(
    saved: str, on: Callable[..., list[Any]], ledger: Ledger, intent: Intent
) -> None:
    spec = ledger.store.spec
    commit = on(4, layouts.save, spec, intent, saved, SMALL, 10)[0]
    for loaded in LAYOUTS:
        answers = on(4, layouts.load, spec, commit, loaded, SMALL)
        assert [differing for differing, _, _ in answers] == [[]] * 4, f"{saved} to {loaded}"


def test_a_model_under_torch_s_own_tensor_parallelism_and_fsdp_goes_anywhere_and_back(
    on: Callable[..., list[Any]], ledger: Ledger, intent: Intent
) -> None:
    spec = ledger.store.spec
    sizes = {name: SMALL[name] for name in ("layers.0.up", "layers.0.down")}
    commit = on(4, layouts.save_model, spec, intent, 10)[0]
    assert on(4, layouts.load_model, spec, commit) == [[]] * 4
    for number, layout in ((4, "tp"), (3, "fsdp"), (1, "fsdp")):
        answers = on(number, layouts.load, spec, commit, layout, sizes)
        assert [differing for differing, _, _ in answers] == [[]] * number
    commit = on(3, layouts.save, spec, intent, "fsdp", sizes, 20)[0]
    assert on(4, layouts.load_model, spec, commit) == [[]] * 4


def test_no_rank_reads_more_than_a_twentieth_beyond_its_share_on_other_numbers_of_ranks(
    on: Callable[..., list[Any]], ledger: Ledger, intent: Intent
) -> None:
    spec = ledger.store.spec
    steps = [(2, "fsdp"), (4, "fsdp"), (3, "fsdp"), (1, "fsdp"), (4, "hsdp"), (2, "pp"), (4, "pp")]
    commit = on(2, layouts.save, spec, intent, "fsdp", LARGE, 1)[0]
    for step, (number, layout) in enumerate(steps[1:], 2):
        for differing, read, needed in on(number, layouts.load, spec, commit, layout, LARGE):
            assert differing == []
            assert needed <= read <= 1.05 * needed, f"{layout} on {number}"
        commit = on(number, layouts.save, spec, intent, layout, LARGE, step)[0]
