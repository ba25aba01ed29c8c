"""`headrace tick`: one pass of the loop, for sites where nothing may stay on a login node.

A tick is an engine that leaves where another would wait. What belongs to the request and not to one
process lies in a file of the run's work folder: that a stage is finished, that the run gave up, and
how long was watched. It may be lost, and two ticks may run at once: the ledger holds all else.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from getpass import getuser
from pathlib import Path

from flows.opening import open_run
from flows.reporting import ReportingEyes
from flows.spec import PipelineSpec
from flows.steps import run_stages
from storage.errors import HeadraceError, LedgerError, SlurmError, SpecError, StoreError
from storage.file_locks import FileLock
from storage.records import Stage, StageRecord, decode, encode
from tasks.engine import Engine
from tasks.eyes import Eyes
from tasks.failures import RunCancelled
from tasks.memory import Memory, Sights
from tasks.pauses import Paused

STAY_S = 5.0
OUTAGE_WAIT_S = 60.0


class Standing(StrEnum):
    """Where a request stands after a tick."""

    COMPLETE = "complete"
    GOING_ON = "going on"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is kept between two ticks. `spec` is the digest of what was asked for."""

    spec: str
    asked_at: datetime
    looked: bool = False
    standing: Standing = Standing.GOING_ON
    why: str = ""
    told: str = ""
    past: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cancels: tuple[str, ...] | None = None
    sights: Sights | None = None
    done: tuple[StageRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ticked:
    """What a tick came to. `is_news` says whether the tick before it did not know it already."""

    standing: Standing
    message: str
    is_news: bool


def tick(spec: PipelineSpec, *, eyes: Eyes, again: bool = False, stay_s: float = STAY_S) -> Ticked:
    """Do all that can be done now for the run of `spec`, whose paths are absolute, and leave.

    The tick stays for what comes within `stay_s`, such as the end of a job that has just begun to
    leave. A changed spec is a new request, and so is `again` after an end.

    Raises:
        HeadraceError: nothing could even be looked at, and never could before.
    """
    folder = spec.workdir / spec.run
    file = folder / f"tick.{getuser()}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadraceError(
            f"cannot make the run's folder {str(folder)!r}: {error.strerror}; choose a workdir "
            "that can be written"
        ) from error
    with _alone(file.with_suffix(".lock")) as is_alone:
        if not is_alone:
            return Ticked(
                standing=Standing.GOING_ON, message="another tick is at work", is_news=False
            )
        return _Tick(spec, file, eyes=eyes, again=again, stay_s=stay_s).go()


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether no other tick is at work. Where there are no locks, two do no harm either."""
    with FileLock(path) as lock:
        try:
            is_alone = lock.try_acquire()
        except StoreError:
            is_alone = True
        yield is_alone


class _Tick:
    def __init__(
        self, spec: PipelineSpec, file: Path, *, eyes: Eyes, again: bool, stay_s: float
    ) -> None:
        self._spec = spec
        self._file = file
        self._eyes = eyes
        self._stay_s = stay_s
        digest = hashlib.sha256(spec.model_dump_json(exclude_defaults=True).encode()).hexdigest()[
            :16
        ]
        kept = _read(file)
        is_new = kept is None or kept.spec != digest or (again and _is_over(kept))
        self._request = (
            Request(spec=digest, asked_at=datetime.now(UTC)) if kept is None or is_new else kept
        )
        self._done = {record.stage: record for record in self._request.done}

    def go(self) -> Ticked:
        if _is_over(self._request):
            return self._ended_before()
        engine = Engine(
            memory=Memory(
                past=self._request.past,
                cancels=self._request.cancels,
                sights=self._request.sights,
                changed=self._remember,
            ),
            leaves_at_s=time.monotonic() + self._stay_s,
        )
        try:
            self._work(engine)
        except Paused as pause:
            ticked = self._going_on(str(pause), state=pause.state, wait_s=pause.wait_s)
        except RunCancelled as error:
            ticked = self._end(Standing.CANCELLED, str(error))
        except (StoreError, SlurmError) as error:
            if not self._request.looked:
                raise
            ticked = self._going_on(str(error), state="an outage", wait_s=OUTAGE_WAIT_S)
        except SpecError:
            raise
        except HeadraceError as error:
            ticked = self._end(Standing.FAILED, str(error))
        else:
            ticked = self._end(Standing.COMPLETE, f"run {self._spec.run} is complete")
        self._remember(engine.memory)
        return ticked

    def _work(self, engine: Engine) -> None:
        with open_run(self._spec, eyes=self._eyes, again=self._request.looked) as opened:
            self._request = replace(self._request, looked=True)
            reporting = ReportingEyes(self._eyes, opened)
            context = replace(opened, engine=engine, eyes=reporting)
            try:
                run_stages(context, self._spec, tuple(Stage), done=self._done)
            except Paused:
                raise
            except HeadraceError:
                reporting.report()
                raise

    def _ended_before(self) -> Ticked:
        request = self._request
        again = f"`headrace tick {self._spec.run} --again`"
        match request.standing:
            case Standing.COMPLETE:
                message = f"run {self._spec.run} is complete already; {again} goes through it anew"
            case Standing.CANCELLED:
                message = f"it was cancelled; {again} carries on\n{request.why}"
            case _:
                message = f"it gave up; {again} tries again\n{request.why}"
        return Ticked(standing=request.standing, message=message, is_news=False)

    def _going_on(self, message: str, *, state: str, wait_s: float) -> Ticked:
        is_news = self._request.told != state
        self._request = replace(self._request, told=state)
        look = f"look again in {max(1.0, wait_s):.0f} s"
        return Ticked(standing=Standing.GOING_ON, message=f"{message}; {look}", is_news=is_news)

    def _end(self, standing: Standing, why: str) -> Ticked:
        self._request = replace(self._request, standing=standing, why=why)
        return Ticked(standing=standing, message=why, is_news=True)

    def _remember(self, memory: Memory) -> None:
        self._request = replace(
            self._request,
            past=dict(memory.past),
            cancels=None if memory.cancels is None else tuple(sorted(memory.cancels)),
            sights=memory.sights,
            done=tuple(self._done.values()),
        )
        temporary = self._file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(encode(self._request))
        temporary.replace(self._file)


def _is_over(request: Request) -> bool:
    return request.standing is not Standing.GOING_ON


def _read(file: Path) -> Request | None:
    """What the tick before this one left; what cannot be read was lost, which does no harm."""
    try:
        return decode(Request, file.read_bytes())
    except (OSError, LedgerError):
        return None
