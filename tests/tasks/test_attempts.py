"""What `advance` decides: one situation a test, no store, no cluster, no clock."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from slurm.cluster import JobObservation, JobState, NodeState
from slurm.evidence import Evidence
from slurm.spec import RetrySpec
from storage.attempts import Attempt, Element
from storage.records import (
    Action,
    Cancel,
    Decision,
    Diagnosis,
    End,
    Exit,
    ExitCode,
    Heartbeat,
    Intent,
    JobIdentity,
    Kind,
    Stage,
    Start,
    Submitted,
    Why,
)
from tasks.attempts import advance
from tasks.attending import poll_s
from tasks.context import Unit
from tasks.exclusions import Exclusion
from tasks.situation import (
    Allocate,
    CancelJob,
    Close,
    Finish,
    Gather,
    GiveUp,
    Order,
    Quote,
    Situation,
    Submission,
    Submit,
    Survey,
    Void,
    Wait,
    Watch,
)

NOW = datetime(2026, 7, 1, 12, tzinfo=UTC)
UNIT = Unit(name="u", entry="none", nodes=2)
RETRY = RetrySpec(lost_after_s=60.0)
ORDER = Order(
    run="r",
    stage=Stage.TRAIN,
    units=(UNIT,),
    fingerprint="f.0",
    cluster="here",
    who="ann",
    retry=RETRY,
)


def intent(number: int = 1, **changes: object) -> Intent:
    made = Intent(
        run="r",
        stage=Stage.TRAIN,
        unit="u",
        attempt=number,
        token=f"r-train-{number:04d}",
        nonce=f"{number:016x}",
        cluster="here",
        user="ann",
        why=Why.FIRST,
        after=None,
        nodes=2,
        ranks_per_node=1,
        fingerprint="f.0",
        created_at=NOW - timedelta(minutes=5),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def end(action: Action, kind: Kind = Kind.UNKNOWN, **changes: object) -> End:
    decision = Decision(action=action, reason="because")
    return End(
        diagnosis=Diagnosis(kind=kind),
        decision=replace(decision, **changes),  # type: ignore[arg-type]
        by="e",
        nonce="e",
        at=NOW - timedelta(seconds=1),
    )


def started(number: int = 1, **changes: object) -> Attempt:
    job = JobIdentity(job_id=str(number), token=intent(number).token, host="n1")
    start = Start(job=job, nodes=("n1", "n2"), nonce="s", at=NOW)
    return replace(Attempt(intent=intent(number), start=start), **changes)  # type: ignore[arg-type]


def left(code: ExitCode, *, error: str = "") -> Exit:
    return Exit(code=code, rank=0, node="n1", error=error, nonce="x", at=NOW)


VOID = Start(job=None, nonce="v", at=NOW)
BEAT = Heartbeat(node="n1", sequence=3, step=7, at=NOW)


def job(state: JobState, number: int = 1, **changes: object) -> dict[str, JobObservation]:
    token = intent(number).token
    job_id = None if state is JobState.ABSENT else str(number)
    seen = JobObservation(token=token, state=state, job_id=job_id)
    return {token: replace(seen, **changes)}  # type: ignore[arg-type]


def nodes(*names: str) -> tuple[NodeState, ...]:
    return tuple(NodeState(name=one, raw_state="idle", responds=True, idle=True) for one in names)


def situation(*attempts: Attempt, **changes: object) -> Situation:
    return replace(Situation(now=NOW, attempts=attempts), **changes)  # type: ignore[arg-type]


def only(steps: tuple[object, ...]) -> object:
    (step,) = steps
    return step


def test_an_attempt_is_made_only_after_the_nodes_were_asked_for() -> None:
    assert advance(ORDER, situation()) == (Survey(),)
    step = only(advance(ORDER, situation(nodes=nodes("n1", "n2"))))
    assert step == Allocate(unit=UNIT, number=1, why=Why.FIRST, after=None, excluded=())


def test_numbers_follow_the_last_one_of_the_whole_stage() -> None:
    others = tuple(Attempt(intent=intent(number, unit="other")) for number in (1, 2))
    order = replace(ORDER, units=(UNIT, replace(UNIT, name="v")))
    steps = advance(order, situation(*others, nodes=nodes("n1", "n2")))
    assert [one.number for one in steps if isinstance(one, Allocate)] == [3, 4]


def test_only_the_creator_submits_and_only_what_it_has_not_sent() -> None:
    attempt = Attempt(intent=intent())
    seen = situation(attempt, observations=job(JobState.ABSENT))
    due = replace(seen, submissions={attempt.intent.nonce: Submission.DUE})
    assert advance(ORDER, due) == (Submit(attempt=attempt, unit=UNIT),)
    sent = replace(seen, submissions={attempt.intent.nonce: Submission.SENT})
    for other in (seen, sent):
        assert isinstance(only(advance(ORDER, other)), Wait)


@pytest.mark.parametrize(
    ("state", "traceless_s", "expected"),
    [
        (JobState.ABSENT, 0.0, Wait),
        (JobState.ABSENT, 1e9, Void),
        (JobState.PENDING, 1e9, Wait),
        (JobState.RUNNING, 1e9, Wait),
        (JobState.UNKNOWN, 1e9, Wait),
        (JobState.ENDED, 0.0, Void),
    ],
)
def test_doubt_ends_in_a_void_only_where_no_job_is_alive(
    state: JobState, traceless_s: float, expected: type
) -> None:
    seen = situation(
        Attempt(intent=intent(), submitted=Submitted(job_id="1", nonce="s", at=NOW)),
        observations=job(state),
        watches={1: Watch(traceless_s=traceless_s)},
    )
    assert isinstance(only(advance(ORDER, seen)), expected)


def test_nothing_is_voided_while_the_cluster_does_not_answer() -> None:
    seen = situation(Attempt(intent=intent()), watches={1: Watch(traceless_s=1e9)})
    assert isinstance(only(advance(ORDER, seen)), Wait)


def test_a_voided_attempt_is_closed_as_lost_and_its_queued_job_cancelled() -> None:
    attempt = Attempt(intent=intent(), start=VOID)
    closing = only(advance(ORDER, situation(attempt, observations=job(JobState.ABSENT))))
    assert isinstance(closing, Close)
    assert closing.diagnosis.kind is Kind.LOST
    cancel, closing = advance(ORDER, situation(attempt, observations=job(JobState.PENDING)))
    assert isinstance(cancel, CancelJob)
    assert (cancel.job_id, cancel.who) == ("1", "headrace")
    assert isinstance(closing, Close)


IN_VAIN = "PartitionTimeLimit"


@pytest.mark.parametrize(
    ("reason", "pending_s", "one_partition", "expected"),
    [
        (IN_VAIN, 31.0, True, Void),
        (IN_VAIN, 29.0, True, Wait),
        (IN_VAIN, 1e9, False, Wait),
        ("BadConstraints", 31.0, False, Void),
        ("ReqNodeNotAvail, UnavailableNodes:n2", 1e9, True, Wait),
        ("Priority", 1e9, True, Wait),
        ("SomethingNew", 1e9, True, Wait),
    ],
)
def test_a_job_that_waits_in_vain_loses_its_start_before_anything_else_is_done(
    reason: str, pending_s: float, one_partition: bool, expected: type
) -> None:
    seen = situation(
        Attempt(intent=intent(), submitted=Submitted(job_id="1", nonce="s", at=NOW)),
        observations=job(JobState.PENDING, reason=reason),
        watches={1: Watch(pending_s=pending_s)},
    )
    order = replace(ORDER, one_partition=one_partition)
    assert isinstance(only(advance(order, seen)), expected)


def test_a_job_that_waits_in_vain_is_cancelled_and_the_spec_is_to_blame() -> None:
    attempt = Attempt(intent=intent(), start=VOID)
    seen = situation(attempt, observations=job(JobState.PENDING, reason="BadConstraints"))
    cancel, closing = advance(ORDER, seen)
    assert isinstance(cancel, CancelJob)
    assert (cancel.job_id, cancel.who) == ("1", "headrace")
    assert isinstance(closing, Close)
    assert (closing.diagnosis.kind, closing.decision.action) == (Kind.CODE, Action.GIVE_UP)
    for words in (cancel.why, closing.diagnosis.evidence[0]):
        assert "BadConstraints: no nodes of this cluster are what it asks for" in words


def test_a_job_that_starts_after_all_is_not_held_to_have_waited_in_vain() -> None:
    running = situation(
        started(),
        observations=job(JobState.RUNNING, reason="BadConstraints"),
        watches={1: Watch(pending_reason="BadConstraints", pending_s=1e9)},
    )
    assert isinstance(only(advance(ORDER, running)), Wait)


def test_only_one_and_the_same_reason_seen_again_and_again_counts_as_waiting_for_it() -> None:
    attempt = Attempt(intent=intent())

    def look(watch: Watch, state: JobState, reason: str) -> Watch:
        seen = job(state, reason=reason)[attempt.intent.token]
        return watch.after(20.0, before=attempt, attempt=attempt, observation=seen)

    watch = look(Watch(), JobState.PENDING, IN_VAIN)
    assert watch.pending_s == 0.0, "time before the first look says nothing"
    watch = look(watch, JobState.PENDING, IN_VAIN)
    assert watch.pending_s == 20.0
    assert look(watch, JobState.PENDING, "Priority").pending_s == 0.0
    assert look(watch, JobState.RUNNING, IN_VAIN).pending_s == 0.0
    assert look(watch, JobState.PENDING, IN_VAIN).pending_s == 40.0


def test_a_job_of_the_same_token_and_another_id_is_not_the_attempts_own() -> None:
    attempt = started(heartbeats=(BEAT,))
    other = job(JobState.RUNNING, job_id="99")
    quiet = {1: Watch(silent_s=61.0)}
    step = only(advance(ORDER, situation(attempt, observations=other, watches=quiet)))
    assert isinstance(step, Gather)


@pytest.mark.parametrize(
    ("state", "silent_s", "beats", "expected"),
    [
        (JobState.RUNNING, 10.0, (BEAT,), Wait),
        (JobState.RUNNING, 61.0, (BEAT,), CancelJob),
        (JobState.RUNNING, 61.0, (), Wait),
        (JobState.ABSENT, 10.0, (BEAT,), Wait),
        (JobState.ABSENT, 61.0, (), Gather),
        (JobState.UNKNOWN, 1e9, (BEAT,), Wait),
        (JobState.ENDED, 0.0, (BEAT,), Gather),
    ],
)
def test_silence_counts_where_slurm_says_nothing_better(
    state: JobState, silent_s: float, beats: tuple[Heartbeat, ...], expected: type
) -> None:
    seen = situation(
        started(heartbeats=beats),
        observations=job(state),
        watches={1: Watch(silent_s=silent_s)},
    )
    assert isinstance(only(advance(ORDER, seen)), expected)


def test_an_exit_record_ends_an_attempt_that_slurm_still_calls_running() -> None:
    attempt = started(exit=left(ExitCode.CRASHED))
    running = situation(attempt, observations=job(JobState.RUNNING))
    assert isinstance(only(advance(ORDER, running)), Wait)
    late = replace(running, watches={1: Watch(over_s=11.0)})
    cancel = only(advance(ORDER, late))
    assert isinstance(cancel, CancelJob)
    assert cancel.who == "headrace"
    cancelled = replace(late, cancelled_s={1: 0.1})
    assert isinstance(only(advance(ORDER, cancelled)), Gather)


def test_a_job_that_blames_a_node_is_not_waited_for() -> None:
    gone = replace(left(ExitCode.PEER_LOST), blamed_nodes=("n2",))
    running = job(JobState.RUNNING)
    cancel = only(advance(ORDER, situation(started(exit=gone), observations=running)))
    assert isinstance(cancel, CancelJob)
    for other in (left(ExitCode.PEER_LOST), replace(gone, code=ExitCode.CRASHED)):
        step = only(advance(ORDER, situation(started(exit=other), observations=running)))
        assert isinstance(step, Wait)


def test_a_done_job_is_believed_while_the_cluster_does_not_answer() -> None:
    assert isinstance(only(advance(ORDER, situation(started(exit=left(ExitCode.DONE))))), Gather)
    assert isinstance(only(advance(ORDER, situation(started(exit=left(ExitCode.CRASHED))))), Wait)


def test_unsettled_evidence_is_gathered_again_until_patience_is_over() -> None:
    attempt = started(exit=left(ExitCode.CRASHED, error="Connection closed by peer [10.0.0.2]"))
    ended = job(JobState.ENDED, raw_state="FAILED", exit_code="1:0")
    evidence = {1: Evidence(attempt=attempt, job=ended[attempt.intent.token], now=NOW)}
    seen = situation(attempt, observations=ended, evidence=evidence)
    gather, wait = advance(ORDER, seen)
    assert isinstance(gather, Gather)
    assert isinstance(wait, Wait)
    step = only(advance(ORDER, replace(seen, watches={1: Watch(over_s=61.0)})))
    assert isinstance(step, Close)
    assert step.diagnosis.kind is Kind.NETWORK


def test_a_done_attempt_of_this_fingerprint_is_the_result() -> None:
    done = started(exit=left(ExitCode.DONE), end=end(Action.DONE, Kind.DONE))
    assert advance(ORDER, situation(done)) == (Finish(results={"u": done}),)
    changed = replace(ORDER, fingerprint="g.0")
    assert advance(changed, situation(done)) == (Survey(),)
    aged = replace(ORDER, max_age_s=0.5)
    assert advance(aged, situation(done)) == (Survey(),)


def test_what_gave_up_before_this_engine_was_asked_does_not_bind_it() -> None:
    seen = situation(started(end=end(Action.GIVE_UP, Kind.CODE)))
    step = only(advance(ORDER, seen))
    assert isinstance(step, GiveUp)
    assert not step.cancelled
    assert advance(replace(ORDER, past=frozenset({1})), seen) == (Survey(),)


def test_a_stop_by_a_person_is_told_as_a_cancel() -> None:
    step = only(advance(ORDER, situation(started(end=end(Action.STOP, Kind.OPERATOR)))))
    assert isinstance(step, GiveUp)
    assert step.cancelled


def test_the_delay_of_a_decision_is_waited_for() -> None:
    seen = situation(started(end=end(Action.RESUME, delay_s=9.0)))
    step = only(advance(ORDER, seen))
    assert isinstance(step, Wait)
    assert step.seconds == pytest.approx(8.0)
    assert advance(ORDER, replace(seen, now=NOW + timedelta(seconds=8))) == (Survey(),)


def test_too_few_nodes_end_the_stage_with_the_numbers_and_a_remedy() -> None:
    seen = situation(
        started(end=end(Action.RETRY_ELSEWHERE, Kind.HARDWARE, exclude_nodes=("n2",))),
        nodes=nodes("n1", "n2"),
        excluded={
            "n2": Exclusion(reason="hardware in train attempt 1", failed=True),
            "gone": Exclusion(reason="cluster.exclude"),
        },
    )
    step = only(advance(ORDER, seen))
    assert isinstance(step, GiveUp)
    for word in ("needs 2 nodes", "1 of 2", "n2: hardware in train attempt 1", "--force validate"):
        assert word in step.reason
    assert "gone" not in step.reason
    assert advance(replace(ORDER, replaces_nodes=True), seen)[0].__class__ is Allocate


def test_named_nodes_get_no_exclusions_and_a_blamed_one_fails_the_unit() -> None:
    unit = replace(UNIT, nodes=1, node_list=("n3",))
    order = replace(ORDER, units=(unit,))
    seen = situation(nodes=nodes("n3"), excluded={"n3": Exclusion(reason="unfit by validation")})
    step = only(advance(order, seen))
    assert isinstance(step, Allocate)
    assert step.excluded == ()
    blamed = started(end=end(Action.RETRY_ELSEWHERE, Kind.HARDWARE, exclude_nodes=("n3",)))
    assert isinstance(only(advance(order, replace(seen, attempts=(blamed,)))), GiveUp)
    tolerant = replace(order, tolerate=True)
    assert advance(tolerant, replace(seen, attempts=(blamed,))) == (Finish(results={"u": blamed}),)


def test_an_open_attempt_of_another_cluster_is_left_alone_and_said() -> None:
    step = only(advance(ORDER, situation(Attempt(intent=intent(cluster="there")))))
    assert isinstance(step, GiveUp)
    assert "'there'" in step.reason
    assert "'here'" in step.reason


def test_a_cancel_is_recorded_before_the_job_is_touched_then_voided_then_closed() -> None:
    attempt = Attempt(intent=intent())
    seen = situation(attempt, observations=job(JobState.PENDING), cancelled=True)
    step = only(advance(ORDER, seen))
    assert isinstance(step, CancelJob)
    assert (step.who, step.job_id) == ("ann", "1")
    recorded = replace(attempt, cancel=Cancel(who="ann", why="enough", nonce="c", at=NOW))
    seen = replace(seen, attempts=(recorded,), cancelled_s={1: 1.0})
    assert advance(ORDER, seen) == (Void(attempt=recorded),)
    voided = replace(recorded, start=VOID)
    seen = replace(seen, attempts=(voided,), observations=job(JobState.ENDED))
    step = only(advance(ORDER, seen))
    assert isinstance(step, Close)
    assert (step.diagnosis.kind, step.decision.action) == (Kind.OPERATOR, Action.STOP)


def test_a_job_that_was_done_before_the_cancel_keeps_its_result() -> None:
    done = started(exit=left(ExitCode.DONE))
    seen = situation(done, observations=job(JobState.ENDED, exit_code="0:0"), cancelled=True)
    assert isinstance(only(advance(ORDER, seen)), Gather)


@pytest.mark.parametrize(("age_s", "expected_s"), [(-50, 0.5), (0, 0.5), (60, 2.0), (1e6, 30.0)])
def test_a_young_job_is_looked_at_often_and_an_old_one_seldom(
    age_s: float, expected_s: float
) -> None:
    assert poll_s(age_s) == expected_s


def test_time_that_was_not_watched_is_no_silence() -> None:
    attempt = started(heartbeats=(BEAT,))
    absent = job(JobState.ABSENT)[attempt.intent.token]
    watch = Watch().after(5.0, before=None, attempt=attempt, observation=absent)
    assert (watch.silent_s, watch.traceless_s) == (0.0, 5.0)
    watch = watch.after(5.0, before=attempt, attempt=attempt, observation=absent)
    assert (watch.silent_s, watch.traceless_s) == (5.0, 10.0)
    assert watch.after(99.0, before=attempt, attempt=attempt, observation=None) == watch
    alive = replace(attempt, heartbeats=(replace(BEAT, sequence=4),))
    assert watch.after(5.0, before=attempt, attempt=alive, observation=absent).silent_s == 0.0


def element(number: int, word: Exit | None = None) -> Element:
    begun = Start(job=None, element=number, nodes=("n1",), nonce="s", at=NOW)
    return Element(number=number, start=begun, exit=None if word is None else of(number, word))


def of(number: int, word: Exit) -> Exit:
    return replace(word, element=number)


def an_array(*elements: Element, **changes: object) -> Attempt:
    whole = replace(started(**changes), elements=elements)
    return replace(whole, intent=replace(whole.intent, elements=3))


def test_an_element_that_fails_leaves_the_others_at_work() -> None:
    failed = an_array(element(0), element(1, left(ExitCode.CRASHED)), heartbeats=(BEAT,))
    seen = situation(failed, observations=job(JobState.RUNNING))
    assert isinstance(only(advance(ORDER, seen)), Wait)


def test_the_first_failure_is_quoted_when_no_element_lives_any_more() -> None:
    early = replace(left(ExitCode.BAD_DATA), at=NOW - timedelta(minutes=1))
    earliest = replace(left(ExitCode.RESUME), at=NOW - timedelta(minutes=2))
    dead = an_array(
        element(0, left(ExitCode.DONE)),
        element(1, earliest),
        element(2, early),
        element(3, left(ExitCode.CRASHED)),
    )
    seen = situation(dead, observations=job(JobState.ENDED, exit_code="1:0"))
    assert advance(ORDER, seen) == (Quote(attempt=dead, word=of(2, early)),)
    quoted = replace(dead, exit=of(2, early))
    assert advance(ORDER, replace(seen, attempts=(quoted,))) == (Gather(attempt=quoted),)


def test_an_array_whose_elements_only_vanished_is_judged_without_a_word() -> None:
    vanished = an_array(element(0, left(ExitCode.DONE)), element(1))
    seen = situation(vanished, observations=job(JobState.ENDED, exit_code="0:9"))
    assert advance(ORDER, seen) == (Gather(attempt=vanished),)


def test_an_array_is_silent_only_while_an_element_that_spoke_has_not_left() -> None:
    silent = {1: Watch(silent_s=61.0)}
    beats = tuple(replace(BEAT, element=number) for number in (0, 1))
    speaking = an_array(element(0, left(ExitCode.DONE)), element(1), heartbeats=beats)
    seen = situation(speaking, observations=job(JobState.RUNNING), watches=silent)
    assert isinstance(only(advance(ORDER, seen)), CancelJob)
    starting = an_array(element(0, left(ExitCode.DONE)), element(1), heartbeats=beats[:1])
    seen = replace(seen, attempts=(starting,))
    assert isinstance(only(advance(ORDER, seen)), Wait)


def test_an_array_whose_next_elements_wait_for_nodes_is_not_silent() -> None:
    array = an_array(element(0, left(ExitCode.DONE)))
    watch = Watch(silent_s=30.0)
    for state, silent_s in ((JobState.RUNNING, 35.0), (JobState.PENDING, 0.0)):
        (seen,) = job(state).values()
        after = watch.after(5.0, before=array, attempt=array, observation=seen)
        assert after.silent_s == silent_s
