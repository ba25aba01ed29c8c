"""What may be seen of an attempt that is over, for the tests of what is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slurm.cluster import JobObservation, JobState, NodeState, StepRecord
from slurm.evidence import Evidence
from slurm.log_evidence import LogPart
from slurm.tracebacks import TRACEBACK
from storage.records import Cancel, Exit, Heartbeat, Start
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
