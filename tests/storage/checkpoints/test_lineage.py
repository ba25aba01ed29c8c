"""Which commits count: the fence is the lineage, and nothing that a zombie does may move it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.attempts import Attempt
from storage.checkpoint_records import CommitRef, Resume, SweepJournal
from storage.checkpoints.lineage import counting, trace
from storage.errors import LedgerError
from storage.records import Intent, Stage, Why

AT = datetime(2026, 1, 1, tzinfo=UTC)


def attempt(number: int, *, resumed: bool = True, source: CommitRef | None = None) -> Attempt:
    intent = Intent(
        run="demo",
        stage=Stage.TRAIN,
        unit="train",
        attempt=number,
        token=str(number),
        nonce=str(number),
        cluster="c",
        user="u",
        why=Why.FIRST,
        after=None,
        nodes=1,
        ranks_per_node=1,
        fingerprint="f",
        created_at=AT,
    )
    resume = Resume(source=source, world_size=1, nonce="n", at=AT) if resumed else None
    return Attempt(intent=intent, resume=resume)


def ref(step: int, number: int, save: str = "s") -> CommitRef:
    return CommitRef(step=step, attempt=number, save=save)


@dataclass(frozen=True)
class History:
    """A run as it may have gone: each attempt resumed from a commit that counted, or from none."""

    attempts: tuple[Attempt, ...]
    commits: tuple[CommitRef, ...]


@st.composite
def histories(draw: st.DrawFn) -> History:
    attempts: list[Attempt] = []
    commits: list[CommitRef] = []
    for number in range(1, draw(st.integers(1, 6)) + 1):
        resumed = draw(st.booleans())
        valid = counting(commits, attempts, ())
        source = draw(st.sampled_from(valid)) if resumed and valid else None
        attempts.append(attempt(number, resumed=resumed, source=source))
        if resumed:
            start = 0 if source is None else source.step
            for step in sorted(draw(st.sets(st.integers(start + 1, start + 30), max_size=4))):
                commits.append(ref(step, number, f"{number}-{step}"))
    return History(attempts=tuple(attempts), commits=tuple(commits))


def test_an_attempt_that_never_resumed_changes_nothing() -> None:
    first = attempt(1)
    assert counting([ref(10, 1)], [first, attempt(2, resumed=False)], ()) == (ref(10, 1),)


def test_nothing_counts_before_any_attempt_has_resumed() -> None:
    assert counting([ref(10, 1)], [attempt(1, resumed=False)], ()) == ()


def test_commits_beyond_the_takeover_are_inert_and_those_before_count() -> None:
    attempts = [attempt(1), attempt(2, source=ref(20, 1))]
    commits = [ref(10, 1), ref(20, 1), ref(30, 1), ref(25, 2)]
    assert counting(commits, attempts, ()) == (ref(25, 2), ref(20, 1), ref(10, 1))


def test_a_sibling_that_nobody_descends_from_does_not_count() -> None:
    attempts = [attempt(1), attempt(2, source=ref(20, 1)), attempt(3, source=ref(20, 1))]
    assert counting([ref(20, 1), ref(30, 2), ref(30, 3)], attempts, ()) == (
        ref(30, 3),
        ref(20, 1),
    )


def test_a_fresh_start_cuts_everything_before_it_off() -> None:
    assert counting([ref(20, 1)], [attempt(1), attempt(2)], ()) == ()


def test_the_ceiling_of_a_rollback_is_the_highest_step_that_counts() -> None:
    commits = [ref(10, 1), ref(20, 1), ref(30, 1)]
    assert counting(commits, [attempt(1)], (), ceiling=20) == (ref(20, 1), ref(10, 1))


def test_a_journaled_save_never_counts_though_another_save_of_its_step_does() -> None:
    journal = SweepJournal(sweep="s", refs=(ref(10, 1, "a"),), at=AT)
    assert counting([ref(10, 1, "a")], [attempt(1)], [journal]) == ()
    assert counting([ref(10, 1, "b")], [attempt(1)], [journal]) == (ref(10, 1, "b"),)


@pytest.mark.parametrize("source", [ref(5, 2), ref(5, 3), ref(5, 1)])
def test_a_chain_that_cannot_be_is_an_error_and_no_endless_loop(source: CommitRef) -> None:
    with pytest.raises(LedgerError, match="attempt 2 says it resumed from attempt"):
        trace([attempt(1, resumed=False), attempt(2, source=source)])


@given(history=histories(), late=st.integers(1, 200), data=st.data())
def test_a_zombie_s_late_commit_is_inert(history: History, late: int, data: st.DataObject) -> None:
    """Whatever an attempt commits beyond what its successor resumed from changes no answer."""
    lineage = trace(history.attempts)
    zombies = [
        each.number
        for each in history.attempts
        if each.resume is not None and lineage.last_steps.get(each.number, 0) is not None
    ]
    if not zombies:
        return
    zombie = data.draw(st.sampled_from(zombies))
    takeover = lineage.last_steps.get(zombie) or 0
    before = counting(history.commits, history.attempts, ())
    commit = ref(takeover + late, zombie, "late")
    assert counting([*history.commits, commit], history.attempts, ()) == before


@given(history=histories(), data=st.data())
def test_what_an_attempt_resumed_from_still_counts_once_it_has_resumed(
    history: History, data: st.DataObject
) -> None:
    valid = counting(history.commits, history.attempts, ())
    if not valid:
        return
    source = data.draw(st.sampled_from(valid))
    following = attempt(len(history.attempts) + 1, source=source)
    after = counting(history.commits, [*history.attempts, following], ())
    assert after == tuple(each for each in valid if each <= source)


@given(history=histories(), data=st.data())
def test_order_does_not_matter_and_the_answer_is_newest_first(
    history: History, data: st.DataObject
) -> None:
    answer = counting(history.commits, history.attempts, ())
    commits = data.draw(st.permutations(history.commits))
    attempts = data.draw(st.permutations(history.attempts))
    assert counting(commits, attempts, ()) == answer
    steps = [each.step for each in answer]
    assert steps == sorted(set(steps), reverse=True)


@given(history=histories(), data=st.data())
def test_journaling_takes_out_exactly_what_it_names(history: History, data: st.DataObject) -> None:
    answer = counting(history.commits, history.attempts, ())
    named = data.draw(st.sets(st.sampled_from(answer))) if answer else set()
    journal = SweepJournal(sweep="s", refs=tuple(named), at=AT)
    assert counting(history.commits, history.attempts, [journal]) == tuple(
        each for each in answer if each not in named
    )


def test_a_resume_record_written_late_by_an_older_attempt_changes_nothing() -> None:
    attempts = [attempt(1), attempt(2, resumed=False), attempt(3, source=ref(20, 1))]
    commits = [ref(20, 1), ref(30, 3)]
    late = [attempts[0], replace(attempts[1], resume=attempts[0].resume), attempts[2]]
    assert counting(commits, late, ()) == counting(commits, attempts, ())
