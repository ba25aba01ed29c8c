"""What holds of diagnosis and policy whatever happens: random evidence, random histories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm.cluster import JobObservation, JobState, NodeState, StepRecord
from slurm.diagnose import MAX_LINES, diagnose, is_settled
from slurm.diagnosis.facts import LINE_CHARACTERS
from slurm.evidence import Evidence
from slurm.log_evidence import LogPart
from slurm.policy import BUDGETS, decide
from slurm.spec import RetrySpec
from storage.attempts import Attempt
from storage.checkpoint_records import CommitRef, Resume
from storage.records import Action, Cancel, Decision, Diagnosis, End, Exit, ExitCode, Kind, Start
from tests.slurm.attempts import NONCE, NOW, an_attempt, an_exit, beat, commit

NODES = ("n1", "n2", "n3", "n4", "n5", "n6")
FREE = (Kind.PREEMPTED, Kind.LOST, Kind.LIMIT, Kind.FENCED)
NEVER_AGAIN = frozenset({Kind.CODE, Kind.DATA, Kind.MEMORY})
BUG = "Traceback (most recent call last):\nRuntimeError: odd at 0x{:x}"


@dataclass(frozen=True)
class Ending:
    """How one attempt of a random history ends, and whether it got on."""

    kind: Kind
    gained: bool
    culprits: tuple[str, ...]
    bug: int | None


@dataclass(frozen=True)
class Past:
    """One judged attempt of a history that was lived through."""

    ending: Ending
    attempt: Attempt
    decision: Decision


endings = st.builds(
    Ending,
    kind=st.sampled_from([kind for kind in Kind if kind is not Kind.DONE]),
    gained=st.sampled_from([False, False, False, True]),
    culprits=st.lists(st.sampled_from(NODES), max_size=2, unique=True).map(tuple),
    bug=st.none() | st.integers(0, 1),
)
budgets = st.builds(
    RetrySpec,
    hardware=st.integers(0, 4),
    network=st.integers(0, 4),
    storage=st.integers(0, 4),
    site=st.integers(0, 4),
    hang=st.integers(0, 4),
    unknown=st.integers(0, 4),
    backoff_s=st.sampled_from([0.0, 1.0, 60.0]),
    backoff_max_s=st.sampled_from([0.0, 30.0, 600.0]),
)
histories = st.lists(endings, min_size=1, max_size=24)


def live(endings: Sequence[Ending], retry: RetrySpec, *, seed: int = 1) -> list[Past]:
    """Attempt after attempt, as the loop makes them, until a decision ends it or all have ended."""
    lived: list[Past] = []
    step: int | None = None
    for number, ending in enumerate(endings, start=1):
        attempt = an_attempt(number, floor=step)
        if ending.bug is not None:
            attempt = replace(attempt, exit=an_exit(1, BUG.format(ending.bug * 7 + 4096)))
            # Addresses are noise, so two bugs are told apart by their words.
            word = attempt.exit
            assert word is not None
            named = word.error.replace("odd", "odd" if ending.bug else "even")
            attempt = replace(attempt, exit=replace(word, error=named))
        if ending.gained:
            step = (step or 0) + 10
        diagnosis = Diagnosis(kind=ending.kind, culprit_nodes=ending.culprits)
        decision = decide(
            diagnosis,
            attempt=attempt,
            history=[one.attempt for one in lived],
            retry=retry,
            seed=seed,
            newest=None if step is None else commit(step),
        )
        end = End(diagnosis=diagnosis, decision=decision, by="e", nonce=NONCE, at=NOW)
        lived.append(Past(ending, replace(attempt, end=end), decision))
        if decision.action in {Action.GIVE_UP, Action.STOP}:
            break
    return lived


def since_progress(lived: Sequence[Past]) -> list[list[Past]]:
    """The history cut before each attempt that got on."""
    parts: list[list[Past]] = [[]]
    for one in lived:
        if one.ending.gained:
            parts.append([])
        parts[-1].append(one)
    return parts


@given(histories, budgets)
def test_a_mistake_is_never_tried_again_and_a_stop_is_a_stop(
    endings: list[Ending], retry: RetrySpec
) -> None:
    for one in live(endings, retry):
        if one.ending.kind in NEVER_AGAIN:
            assert one.decision.action is Action.GIVE_UP
        if one.ending.kind is Kind.OPERATOR:
            assert one.decision.action is Action.STOP


buggy = st.builds(
    Ending,
    kind=st.sampled_from([Kind.UNKNOWN, Kind.UNKNOWN, Kind.PREEMPTED, Kind.STORAGE]),
    gained=st.sampled_from([False, False, True]),
    culprits=st.just(()),
    bug=st.none() | st.integers(0, 1),
)


@given(st.lists(buggy, min_size=1, max_size=12), budgets)
def test_the_same_bug_is_tried_twice_at_most_without_progress(
    endings: list[Ending], retry: RetrySpec
) -> None:
    for part in since_progress(live(endings, retry)):
        unknown = [one for one in part if one.ending.kind is Kind.UNKNOWN]
        seen: set[int] = set()
        for one in unknown:
            if one.ending.bug in seen:
                assert one.decision.action is Action.GIVE_UP
            if one.ending.bug is not None:
                seen.add(one.ending.bug)


@given(histories, budgets)
def test_a_budget_is_never_exceeded_between_two_progresses(
    endings: list[Ending], retry: RetrySpec
) -> None:
    for part in since_progress(live(endings, retry)):
        used: Counter[str] = Counter()
        for one in part:
            kind = one.ending.kind
            if kind not in BUDGETS or (kind is Kind.TIME and one.ending.gained):
                continue
            name = BUDGETS[kind]
            used[name] += 1
            if used[name] > getattr(retry, name):
                assert one.decision.action is Action.GIVE_UP, (name, used)


@given(histories, budgets)
def test_nothing_is_given_up_below_its_budget(endings: list[Ending], retry: RetrySpec) -> None:
    *before, last = live(endings, retry)
    if last.decision.action is not Action.GIVE_UP or "retry." not in last.decision.reason:
        return
    name = BUDGETS[last.ending.kind]
    (part,) = since_progress([*before, last])[-1:]
    ends = [
        one
        for one in part
        if BUDGETS.get(one.ending.kind) == name
        and not (one.ending.kind is Kind.TIME and one.ending.gained)
    ]
    assert len(ends) == getattr(retry, name) + 1


@given(st.lists(st.sampled_from(FREE), min_size=40, max_size=40), budgets)
def test_what_costs_nothing_never_ends_a_run(kinds: list[Kind], retry: RetrySpec) -> None:
    free = [Ending(kind, gained=False, culprits=(), bug=None) for kind in kinds]
    lived = live(free, retry)
    assert len(lived) == len(kinds)
    assert {one.decision.action for one in lived} == {Action.RESUME}


@given(histories, budgets)
def test_a_delay_keeps_to_its_bounds_and_only_those_who_are_blamed_are_excluded(
    endings: list[Ending], retry: RetrySpec
) -> None:
    for one in live(endings, retry):
        assert 0 <= one.decision.delay_s <= retry.backoff_max_s
        assert set(one.decision.exclude_nodes) <= set(one.ending.culprits)
        assert one.decision.reason


@given(histories, budgets, st.integers(0, 2**63))
def test_two_engines_decide_the_same(endings: list[Ending], retry: RetrySpec, seed: int) -> None:
    one, other = (live(endings, retry, seed=seed) for _ in range(2))
    assert [past.decision for past in one] == [past.decision for past in other]


TEXTS = [
    "",
    "Traceback (most recent call last):\n  File 'x', line 1\nValueError: bad",
    "Traceback (most recent call last):",
    "RuntimeError: Connection closed by peer",
    "Watchdog caught collective operation timeout",
    "2026-03-01 11:59:58 CUDA out of memory",
    "2026-02-30 99:99:99 No space left on device",
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1",
    "srun: error: n2: task 1: Killed",
    "headrace: leaving with 1",
    "x" * 3000,
]
texts = st.sampled_from(TEXTS) | st.text(max_size=40)
names = st.sampled_from([*NODES, "elsewhere", ""])
codes = st.sampled_from(["", "0:0", "1:0", "0:9", "0:15", "0:53", "0:125", "75:0", "88:0", "x"])
raw_states = st.sampled_from(
    [
        "",
        "FAILED",
        "COMPLETED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "TIMEOUT",
        "PREEMPTED",
        "CANCELLED",
        "CANCELLED by 0",
        "CANCELLED by 1000",
        "PENDING",
        "RUNNING",
        "WHAT",
    ]
)
steps = st.builds(
    StepRecord,
    name=st.sampled_from(["batch", "0", "extern"]),
    state=raw_states,
    exit_code=codes,
    max_rss=st.sampled_from(["", "0", "3021456K", "2.5G", "odd"]),
)
jobs = st.none() | st.builds(
    JobObservation,
    token=st.just("r-train-1"),
    state=st.sampled_from(JobState),
    job_id=st.none() | st.just("7"),
    raw_state=raw_states,
    reason=st.sampled_from(["", "launch failed requeued held", "Priority"]),
    exit_code=codes,
    derived_exit_code=codes,
    memory_asked=st.sampled_from(["", "64G"]),
    nodes=st.lists(st.sampled_from(NODES), max_size=3, unique=True).map(tuple),
    steps=st.lists(steps, max_size=2).map(tuple),
)
exits = st.none() | st.builds(
    an_exit,
    st.sampled_from([*ExitCode, 2, 124, 137, 143, 255, -9]),
    texts,
    rank=st.none() | st.integers(0, 3),
    node=names,
    blamed_nodes=st.lists(names, max_size=2).map(tuple),
)
logs = st.lists(
    st.builds(LogPart, name=texts, text=texts, rank=st.none() | st.integers(0, 3), node=names),
    max_size=4,
).map(tuple)
states = st.dictionaries(
    names,
    st.builds(
        NodeState,
        name=names,
        raw_state=st.sampled_from(["idle", "down*", "drained"]),
        responds=st.booleans(),
        idle=st.booleans(),
        reason=st.sampled_from(["", "Not responding", "gpu Xid 79", "Node unexpectedly rebooted"]),
    ),
    max_size=3,
)
beats = st.lists(
    st.builds(
        beat,
        names,
        age_s=st.integers(0, 3000).map(float),
        step=st.none() | st.integers(0, 90),
    ),
    max_size=3,
).map(tuple)
starts = st.sampled_from(
    [None, Start(job=None, nonce=NONCE, at=NOW), an_attempt().start, an_attempt().start]
)
cancels = st.sampled_from(
    [
        None,
        None,
        Cancel(who="headrace", why="over", nonce=NONCE, at=NOW),
        Cancel(who="ann", why="no", nonce=NONCE, at=NOW),
    ]
)
resumes = st.sampled_from(
    [
        None,
        Resume(source=None, world_size=2, nonce=NONCE, at=NOW),
        Resume(source=CommitRef(step=40, attempt=1, save="s"), world_size=2, nonce=NONCE, at=NOW),
    ]
)


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    attempt = an_attempt(
        exit=draw(exits),
        start=draw(starts),
        cancel=draw(cancels),
        resume=draw(resumes),
        heartbeats=draw(beats),
    )
    return Evidence(
        attempt=attempt,
        job=draw(jobs),
        node_states=draw(states),
        logs=draw(logs),
        now=NOW + timedelta(seconds=draw(st.integers(0, 90))),
        uid=draw(st.sampled_from([None, 0, 1000])),
    )


@settings(max_examples=300)
@given(evidences())
def test_whatever_was_seen_is_explained_in_lines_that_a_record_holds(evidence: Evidence) -> None:
    found = diagnose(evidence)
    assert isinstance(is_settled(evidence), bool)
    assert bool(found.evidence) == (found.kind is not Kind.DONE)
    assert len(found.evidence) <= MAX_LINES
    assert all(0 < len(line) <= LINE_CHARACTERS for line in found.evidence)
    assert set(found.culprit_nodes) <= set(evidence.nodes)


@settings(max_examples=300)
@given(evidences())
def test_a_job_that_says_it_is_done_is_and_no_other(evidence: Evidence) -> None:
    word: Exit | None = evidence.attempt.exit
    is_done = word is not None and word.code == ExitCode.DONE
    assert (diagnose(evidence).kind is Kind.DONE) == is_done


@settings(max_examples=300)
@given(evidences())
def test_evidence_is_settled_once_it_has_been_waited_for(evidence: Evidence) -> None:
    assert is_settled(replace(evidence, now=evidence.ended_at + timedelta(seconds=40)))
