"""The table of diagnoses, row by row: evidence as it was seen, and the cause it must name."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from slurm.cluster import JobObservation, JobState
from slurm.diagnose import diagnose
from slurm.diagnosis.facts import words
from slurm.evidence import Evidence
from storage.checkpoint_records import CommitRef, Resume
from storage.records import Kind
from tests.slurm.attempts import NONCE, NOW, an_exit, beat
from tests.slurm.sights import (
    AHEAD,
    BOTH_UP,
    BY_LOOP,
    BY_PERSON,
    CUT,
    DOWN,
    DRAINED,
    EVEN,
    HELD,
    LOST_N2,
    N2_DOWN,
    ODD,
    PEER,
    SHAPES,
    TIMED_OUT,
    TYPE_ERROR,
    UP,
    VOID,
    batch,
    job,
    of_rank,
    seen,
    traceback,
    with_memory,
)

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
    "left when it was preempted": (
        seen(an_exit(75, "asked to leave by SIGTERM"), job("FAILED", "75:0")),
        Kind.TIME,
        (),
        "it was preempted and left within the grace",
    ),
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


@pytest.mark.parametrize(
    ("rank", "told"), [(0, "rank 0 on n1 lost n2"), (3, "rank 3 on n1: rank 0 on n1 lost n2")]
)
def test_whoever_tells_a_loss_is_named_once(rank: int, told: str) -> None:
    word = an_exit(88, "rank 0 on n1 lost n2", rank=rank, blamed_nodes=("n2",))
    assert diagnose(seen(word, job())).evidence[0] == told


def test_a_command_that_is_ended_by_term_at_its_time_limit_was_not_preempted() -> None:
    word = an_exit(75, "asked to leave by SIGUSR2; the command left with SIGTERM")
    assert not any("preempted" in line for line in diagnose(seen(word, job())).evidence)


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


def test_evidence_that_a_record_does_not_hold_is_seen_to_be_cut() -> None:
    assert words("x" * 500, " short ", "y" * 501) == ("x" * 500, "short", "y" * 499 + "…")


def test_an_attempt_resumed_at_a_step_has_done_none_before_it_moves() -> None:
    resume = Resume(
        source=CommitRef(step=40, attempt=1, save="s"), world_size=2, nonce=NONCE, at=NOW
    )
    evidence = seen(an_exit(1, TYPE_ERROR), beats=EVEN, resume=resume)
    assert diagnose(evidence).kind is Kind.CODE
