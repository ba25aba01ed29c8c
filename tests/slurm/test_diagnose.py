"""The table of diagnoses, row by row: evidence as it was seen, and the cause it must name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.cluster import JobObservation, JobState, NodeState, StepRecord
from slurm.diagnose import diagnose, is_settled, refusal
from slurm.evidence import Evidence
from slurm.log_evidence import LogPart
from slurm.tracebacks import TRACEBACK, logged_root, root_of, same_root
from storage.records import Cancel, CommitRef, Exit, ExitCode, Heartbeat, Kind, Resume, Start
from tests.slurm.attempts import NONCE, NOW, an_attempt, an_exit, beat

OWNER = 1000
UP = NodeState(name="n1", raw_state="idle", responds=True, idle=True)
DOWN = NodeState(name="n2", raw_state="down*", responds=False, idle=False, reason="Not responding")
BOTH_UP = {"n1": UP, "n2": replace(UP, name="n2")}
N2_DOWN = {"n1": UP, "n2": DOWN}

PEER = """Traceback (most recent call last):
  File "trainer/loop.py", line 80, in step
    loss.backward()
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer \
[10.99.0.12]:39218"""
TIMED_OUT = """Traceback (most recent call last):
  File "trainer/loop.py", line 80, in step
RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv"""
TYPE_ERROR = """Traceback (most recent call last):
  File "trainer/model.py", line 3, in forward
    return self.layer(x, y)
TypeError: forward() takes 2 positional arguments but 3 were given"""
SHAPES = """Traceback (most recent call last):
  File "trainer/model.py", line 3, in forward
RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x16 and 32x8)"""
ODD = """Traceback (most recent call last):
  File "trainer/loop.py", line 80, in step
RuntimeError: something strange at 0x7f00aa"""


def job(
    raw_state: str = "FAILED", exit_code: str = "1:0", steps: Mapping[str, tuple[str, str]] = {}
) -> JobObservation:
    return JobObservation(
        token="r-train-1",
        state=JobState.ENDED,
        job_id="7",
        raw_state=raw_state,
        exit_code=exit_code,
        nodes=("n1", "n2"),
        steps=tuple(
            StepRecord(name=name, state=state, exit_code=code)
            for name, (state, code) in steps.items()
        ),
    )


def batch(text: str) -> LogPart:
    return LogPart(name="batch.log", text=text)


def of_rank(rank: int, text: str) -> LogPart:
    node = f"n{rank + 1}"
    return LogPart(name=f"rank {rank} on {node}", text=text, rank=rank, node=node)


def seen(
    exit: Exit | None = None,
    job: JobObservation | None = None,
    nodes: Mapping[str, NodeState] = BOTH_UP,
    beats: tuple[Heartbeat, ...] = (),
    **more: Any,
) -> Evidence:
    attempt_records = {
        name: more.pop(name) for name in ("start", "cancel", "resume") if name in more
    }
    attempt = an_attempt(exit=exit, heartbeats=beats, **attempt_records)
    return Evidence(attempt=attempt, job=job, node_states=nodes, now=NOW, uid=OWNER, **more)


HELD = "launch failed requeued held"
DRAINED = NodeState(
    name="n2", raw_state="draining", responds=True, idle=False, reason="gpu0 Xid 79: off the bus"
)
LOST_N2 = an_exit(88, "peer n2 fell silent", blamed_nodes=("n2",))


def with_memory(job: JobObservation, *, asked: str, held: str) -> JobObservation:
    steps = tuple(replace(step, max_rss=held) for step in job.steps)
    return replace(job, memory_asked=asked, steps=steps)


def traceback(root: str) -> str:
    return f'{TRACEBACK}:\n  File "x.py", line 3, in f\n    f()\n{root}'


VOID = Start(job=None, nonce=NONCE, at=NOW)
BY_LOOP = Cancel(who="headrace", why="it is over", nonce=NONCE, at=NOW)
BY_PERSON = Cancel(who="ann", why="wrong spec", nonce=NONCE, at=NOW)
CUT = (beat("n1", age_s=1, step=40), beat("n2", age_s=17, step=38))
EVEN = (beat("n1", age_s=1, step=40), beat("n2", age_s=3, step=40))
AHEAD = (beat("n1", step=41), beat("n2", step=40))

TABLE: dict[str, tuple[Evidence, Kind, tuple[str, ...], str]] = {
    "done": (seen(an_exit(0), job("COMPLETED", "0:0")), Kind.DONE, (), ""),
    "done, though its job was cancelled afterwards": (
        seen(an_exit(0), job("CANCELLED by 1000", "0:0"), cancel=BY_LOOP),
        Kind.DONE,
        (),
        "",
    ),
    "a node failed": (
        seen(job=job("NODE_FAIL", "1:0"), nodes=N2_DOWN),
        Kind.HARDWARE,
        ("n2",),
        "the job ended NODE_FAIL",
    ),
    "a node failed and is back, but its heartbeat had stopped": (
        seen(job=job("NODE_FAIL", "1:0"), beats=CUT),
        Kind.HARDWARE,
        ("n2",),
        "the job ended NODE_FAIL",
    ),
    "survivors of a dead node": (
        seen(an_exit(1, PEER), job(), N2_DOWN),
        Kind.HARDWARE,
        ("n2",),
        "Connection closed by peer",
    ),
    "survivors of a dead node, while srun still hangs": (
        seen(an_exit(1, PEER), replace(job("RUNNING", ""), state=JobState.RUNNING), N2_DOWN),
        Kind.HARDWARE,
        ("n2",),
        "Connection closed by peer",
    ),
    "a node that only its heartbeat gives away": (
        seen(an_exit(1, PEER), job(), beats=CUT),
        Kind.NETWORK,
        ("n2",),
        "Connection closed by peer",
    ),
    "a peer lost, and nobody to blame": (
        seen(an_exit(1, PEER), job(), beats=EVEN),
        Kind.NETWORK,
        (),
        "rank 0 on n1: RuntimeError",
    ),
    "a collective timed out, and nobody to blame": (
        seen(an_exit(1, TIMED_OUT), job(), beats=EVEN),
        Kind.CASCADE,
        (),
        "Timed out waiting",
    ),
    "a collective timed out because a node is gone": (
        seen(an_exit(1, TIMED_OUT), job(), beats=CUT),
        Kind.NETWORK,
        ("n2",),
        "Timed out waiting",
    ),
    "a peer lost because another rank ran out of memory": (
        seen(
            an_exit(1, PEER),
            job(),
            logs=(of_rank(1, "torch.OutOfMemoryError: CUDA out of memory."),),
        ),
        Kind.MEMORY,
        (),
        "CUDA out of memory",
    ),
    "a node of another job is down": (
        seen(an_exit(1, PEER), job(), {**BOTH_UP, "n3": replace(DOWN, name="n3")}),
        Kind.NETWORK,
        (),
        "Connection closed by peer",
    ),
    "srun lost a node": (
        seen(an_exit(1, "srun: error: Node failure on n2", rank=None), job(), N2_DOWN),
        Kind.HARDWARE,
        ("n2",),
        "Node failure on n2",
    ),
    "nothing was said and a node is down": (
        seen(job=job("FAILED", "1:0"), nodes=N2_DOWN),
        Kind.HARDWARE,
        ("n2",),
        "node n2: down* Not responding",
    ),
    "a job's own clear word over what Slurm saw": (
        seen(an_exit(82, "document 7"), job("NODE_FAIL", "1:0"), N2_DOWN),
        Kind.DATA,
        (),
        "document 7",
    ),
    "out of memory by Slurm": (
        seen(job=job("OUT_OF_MEMORY", "0:125")),
        Kind.MEMORY,
        (),
        "the job ended OUT_OF_MEMORY",
    ),
    "out of memory that only the step tells": (
        seen(
            job=job("FAILED", "1:0", {"batch": ("FAILED", "1:0"), "0": ("OUT_OF_MEMORY", "0:125")})
        ),
        Kind.MEMORY,
        (),
        "step 0 ended OUT_OF_MEMORY",
    ),
    "out of memory, with what was asked for and used": (
        seen(
            an_exit(137, "rank 1 ended with SIGKILL"),
            with_memory(
                job("FAILED", "1:0", {"0": ("OUT_OF_MEMORY", "0:125")}), asked="4G", held="4021456K"
            ),
        ),
        Kind.MEMORY,
        (),
        "step 0 ended OUT_OF_MEMORY; asked for 4G of memory; a task of step 0 held 3.8 GiB",
    ),
    "out of memory that only the worst step's code tells": (
        seen(job=replace(job("FAILED", "1:0"), derived_exit_code="0:125")),
        Kind.MEMORY,
        (),
        "0:125",
    ),
    "our code that only the worst step's code tells": (
        seen(job=replace(job("FAILED", "0:9"), derived_exit_code="80:0")),
        Kind.NUMERIC,
        (),
        "DIVERGED",
    ),
    "a peer fell silent and Slurm has not noticed": (
        seen(LOST_N2, replace(job("RUNNING", ""), state=JobState.RUNNING)),
        Kind.NETWORK,
        ("n2",),
        "peer n2 fell silent",
    ),
    "a peer fell silent and its node is down": (
        seen(LOST_N2, job(), N2_DOWN),
        Kind.HARDWARE,
        ("n2",),
        "peer n2 fell silent",
    ),
    "a peer fell silent because its rank had run out of memory": (
        seen(LOST_N2, job(), logs=(of_rank(1, "torch.OutOfMemoryError: CUDA out of memory."),)),
        Kind.MEMORY,
        (),
        "rank 1 on n2: torch.OutOfMemoryError",
    ),
    "a peer that is cut off reaches no store, which is no cause": (
        seen(LOST_N2, job(), logs=(of_rank(1, "StoreError: no answer for 60 s"),)),
        Kind.NETWORK,
        ("n2",),
        "peer n2 fell silent",
    ),
    "a blamed node of another job is not blamed": (
        seen(an_exit(88, "peer n9 fell silent", blamed_nodes=("n9",)), job()),
        Kind.NETWORK,
        (),
        "peer n9",
    ),
    "a hang that the job itself pins on a node": (
        seen(an_exit(83, "no step", blamed_nodes=("n1",)), beats=AHEAD),
        Kind.HANG,
        ("n1",),
        "no step",
    ),
    "a node that the site drained for its GPU": (
        seen(an_exit(1, ODD), job(), {"n1": UP, "n2": DRAINED}),
        Kind.HARDWARE,
        ("n2",),
        "draining gpu0 Xid 79",
    ),
    "a GPU that wants a reset": (
        seen(an_exit(1, "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus")),
        Kind.HARDWARE,
        ("n1",),
        "Xid",
    ),
    "a number like an Xid's in an address is none": (
        seen(an_exit(1, "NVRM: Xid (PCI:0000:48:00): 13, pid=7, Graphics SM Warp Exception")),
        Kind.UNKNOWN,
        (),
        "Xid",
    ),
    "a peer was lost, and before it a rank had a bug": (
        seen(an_exit(1, PEER), job(), logs=(of_rank(1, traceback("TypeError: f() takes 2")),)),
        Kind.CODE,
        (),
        "rank 1 on n2: TypeError: f() takes 2",
    ),
    "a rank that left on purpose is no cause": (
        seen(an_exit(1, PEER), job(), logs=(of_rank(1, traceback("storage.job.JobExit: resume")),)),
        Kind.NETWORK,
        (),
        "Connection closed by peer",
    ),
    "the earliest of several errors": (
        seen(
            an_exit(1, TIMED_OUT),
            job(),
            beats=EVEN,
            logs=(
                of_rank(0, "2026-03-01 11:59:57 No space left on device"),
                of_rank(1, "2026-03-01 11:59:51,207 CUDA out of memory"),
            ),
        ),
        Kind.MEMORY,
        (),
        "rank 1 on n2: 2026-03-01 11:59:51,207 CUDA out of memory",
    ),
    "a broken GPU in another rank's log": (
        seen(an_exit(1, PEER), job(), logs=(of_rank(1, "CUDA error: uncorrectable ECC error"),)),
        Kind.HARDWARE,
        ("n2",),
        "rank 1 on n2",
    ),
    "S3 answers with 503": (
        seen(an_exit(1, "ClientError: An error occurred (503) when calling PutObject")),
        Kind.STORAGE,
        (),
        "503",
    ),
    "a store that refuses connections is no peer": (
        seen(an_exit(1, "HTTPConnectionPool(host='s3', port=9000): Connection refused")),
        Kind.STORAGE,
        (),
        "HTTPConnectionPool",
    ),
    "held because it could not be launched": (
        seen(job=replace(job("PENDING", ""), state=JobState.PENDING, reason=HELD), start=None),
        Kind.OUTPUT,
        ("n1",),
        HELD,
    ),
    "a job that crashed and then lingered until its time was up": (
        seen(an_exit(1, ODD), job("TIMEOUT", "0:0"), beats=EVEN),
        Kind.UNKNOWN,
        (),
        "something strange",
    ),
    "cancelled by nobody knows whom": (
        seen(an_exit(75, "told by SIGTERM"), job("CANCELLED", "0:15")),
        Kind.OPERATOR,
        (),
        "somebody whom Slurm does not name",
    ),
    "out of memory by our code": (seen(an_exit(84, "MemoryError")), Kind.MEMORY, (), "MemoryError"),
    "time limit": (seen(job=job("TIMEOUT", "0:0")), Kind.TIME, (), "TIMEOUT"),
    "left in time to be resumed": (seen(an_exit(75, "told by SIGUSR2")), Kind.TIME, (), "SIGUSR2"),
    "left to be resumed because preempted": (
        seen(an_exit(75, "told by SIGTERM"), job("PREEMPTED", "0:15")),
        Kind.PREEMPTED,
        (),
        "PREEMPTED",
    ),
    "cancelled by its owner": (
        seen(an_exit(75, "told by SIGTERM"), job("CANCELLED by 1000", "0:15")),
        Kind.OPERATOR,
        (),
        "cancelled by its owner",
    ),
    "cancelled by an administrator": (
        seen(job=job("CANCELLED by 0", "0:15")),
        Kind.SITE,
        (),
        "user id 0",
    ),
    "cancelled by a person through Headrace": (
        seen(an_exit(75, "told"), job("CANCELLED by 1000", "0:15"), cancel=BY_PERSON),
        Kind.OPERATOR,
        (),
        "cancelled by ann: wrong spec",
    ),
    "cancelled by the loop when survivors had left": (
        seen(an_exit(1, PEER), job("CANCELLED by 1000", "0:15"), N2_DOWN, cancel=BY_LOOP),
        Kind.HARDWARE,
        ("n2",),
        "Connection closed by peer",
    ),
    "no log could be written": (
        seen(job=job("FAILED", "0:53"), start=None),
        Kind.OUTPUT,
        ("n1",),
        "0:53",
    ),
    "the store failed": (seen(an_exit(86, "StoreError: silent")), Kind.STORAGE, (), "silent"),
    "the disk is full": (
        seen(an_exit(1, "Traceback (most recent call last):\nOSError: No space left on device")),
        Kind.STORAGE,
        (),
        "No space left on device",
    ),
    "a setup line failed": (
        seen(
            job=job("FAILED", "81:0"),
            start=VOID,
            logs=(batch("headrace: cluster.setup line 1 failed: module load x"),),
        ),
        Kind.CODE,
        (),
        "cluster.setup line 1 failed",
    ),
    "a bug before the first step": (seen(an_exit(1, TYPE_ERROR)), Kind.CODE, (), "TypeError"),
    "shapes that do not fit": (seen(an_exit(1, SHAPES)), Kind.CODE, (), "mat1 and mat2"),
    "a bug after steps were done may be the data's": (
        seen(an_exit(1, TYPE_ERROR), beats=EVEN),
        Kind.UNKNOWN,
        (),
        "TypeError",
    ),
    "bad data": (seen(an_exit(82, "document 7")), Kind.DATA, (), "document 7"),
    "no valid checkpoint": (seen(an_exit(87, "none of 3 commits")), Kind.DATA, (), "none of 3"),
    "diverged": (seen(an_exit(80, "loss is nan")), Kind.NUMERIC, (), "loss is nan"),
    "hang of one node": (seen(an_exit(83, "no step"), beats=AHEAD), Kind.HANG, ("n2",), "no step"),
    "hang of nobody in particular": (seen(an_exit(83, "no step"), beats=EVEN), Kind.HANG, (), ""),
    "a hang because a node is down": (
        seen(an_exit(83, "no step"), None, N2_DOWN),
        Kind.HARDWARE,
        ("n2",),
        "no step",
    ),
    "a hang because a node was cut off": (
        seen(an_exit(83, "no step"), beats=CUT),
        Kind.NETWORK,
        ("n2",),
        "no step",
    ),
    "fenced": (seen(job=job("FAILED", "85:0")), Kind.FENCED, (), ""),
    "void": (seen(start=VOID), Kind.LOST, (), "no job of this attempt"),
    "gone from the queue": (
        seen(job=JobObservation(token="t", state=JobState.ABSENT, raw_state="RUNNING")),
        Kind.LOST,
        (),
        "accounting says RUNNING",
    ),
    "killed alone": (
        seen(an_exit(137, "rank 1 ended with SIGKILL")),
        Kind.UNKNOWN,
        (),
        "nobody signs a SIGKILL",
    ),
    "a command that was killed": (
        seen(an_exit(1, "`torchrun x.py` left with SIGKILL\nstep 3"), beats=EVEN),
        Kind.UNKNOWN,
        (),
        "nobody signs a SIGKILL",
    ),
    "killed without a word": (seen(job=job("FAILED", "0:9")), Kind.UNKNOWN, (), "by SIGKILL"),
    "an odd error": (seen(an_exit(1, ODD)), Kind.UNKNOWN, (), "something strange"),
    "failed without a word": (
        seen(job=job(), logs=(batch("last line"),)),
        Kind.UNKNOWN,
        (),
        "the job ended FAILED 1:0, and no exit record",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str) -> None:
    evidence, kind, culprits, words = TABLE[name]
    found = diagnose(evidence)
    assert (found.kind, found.culprit_nodes) == (kind, culprits), found
    assert words in "\n".join(found.evidence)


def test_a_job_that_tells_of_no_steps_may_have_done_many_after_a_while() -> None:
    silent = seen(an_exit(1, TYPE_ERROR), beats=(beat("n1"), beat("n2")))
    assert diagnose(silent).kind is Kind.UNKNOWN
    assert silent.attempt.start is not None
    young = replace(silent.attempt.start, at=NOW - timedelta(minutes=2))
    early = replace(silent, attempt=replace(silent.attempt, start=young))
    assert diagnose(early).kind is Kind.CODE


def test_evidence_keeps_what_logs_and_slurm_will_have_forgotten() -> None:
    told = seen(
        an_exit(137, "rank 1 ended with SIGKILL", rank=1, node="n2"),
        with_memory(job("FAILED", "137:0", {"0": ("FAILED", "137:0")}), asked="4G", held="2G"),
        {"n1": UP, "n2": replace(UP, name="n2", reason="was slow")},
        beats=EVEN,
        logs=(
            batch("headrace: job 7 on n1\nslurmstepd: odd\nheadrace: leaving with 1"),
            of_rank(1, "step 40\n\nlast words"),
        ),
    )
    lines = diagnose(told).evidence
    for line in (
        "job 7 ended FAILED, exit code 137:0, step 0 FAILED 137:0",
        "exit record: code 137 by rank 1 on n2",
        "last step told: 40",
        "node n2: idle was slow",
        "batch.log: slurmstepd: odd",
        "rank 1 on n2: last words",
    ):
        assert line in lines, lines
    assert not any("leaving with" in line for line in lines)
    assert any(line.startswith("memory: asked for 4G") for line in lines)


def test_an_attempt_resumed_at_a_step_has_done_none_before_it_moves() -> None:
    resume = Resume(
        source=CommitRef(step=40, attempt=1, save="s"), world_size=2, nonce=NONCE, at=NOW
    )
    evidence = seen(an_exit(1, TYPE_ERROR), beats=EVEN, resume=resume)
    assert diagnose(evidence).kind is Kind.CODE


exits = st.one_of(
    st.none(),
    st.builds(
        an_exit,
        st.sampled_from([*ExitCode, 137, 143, 2]),
        st.sampled_from(["", PEER, TYPE_ERROR, ODD, "x"]) | st.text(),
        rank=st.none() | st.integers(0, 3),
    ),
)
states = ["FAILED", "COMPLETED", "NODE_FAIL", "CANCELLED by 0", "TIMEOUT", "", "WHAT"]
jobs = st.none() | st.builds(job, st.sampled_from(states), st.sampled_from(["0:0", "", "0:53"]))


@given(exits, jobs, st.sampled_from([BOTH_UP, N2_DOWN, {}]), st.sampled_from([CUT, EVEN, ()]))
def test_whatever_was_seen_there_is_a_diagnosis_and_only_its_own_nodes_are_blamed(
    word: Exit | None,
    of_slurm: JobObservation | None,
    nodes: Mapping[str, NodeState],
    beats: tuple[Heartbeat, ...],
) -> None:
    evidence = seen(word, of_slurm, nodes, beats)
    found = diagnose(evidence)
    assert set(found.culprit_nodes) < {"n1", "n2"}
    assert (found.kind is Kind.DONE) == (word is not None and word.code == 0)
    later = replace(evidence, now=NOW + timedelta(hours=1))
    assert is_settled(later)


def test_a_lost_peer_is_not_judged_before_slurm_can_have_seen_a_dead_node() -> None:
    fresh = seen(an_exit(1, PEER, at=NOW - timedelta(seconds=5)), job())
    assert not is_settled(fresh, settle_s=40)
    assert is_settled(replace(fresh, node_states=N2_DOWN), settle_s=40)
    assert is_settled(replace(fresh, now=NOW + timedelta(seconds=40)), settle_s=40)


def test_a_node_failure_waits_for_its_node_to_be_named() -> None:
    fresh = seen(job=job("NODE_FAIL", "1:0"), beats=(beat("n1", age_s=1), beat("n2", age_s=2)))
    assert not is_settled(fresh)
    assert is_settled(replace(fresh, node_states=N2_DOWN))


def test_an_end_without_a_word_waits_for_accounting() -> None:
    beats = (beat("n1", age_s=1),)
    assert not is_settled(seen(job=job("FAILED", ""), beats=beats))
    assert is_settled(seen(job=job("FAILED", "1:0"), beats=beats))


def test_a_kill_waits_for_accounting_which_may_know_of_an_overrun() -> None:
    killed = seen(an_exit(137, "rank 1 ended with SIGKILL"), job("FAILED", ""))
    assert not is_settled(killed)
    assert is_settled(replace(killed, job=job("FAILED", "137:0")))


def test_a_cancel_waits_for_accounting_which_knows_by_whom() -> None:
    unnamed = seen(an_exit(75, "told by SIGTERM"), job("CANCELLED", ""))
    assert not is_settled(unnamed)
    assert is_settled(replace(unnamed, job=job("CANCELLED by 0", "0:15")))


def test_a_peer_that_is_named_is_settled_at_once() -> None:
    assert is_settled(seen(LOST_N2, replace(job("RUNNING", ""), state=JobState.RUNNING)))


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.BAD_CONFIG, ExitCode.DIVERGED])
def test_a_clear_last_word_is_judged_at_once(code: ExitCode) -> None:
    assert is_settled(seen(an_exit(code, "clear"), job("FAILED", "")))


POLICY = (
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit "
    "limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account", Kind.CODE),
        ("sbatch: error: invalid partition specified: nowhere", Kind.CODE),
        ("sbatch: error: Requested time limit is invalid (exceeds some limit)", Kind.CODE),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", Kind.SITE),
        (f"sbatch: error: AssocMaxSubmitJobLimit\n{POLICY}", Kind.SITE),
        (f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{POLICY}", Kind.CODE),
        ("sbatch: error: Slurm temporarily unable to accept job", Kind.SITE),
        ("sbatch: error: Required node not available (down, drained or reserved)", Kind.SITE),
    ],
)
def test_a_refusal_is_the_specs_fault_unless_it_may_pass(words: str, kind: Kind) -> None:
    found = refusal(words)
    assert found.kind is kind
    assert words in found.evidence[0]


def test_the_root_of_a_traceback_is_its_last_error() -> None:
    chained = f"{TYPE_ERROR}\n\nThe above exception was the direct cause of:\n\n{ODD}"
    assert root_of(chained) == "RuntimeError: something strange at 0x7f00aa"
    assert root_of("plain words\nmore") == "plain words"
    assert root_of("") == ""


def test_the_root_of_a_logged_traceback_is_found_whatever_follows_it() -> None:
    logged = f"step 3\n{traceback('KeyError: 7')}\nheadrace: leaving with 1"
    assert logged_root(logged) == "KeyError: 7"
    labelled = "\n".join(f"[rank3]: {line}" for line in traceback("KeyError: 7").splitlines())
    assert logged_root(f"{labelled}\nafterwards") == "KeyError: 7"
    assert logged_root("no traceback") == logged_root(f"{TRACEBACK}:\n  cut off") == ""


def test_the_same_error_elsewhere_in_memory_is_the_same() -> None:
    again = an_exit(1, ODD.replace("0x7f00aa", "0x55beef"))
    assert same_root(an_exit(1, ODD), again)
    assert not same_root(an_exit(1, ODD), an_exit(1, TYPE_ERROR))
    assert not same_root(an_exit(1, ""), an_exit(1, ""))
