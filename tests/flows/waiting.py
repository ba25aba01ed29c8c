"""Waiting for what happens in another process, without saying how soon it should."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(what: str, look: Callable[[], T], *, timeout_s: float = 60) -> T:
    """The first thing that `look` finds; fails with `what` when it finds nothing in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"waited {timeout_s:.0f} s in vain for {what}")
