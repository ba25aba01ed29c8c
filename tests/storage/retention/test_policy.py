"""The retention policy: whatever is asked for, the newest two and what is in use stay."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from storage.checkpoint_records import CommitRef
from storage.retention.policy import StoredCommit, Verdict, plan
from storage.spec import KeepSpec

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def stored(step: int, *, age_s: float = 1e6, counts: bool = True, attempt: int = 1) -> StoredCommit:
    return StoredCommit(
        ref=CommitRef(step=step, attempt=attempt, save=f"s{step}"),
        written_at=NOW - timedelta(seconds=age_s),
        size_bytes=1,
        counts=counts,
    )


def kept(verdicts: tuple[Verdict, ...]) -> list[int]:
    return [verdict.ref.step for verdict in verdicts if verdict.keep]


commit_sets = st.lists(
    st.builds(
        stored,
        st.integers(1, 50),
        age_s=st.floats(0, 7200),
        counts=st.booleans(),
        attempt=st.integers(1, 3),
    ),
    max_size=15,
    unique_by=lambda commit: commit.ref,
)
keeps = st.builds(KeepSpec, last=st.integers(2, 6))


def test_the_newest_n_stay_and_the_rest_goes_with_a_reason_for_each() -> None:
    verdicts = plan(
        [stored(step) for step in (10, 20, 30, 40)],
        protected={},
        keep=KeepSpec(last=3),
        grace_s=3600,
        now=NOW,
    )
    assert [(verdict.ref.step, verdict.keep, verdict.reason) for verdict in verdicts] == [
        (40, True, "newest 2, keep.last 3"),
        (30, True, "newest 2, keep.last 3"),
        (20, True, "keep.last 3"),
        (10, False, "no rule keeps it"),
    ]


def test_what_does_not_count_takes_no_place_among_the_newest() -> None:
    commits = [stored(10), stored(20), stored(30, counts=False), stored(40, counts=False)]
    verdicts = plan(commits, protected={}, keep=KeepSpec(last=2), grace_s=0, now=NOW)
    assert kept(verdicts) == [20, 10]


def test_the_protected_and_the_young_stay_whether_they_count_or_not() -> None:
    pinned, young = stored(5, counts=False), stored(6, age_s=10, counts=False)
    commits = [pinned, young, stored(7), *(stored(step) for step in (10, 20))]
    verdicts = plan(
        commits, protected={pinned.ref: "pinned"}, keep=KeepSpec(last=2), grace_s=60, now=NOW
    )
    assert kept(verdicts) == [20, 10, 6, 5]
    assert {v.ref.step: v.reason for v in verdicts}[5] == "pinned"


@given(commits=commit_sets, keep=keeps, grace_s=st.floats(0, 7200), data=st.data())
def test_the_newest_two_and_everything_protected_survive_any_spec(
    commits: list[StoredCommit], keep: KeepSpec, grace_s: float, data: st.DataObject
) -> None:
    refs = [commit.ref for commit in commits]
    named = data.draw(st.sets(st.sampled_from(refs))) if refs else set()
    verdicts = plan(
        commits, protected=dict.fromkeys(named, "pinned"), keep=keep, grace_s=grace_s, now=NOW
    )
    survivors = {verdict.ref for verdict in verdicts if verdict.keep}
    newest = sorted((c.ref for c in commits if c.counts), reverse=True)[:2]
    young = {c.ref for c in commits if NOW - c.written_at < timedelta(seconds=grace_s)}
    assert named | set(newest) | young <= survivors
    assert {verdict.ref for verdict in verdicts} == set(refs)


@given(commits=commit_sets, keep=keeps, grace_s=st.floats(0, 7200), data=st.data())
def test_the_order_in_which_a_store_lists_does_not_matter(
    commits: list[StoredCommit], keep: KeepSpec, grace_s: float, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(commits))
    first = plan(commits, protected={}, keep=keep, grace_s=grace_s, now=NOW)
    assert plan(shuffled, protected={}, keep=keep, grace_s=grace_s, now=NOW) == first


@given(commits=commit_sets, keep=keeps, grace_s=st.floats(0, 7200))
def test_a_second_plan_over_what_the_first_left_deletes_nothing(
    commits: list[StoredCommit], keep: KeepSpec, grace_s: float
) -> None:
    first = plan(commits, protected={}, keep=keep, grace_s=grace_s, now=NOW)
    survivors = {verdict.ref for verdict in first if verdict.keep}
    left = [commit for commit in commits if commit.ref in survivors]
    again = plan(left, protected={}, keep=keep, grace_s=grace_s, now=NOW)
    assert all(verdict.keep for verdict in again)


@given(commits=commit_sets, keep=keeps, added=st.integers(51, 60))
def test_a_newer_commit_never_saves_an_older_one(
    commits: list[StoredCommit], keep: KeepSpec, added: int
) -> None:
    before = plan(commits, protected={}, keep=keep, grace_s=0, now=NOW)
    after = plan([*commits, stored(added)], protected={}, keep=keep, grace_s=0, now=NOW)
    doomed = {verdict.ref for verdict in before if not verdict.keep}
    assert doomed <= {verdict.ref for verdict in after if not verdict.keep}


def test_ages_are_measured_against_the_time_that_is_handed_in() -> None:
    commits = [replace(stored(step), written_at=NOW) for step in (1, 2, 3)]
    later = NOW + timedelta(seconds=61)
    keep = KeepSpec(last=2)
    assert kept(plan(commits, protected={}, keep=keep, grace_s=60, now=NOW)) == [3, 2, 1]
    assert kept(plan(commits, protected={}, keep=keep, grace_s=60, now=later)) == [3, 2]
