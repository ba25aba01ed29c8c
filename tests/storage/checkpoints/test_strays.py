"""What others leave in a run's folders: it stops nobody, unless it claims to be a record."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from storage.checkpoints.choosing import choose
from storage.checkpoints.pins import named_pins
from storage.checkpoints.quarantine import doubt, read_doubts
from storage.errors import LedgerError
from storage.ledger import Ledger
from storage.records import Stage, encode
from storage.retention.inventory import take
from tests.storage.checkpoints import work
from tests.storage.checkpoints.facts import make_commit

pytestmark = pytest.mark.s3


def test_objects_that_are_no_records_are_passed_over(ledger: Ledger) -> None:
    """A console's empty objects for folders, and notes of people."""
    intent = work.make_intent(1)
    assert ledger.claim_intent(intent).won
    commit = make_commit(10, run=work.RUN)
    doubt(ledger, commit.ref, host="n1", attempt=1, fault="bad CRC")
    keys = ledger.keys
    folders = (keys.commits, keys.pins, keys.quarantine, keys.readers, keys.sweeps, keys.cancels)
    for folder in (*folders, keys.stage_records(Stage.TRAIN), keys.attempts(Stage.TRAIN)):
        ledger.store.client.put_object(Bucket=ledger.store.bucket, Key=folder)
        ledger.store.put(f"{folder}note.txt", b"do not delete")
    for prefix in (keys.heartbeats(Stage.TRAIN, 1), keys.elements(Stage.TRAIN, 1)):
        ledger.store.put(f"{prefix}0.txt", b"a copy")
    inventory = take(ledger, now=datetime.now(UTC))
    assert (inventory.journals, inventory.pins, inventory.markers) == ((), (), ())
    assert [attempt.heartbeats for attempt in inventory.attempts] == [()]
    assert named_pins(ledger) == ()
    assert [each.host for each in read_doubts(ledger)] == ["n1"]
    assert ledger.stage_records(Stage.TRAIN) == ()
    assert ledger.asked_for_the_end(before=frozenset()) is None
    assert choose(ledger, intent, damaged={}).commit is None


def test_a_record_that_cannot_be_read_is_named(ledger: Ledger) -> None:
    key = f"{ledger.keys.sweeps}aa.json"
    for body in (b"", encode(work.make_intent(1))):
        ledger.store.put(key, body)
        with pytest.raises(LedgerError) as caught:
            take(ledger, now=datetime.now(UTC))
        told = str(caught.value)
        assert told.startswith(f"the object at {key!r} is not a SweepJournal record: ")
        assert "\n" not in told
        assert told.endswith("restore it if it was changed")
