"""A run as its records tell it, for tests that watch one from outside."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from flows.loading import load_spec
from flows.opening import open_ledger
from storage.attempts import Attempt
from storage.records import Stage
from tests.e2e.conftest import Site

T = TypeVar("T")


def wait_for(what: str, look: Callable[[], T | None], *, timeout_s: float = 240) -> T:
    """The first thing that `look` finds; fails with `what` when it finds nothing in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.5)
    raise AssertionError(f"waited {timeout_s:.0f} s in vain for {what}")


class Run:
    """The ledger of the run that a spec names, read as anybody may."""

    def __init__(self, site: Site, spec: Path) -> None:
        loaded = load_spec(spec, environ=site.environ, base=site.folder)
        self.spec = loaded
        self._opening = open_ledger(loaded)
        _, self.ledger = self._opening.__enter__()

    def close(self) -> None:
        self._opening.__exit__(None, None, None)

    def attempts(self, stage: Stage) -> tuple[Attempt, ...]:
        return self.ledger.attempts(stage)

    def training_step(self, attempt: int) -> int:
        """The step that the attempt's heartbeats have come to; 0 before the first."""
        beats = self.ledger.heartbeats(Stage.TRAIN, attempt)
        return max((beat.step or 0 for beat in beats), default=0)

    def commits(self) -> list[str]:
        return [info.key for info in self.ledger.store.list(self.ledger.keys.commits)]

    def losses(self, attempt: int) -> dict[int, float]:
        """Training loss by step, from the metrics that the attempt put into the store."""
        body = self.ledger.store.get(self.ledger.keys.metrics(Stage.TRAIN, attempt))
        rows = [json.loads(line) for line in body.decode().splitlines()]
        return {row["step"]: row["loss"] for row in rows if row.get("loss") is not None}
