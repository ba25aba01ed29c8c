"""What happens to a process of a job, and when: at a line of its own code, or at a time.

Lines are found by a trace function, so the product has no hook for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import storage.checkpoints

FOLDERS = (Path(storage.checkpoints.__path__[0]).resolve(),)
ROOT = FOLDERS[0].parents[1]
JITTER = {"rank": (0.25, 0.06), "flusher": (0.02, 0.02)}
"""How many of all lines are preceded by a sleep, and how long it is at most, in seconds: a rank's
threads have few lines, and a flusher looks every 50 ms."""
DISK_FILES = ("/disk.py", "/nearest.py")
"""Lines that no process comes to where there is no disk tier."""
FILES = (ROOT / "storage/object_store.py", ROOT / "storage/ledger.py")


@dataclass(frozen=True, order=True)
class Site:
    """A line of the product that a process of this role comes to, so many times in a round."""

    role: str
    file: str
    line: int
    times: int


class Deed(StrEnum):
    """What is done to a process."""

    KILL = "kill"
    PAUSE = "pause"
    """Stopped, and continued soon after."""
    ZOMBIE = "zombie"
    """Stopped and given up for lost: its successor starts, and then it is continued."""
    TWIN = "twin"
    """Of a flusher: stopped, and another one started beside it."""
    NODE = "node"
    """All processes of the attempt are killed with it, so nothing is left to flush."""
    DELAY = "delay"
    """The one thread sleeps."""
    JITTER = "jitter"
    """Each of its threads sleeps a little at some of all lines."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`incarnation` counts the processes of a role: a flusher that was killed is started again."""

    role: str
    deed: Deed
    incarnation: int = 0
    site: Site | None = None
    nth: int = 1
    since: str = "start"
    after_s: float = 0.0
    lasts_s: float = 0.0
    wakes: str = ""

    @property
    def is_within(self) -> bool:
        """Whether the process does it to itself, not the round to the process."""
        return self.site is not None or self.deed is Deed.JITTER

    def __str__(self) -> str:
        if self.deed is Deed.JITTER:
            return f"{self.deed} {self.role}"
        where = (
            f"{self.after_s:.3f} s after {self.since}"
            if self.site is None
            else f"at {self.site.file}:{self.site.line} the {self.nth}. time"
        )
        again = f" ({self.incarnation + 1}.)" if self.incarnation else ""
        wakes = f", continued at {self.wakes}" if self.wakes else ""
        return f"{self.deed} {self.role}{again} {where}{wakes}"


class Tracer:
    """Calls `at` before each line of the protocol's files, with how often it was come to."""

    def __init__(self, at: Callable[[str, int, int], None]) -> None:
        self._at = at
        self._counts: Counter[tuple[str, int]] = Counter()
        self._names: dict[str, str | None] = {}

    def install(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _name(self, path: str) -> str | None:
        if path not in self._names:
            file = Path(path)
            ours = file.parent in FOLDERS or file in FILES
            self._names[path] = str(file.relative_to(ROOT)) if ours else None
        return self._names[path]

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        return None if self._name(frame.f_code.co_filename) is None else self._trace

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            name = self._name(frame.f_code.co_filename)
            assert name is not None
            place = (name, frame.f_lineno)
            self._counts[place] += 1
            self._at(name, frame.f_lineno, self._counts[place])
        return self._trace


def install(fault: Fault, signals: Mapping[Deed, int], met: Callable[[], None]) -> None:
    """Has this process meet the fault at its line, or all along."""
    if fault.deed is Deed.JITTER:
        met()
        random = Random(f"jitter {fault}")
        chance, most_s = JITTER[fault.role[:-1]]
        Tracer(lambda *_: _sleep_a_little(random, chance, most_s)).install()
        return
    site = fault.site
    assert site is not None

    def at(file: str, line: int, nth: int) -> None:
        if (file, line, nth) == (site.file, site.line, fault.nth):
            met()
            if fault.deed is Deed.DELAY:
                time.sleep(fault.lasts_s)
            else:
                os.kill(os.getpid(), signals[fault.deed])

    Tracer(at).install()


def _sleep_a_little(random: Random, chance: float, most_s: float) -> None:
    """Threads beside the main one: what they are late with is what races are about."""
    if threading.current_thread() is not threading.main_thread() and random.random() < chance:
        time.sleep(random.uniform(0.0, most_s))


def choose_site(random: Random, sites: tuple[Site, ...], role: str) -> Site:
    """A module first, the writing ones more often, and then a line, the busy ones more often."""
    own = [site for site in sites if site.role == role]
    weights = {site.file: 0.5 for site in own}
    for name in ("staging", "buffers", "flush", "commit", "flusher", "disk"):
        weights |= {file: 3.0 for file in weights if file.endswith(f"/{name}.py")}
    files = sorted(weights)
    file = random.choices(files, [weights[one] for one in files])[0]
    lines = [site for site in own if site.file == file]
    return random.choices(lines, [min(site.times, 8) for site in lines])[0]
