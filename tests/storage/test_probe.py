"""Promises of the probe: it tells honest stores from those that ignore what they are asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from storage.errors import StoreError
from storage.keys import RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.probe import StoreProbe, check_from_job, probe
from storage.records import Intent
from tests.storage.checkpoints import work
from tests.storage.meddler import Answered, Asked, Forward, Meddler


@pytest.mark.s3
def test_an_honest_store_is_believed_and_left_clean(store: ObjectStore) -> None:
    store.put("run/probe-not-mine", b"")
    found = probe(store, prefix="run/probe")
    assert (found.conditional_writes, found.checksums_enforced, found.if_match) == (True,) * 3
    assert [info.key for info in store.list("")] == ["run/probe-not-mine"]
    assert StoreProbe.from_json(found.to_json()) == found


def test_a_store_that_accepts_wrong_checksums_is_told_apart(meddled: ObjectStore) -> None:
    found = probe(meddled, prefix="probe")
    assert not found.checksums_enforced
    assert "a put with a wrong CRC32 was accepted" in " ".join(found.evidence)
    assert found.conditional_writes


def test_a_store_that_ignores_conditions_is_told_apart(
    meddled: ObjectStore, meddler: Meddler
) -> None:
    meddler.rule = lambda asked, forward: forward(asked.without("if-none-match", "if-match"))
    found = probe(meddled, prefix="probe")
    assert not found.conditional_writes
    assert not found.if_match
    assert "a second writer overwrote the first" in " ".join(found.evidence)
    assert list(meddled.list("")) == []


def test_a_store_whose_conditions_hold_only_without_haste_is_told_apart(
    meddled: ObjectStore, meddler: Meddler
) -> None:
    """Check-then-write without a lock: right for one writer after another, wrong in a race."""

    def ignore_in_races(asked: Asked, forward: Forward) -> Answered:
        return forward(asked.without("if-none-match") if "/race-" in asked.path else asked)

    meddler.rule = ignore_in_races
    found = probe(meddled, prefix="probe")
    assert not found.conditional_writes
    assert "8 of 8 racing writers won" in " ".join(found.evidence)


def test_a_store_that_does_not_know_conditions_is_told_apart(
    meddled: ObjectStore, meddler: Meddler
) -> None:
    def not_implemented(asked: Asked, forward: Forward) -> Answered:
        conditions = {"if-none-match", "if-match"} & set(asked.headers)
        return Answered(501) if conditions else forward(asked)

    meddler.rule = not_implemented
    found = probe(meddled, prefix="probe")
    assert not found.conditional_writes
    assert not found.if_match
    assert "the store does not know it" in found.evidence[0]


def test_a_store_that_serves_old_bytes_is_refused(meddled: ObjectStore, meddler: Meddler) -> None:
    def stale(asked: Asked, forward: Forward) -> Answered:
        answer = forward(asked)
        is_object = asked.method == "GET" and "list-type" not in asked.path
        return Answered(200, body=b"old") if is_object else answer

    meddler.rule = stale
    with pytest.raises(StoreError, match="does not give back what was just put"):
        probe(meddled, prefix="probe")


def test_a_refusal_for_another_reason_is_an_error_not_a_finding(
    meddled: ObjectStore, meddler: Meddler
) -> None:
    meddler.rule = lambda asked, forward: (
        Answered(403) if "if-none-match" in asked.headers else forward(asked)
    )
    with pytest.raises(StoreError, match="give these credentials"):
        probe(meddled, prefix="probe")


def test_keys_that_cannot_be_removed_are_an_error(meddled: ObjectStore, meddler: Meddler) -> None:
    refusal = (
        b"<DeleteResult><Error><Key>probe/x</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    )
    meddler.rule = lambda asked, forward: (
        Answered(200, body=refusal) if asked.method == "POST" else forward(asked)
    )
    with pytest.raises(StoreError, match=r"would not delete 'probe/x'.*right to delete"):
        probe(meddled, prefix="probe")


def test_what_is_no_probe_record_is_refused() -> None:
    with pytest.raises(StoreError, match="not the record of a store probe"):
        StoreProbe.from_json({"conditional_writes": True})


def job_of(store: ObjectStore, attempt: int = 1) -> tuple[Ledger, Intent]:
    """A job's view of a run that was begun in this store."""
    ledger = Ledger(store, RunKeys(prefix="", run=work.RUN))
    intent = work.make_intent(attempt)
    ledger.claim_intent(intent)
    return ledger, intent


@pytest.mark.s3
def test_a_job_that_sees_the_run_s_store_goes_on_and_leaves_nothing(store: ObjectStore) -> None:
    ledger, intent = job_of(store)
    check_from_job(ledger, intent)
    assert list(store.list(ledger.keys.probes)) == []


def test_a_job_that_sees_another_store_is_told_so(meddled: ObjectStore) -> None:
    ledger, intent = job_of(meddled)
    with pytest.raises(StoreError, match="not the one of the run: it holds no such attempt"):
        check_from_job(ledger, replace(intent, attempt=2))
    with pytest.raises(StoreError, match="holds another attempt of this number"):
        check_from_job(ledger, replace(intent, nonce="other"))


def test_a_job_whose_endpoint_ignores_conditions_is_told_so_by_the_first_attempt(
    meddled: ObjectStore, meddler: Meddler
) -> None:
    ledger, first = job_of(meddled)
    _, second = job_of(meddled, attempt=2)
    meddler.rule = lambda asked, forward: forward(asked.without("if-none-match"))
    with pytest.raises(StoreError, match="ignores `If-None-Match` as seen from this node"):
        check_from_job(ledger, first)
    check_from_job(ledger, second)


def test_a_job_that_sees_another_folder_of_claims_is_told_so(
    meddled: ObjectStore, meddler: Meddler, tmp_path: Path
) -> None:
    meddler.rule = lambda asked, forward: forward(asked.without("if-none-match"))
    for name in ("engine", "node"):
        (tmp_path / name).mkdir()
    by_engine = meddled.spec.model_copy(update={"claims": tmp_path / "engine"})
    ledger, intent = job_of(ObjectStore(by_engine))
    ledger.store.create(ledger.keys.run_record, b"{}")
    check_from_job(ledger, intent)
    by_node = meddled.spec.model_copy(update={"claims": tmp_path / "node"})
    with pytest.raises(StoreError, match="holds no claim on 'demo/run"):
        check_from_job(Ledger(ObjectStore(by_node), ledger.keys), intent)
