"""What was promised by whatever was said or could be seen, and whether it is kept."""

from __future__ import annotations

import math
from typing import Any

from tests.storage.checkpoints.kills.training import reference_loss


class Promises:
    """Hears all events of a run in their order. A promise that is broken is an AssertionError."""

    def __init__(self) -> None:
        self.resumes = 0
        self.last_steps: dict[int, int] = {}
        """By attempt, the step that it has come to; no attempt is in it before it has resumed."""
        self._loading_at: dict[int, float] = {}
        self._reported: list[tuple[float, int]] = []

    def hear(self, event: dict[str, Any]) -> None:
        kind, attempt = event["kind"], event["attempt"]
        if kind == "loading":
            self._loading_at.setdefault(attempt, event["at"])
        elif kind == "resumed":
            self._hear_resume(event, attempt=attempt, step=event["step"])
        elif kind == "loss":
            assert event["step"] == self.last_steps[attempt] + 1, f"a step was left out: {event}"
            assert event["loss"] == reference_loss(event["step"]), f"the loss is another: {event}"
            self.last_steps[attempt] = event["step"]
        elif kind == "outcome" and event["result"] == "committed":
            self.see(attempt=attempt, step=event["step"], at=event["at"])

    def see(self, *, attempt: int, step: int, at: float) -> None:
        """A commit, at this time: of an attempt without a successor, since a zombie's is inert."""
        later = (since for other, since in self._loading_at.items() if other > attempt)
        if not any(since < at for since in later):
            self._reported.append((at, step))

    def newest(self, *, before: float = math.inf) -> int:
        """The step that whoever looks from then on must find, or a later one."""
        return max((step for at, step in self._reported if at < before), default=0)

    def _hear_resume(self, event: dict[str, Any], *, attempt: int, step: int) -> None:
        assert not event["faults"], f"attempt {attempt} resumed into another state: {event}"
        newest = self.newest(before=self._loading_at[attempt])
        assert step >= newest, f"{event}, and a commit of step {newest} was reported before"
        if attempt not in self.last_steps:
            self.last_steps[attempt] = step
            self.resumes += step > 0
