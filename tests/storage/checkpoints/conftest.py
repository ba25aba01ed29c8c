"""Real ranks and a run's ledger in a real bucket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from tests.storage.checkpoints import work
from tests.storage.checkpoints.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Two ranks that every test may use, and none may break."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture
def breakable_ranks() -> Iterator[RankPool]:
    """Two ranks of the test's own."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture
def ledger(store: ObjectStore) -> Ledger:
    return Ledger(store, RunKeys(prefix="", run=work.RUN))
