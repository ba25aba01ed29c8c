"""What an engine has of its own: its name, its clock, its luck and its patience."""

from __future__ import annotations

import getpass
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from storage.records import new_nonce
from tasks.memory import Memory
from tasks.situation import Patience


class Clock(Protocol):
    """Time, as an engine sees and spends it."""

    def now(self) -> datetime: ...

    def monotonic(self) -> float:
        """Seconds of a clock that is never set."""
        ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """This host's clocks."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def user_at_host() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One process that carries out a run. Any number of them may do so at once.

    It leaves where it would have to wait beyond `leaves_at_s` of its clock's `monotonic`.
    """

    user: str = field(default_factory=getpass.getuser)
    name: str = field(default_factory=lambda: f"{user_at_host()}:{os.getpid()}")
    clock: Clock = field(default_factory=SystemClock)
    nonce: Callable[[], str] = new_nonce
    patience: Patience = field(default_factory=Patience)
    memory: Memory = field(default_factory=Memory)
    leaves_at_s: float = math.inf
