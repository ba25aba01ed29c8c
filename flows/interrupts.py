"""What a signal means for a run that is watched: no end of its jobs, unless a person says so.

The run is carried out in a thread, so that the main thread, where signals arrive, is the person's:
it asks, and passes on what they want. The loop takes it up between two looks, never in the middle
of a deed. A second interrupt leaves at once.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from enum import Enum
from types import FrameType
from typing import Generic, TypeVar

from flows.watchers import AllEyes

T = TypeVar("T")

LEAVE_PATIENCE_S = 20.0
GOES_ON = "A job that was submitted goes on, and the same command adopts it."
_POLL_S = 0.2
_WORDS = {signal.SIGINT: "Interrupted.", signal.SIGTERM: "Terminated."}


class Answer(Enum):
    """What a person wants who has interrupted the watching."""

    LEAVE = "l"
    CANCEL = "c"
    BACK = "b"


class Wishes(AllEyes):
    """What was asked for from outside; one of the eyes on a run."""

    def __init__(self) -> None:
        super().__init__()
        self._cancel = threading.Event()
        self._leave = threading.Event()
        self.left_by: int | None = None

    def cancel(self) -> None:
        self._cancel.set()

    def leave(self, signum: int) -> None:
        self.left_by = signum
        self._leave.set()

    def cancel_requested(self) -> bool:
        return self._cancel.is_set()

    def leave_requested(self) -> bool:
        return self._leave.is_set()


Ask = Callable[[Callable[[], bool]], Answer | None]
"""Asks until there is an answer, or what it is given says that it is too late for one."""


def attend(
    work: Callable[[], T],
    wishes: Wishes,
    *,
    say: Callable[[str], None],
    ask: Ask | None = None,
    tidy: Callable[[], None] = lambda: None,
    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
) -> T:
    """What `work` returns or raises, while signals become wishes.

    An interrupt asks, where there is somebody to `ask`; any other signal is a wish to leave. Where
    leaving takes too long, or a second interrupt comes, the process is made `tidy` and ends with
    128 + the signal.
    """
    worker = _Worker(work)
    with _caught(signals) as caught:
        worker.start()
        leave_by_s: float | None = None
        while worker.works(_POLL_S):
            if leave_by_s is not None and time.monotonic() > leave_by_s:
                _exit(wishes.left_by or signal.SIGTERM, tidy)
            if not caught:
                continue
            signum = caught.popleft()
            if signum == signal.SIGINT and (wishes.leave_requested() or wishes.cancel_requested()):
                say(GOES_ON)
                _exit(signum, tidy)
            answer: Answer | None = Answer.LEAVE
            if signum == signal.SIGINT and ask is not None:
                answer = ask(lambda: bool(caught) or not worker.works(0.0))
            if answer is Answer.CANCEL:
                wishes.cancel()
            elif answer is Answer.LEAVE:
                say(f"{_WORDS.get(signal.Signals(signum), 'Leaving.')} {GOES_ON}")
                wishes.leave(signum)
                leave_by_s = time.monotonic() + LEAVE_PATIENCE_S
            elif answer is None and caught:
                say(f"{_WORDS[signal.SIGINT]} {GOES_ON}")
                _exit(caught.popleft(), tidy)
    return worker.result()


def ask_at_terminal(until: Callable[[], bool], *, show: Callable[[str], None]) -> Answer | None:
    """The answer of the person at the terminal; None once `until` holds. No terminal any more means
    that nobody watches."""
    question = "\n[l]eave the job running, [c]ancel it, or [b]ack to watching? "
    show(question)
    while not until():
        if not select.select([sys.stdin], [], [], _POLL_S)[0]:
            continue
        line = os.read(sys.stdin.fileno(), 1024).decode(errors="replace")
        if not line:
            return Answer.LEAVE
        try:
            return Answer(line.strip().lower()[:1])
        except ValueError:
            show(question)
    return None


class _Worker(Generic[T]):
    """The work in a thread of its own, seen by the same onlookers."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        context = copy_context()
        self._thread = threading.Thread(
            target=lambda: context.run(self._run), name="run", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def works(self, wait_s: float) -> bool:
        self._thread.join(wait_s)
        return self._thread.is_alive()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error


@contextmanager
def _caught(signals: Sequence[signal.Signals]) -> Iterator[deque[int]]:
    """Collects signals in place of acting on them; ignored ones stay so, as under `nohup`."""
    caught: deque[int] = deque()

    def catch(signum: int, frame: FrameType | None) -> None:
        del frame
        caught.append(signum)

    before = {one: signal.getsignal(one) for one in signals}
    taken = [one for one, handler in before.items() if handler is not signal.SIG_IGN]
    for one in taken:
        signal.signal(one, catch)
    try:
        yield caught
    finally:
        for one in taken:
            signal.signal(one, before[one])


def _exit(signum: int, tidy: Callable[[], None]) -> None:
    """Ends the process now: other threads may wait for what never comes."""
    tidy()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + signum)
