"""A commit of an attempt that was given up may land while its successor looks for one."""

from __future__ import annotations

from datetime import UTC, datetime
from unittest import mock

import pytest

from storage.checkpoint_records import Resume
from storage.checkpoints.choosing import choose
from storage.checkpoints.commits import loading_key
from storage.ledger import Ledger
from storage.object_store import Bytes
from tests.storage.checkpoints import work

pytestmark = pytest.mark.s3


def test_one_that_lands_before_a_start_at_step_0_is_resumed_from(ledger: Ledger) -> None:
    store, first, second = ledger.store, work.make_intent(1), work.make_intent(2)
    ledger.claim_intent(first)
    resume = Resume(source=None, world_size=1, nonce="n", at=datetime.now(UTC))
    ledger.claim_resume(first, resume)
    commit = work.save(store.spec, first, 3, 1.0)
    key = ledger.keys.commit(1, step=3)
    body = store.get(key)
    store.delete([key])
    ledger.claim_intent(second)
    put = store.put

    def meddled(put_key: str, put_body: Bytes) -> None:
        put(put_key, put_body)
        if put_key == loading_key(ledger, 2):
            put(key, body)

    with mock.patch.object(store, "put", meddled):
        choice = choose(ledger, second, damaged={})
    assert choice.commit == commit
