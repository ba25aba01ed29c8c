"""Quarantine and poison: one bad host condemns nothing, and what is condemned is passed over."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.attempts import Attempt
from storage.checkpoint_records import CommitRef, Quarantine
from storage.checkpoints.lineage import POISONED_AFTER, POISONING, poisoned
from storage.checkpoints.quarantine import acquit, condemn, condemned, doubt, quarantined
from storage.ledger import Ledger
from storage.records import Action, Decision, Diagnosis, End, Kind
from tests.storage.checkpoints.test_lineage import AT, attempt, ref

REF = ref(10, 1)


def said(host: str, reader: int | None, about: CommitRef = REF) -> Quarantine:
    return Quarantine(ref=about, host=host, attempt=reader, fault="bad CRC", at=AT)


def ended(number: int, kind: Kind | None, *, source: CommitRef | None, code: str = "f") -> Attempt:
    begun = attempt(number, source=source)
    begun = replace(begun, intent=replace(begun.intent, fingerprint=code))
    if kind is None:
        return begun
    end = End(
        diagnosis=Diagnosis(kind=kind),
        decision=Decision(action=Action.RESUME, reason="test"),
        by="test",
        nonce="n",
        at=AT,
    )
    return replace(begun, end=end)


def test_one_host_condemns_nothing_however_often_it_says_so() -> None:
    assert condemned([said("n1", 2), said("n1", 3), said("n1", 4)]) == {}


def test_two_hosts_condemn_and_both_are_told() -> None:
    reason = condemned([said("n2", 3), said("n1", 2)])[REF]
    assert reason == ("2 hosts could not read it: n1 (attempt 2): bad CRC; n2 (attempt 3): bad CRC")


def test_a_verify_condemns_alone() -> None:
    assert condemned([said("login1", None)]) == {REF: "a verify on login1 found: bad CRC"}


@given(
    doubts=st.lists(
        st.builds(
            said,
            st.sampled_from(["n1", "n2", "n3"]),
            st.none() | st.integers(1, 4),
            st.builds(ref, st.integers(1, 3), st.integers(1, 2)),
        )
    )
)
def test_exactly_what_two_hosts_or_a_verify_speak_against_is_condemned(
    doubts: list[Quarantine],
) -> None:
    expected = {
        each.ref
        for each in doubts
        if each.attempt is None
        or len({one.host for one in doubts if one.ref == each.ref and one.attempt is not None}) > 1
    }
    assert condemned(doubts).keys() == expected


@pytest.mark.s3
def test_a_verify_s_word_outlives_that_of_a_job_on_its_host_and_is_lifted_by_another(
    ledger: Ledger,
) -> None:
    other = ref(20, 1)
    doubt(ledger, REF, host="n1", attempt=2, fault="x")
    assert quarantined(ledger) == {}
    condemn(ledger, REF, host="n1", fault="y")
    doubt(ledger, REF, host="n1", attempt=3, fault="z")
    condemn(ledger, other, host="n1", fault="y")
    assert quarantined(ledger)[REF] == "a verify on n1 found: y"
    acquit(ledger, REF)
    assert quarantined(ledger).keys() == {other}
    doubt(ledger, REF, host="n2", attempt=4, fault="x")
    assert quarantined(ledger).keys() == {other}


KINDS = st.none() | st.sampled_from(sorted(POISONING)) | st.sampled_from(list(Kind))


@given(
    kinds=st.lists(KINDS, max_size=8),
    sources=st.lists(st.sampled_from([REF, ref(20, 1)]), min_size=8, max_size=8),
    places=st.sets(st.tuples(st.integers(21, 40), st.integers(2, 9)), max_size=2),
)
def test_poison_is_what_three_loads_failed_on_and_none_got_on_from(
    kinds: list[Kind | None], sources: list[CommitRef], places: set[tuple[int, int]]
) -> None:
    """Whatever the order and however many loads ended in preemption or hardware."""
    attempts = [
        ended(number, kind, source=source)
        for number, (kind, source) in enumerate(zip(kinds, sources, strict=False), start=2)
    ]
    found = poisoned(reversed(attempts), places)
    for about in (REF, ref(20, 1)):
        loads = [one for one in attempts if one.resume is not None and one.resume.source == about]
        bad = [one for one in loads if one.end is not None and one.end.diagnosis.kind in POISONING]
        got_on = {one.number for one in loads} & {number for _, number in places}
        assert (about in found) == (len(bad) >= POISONED_AFTER and not got_on)


def test_only_code_numeric_and_hang_are_held_against_a_checkpoint() -> None:
    for kind in Kind:
        attempts = [ended(number, kind, source=REF) for number in (2, 3, 4)]
        assert bool(poisoned(attempts, [])) == (kind in {Kind.CODE, Kind.NUMERIC, Kind.HANG})


def test_two_bad_loads_are_not_enough_and_a_start_from_nothing_is_no_load() -> None:
    assert poisoned([ended(2, Kind.CODE, source=REF), ended(3, Kind.HANG, source=REF)], []) == {}
    assert poisoned([ended(number, Kind.CODE, source=None) for number in (1, 2, 3)], []) == {}


def test_a_bug_that_was_mended_since_is_not_held_against_a_checkpoint() -> None:
    attempts = [ended(number, Kind.CODE, source=REF, code="old") for number in (2, 3, 4)]
    assert poisoned(attempts, [], fingerprint="old").keys() == {REF}
    assert poisoned(attempts, [], fingerprint="mended") == {}
    assert poisoned(attempts, []).keys() == {REF}
