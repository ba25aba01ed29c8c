"""What was promised by whatever was said or could be seen, and whether it is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from tests.storage.checkpoints.kills.disks import NearSave
from tests.storage.checkpoints.kills.training import reference_loss

LOOKS = 5


class Promises:
    """Hears all events of a run in their order. A promise that is broken is an AssertionError."""

    def __init__(self, near: Callable[[], Iterable[NearSave]] = tuple) -> None:
        """`near` looks which whole saves stand on the disk tier now."""
        self.resumes = 0
        self.last_steps: dict[int, int] = {}
        """By attempt, the step that it has come to; no attempt is in it before it has resumed."""
        self._near = near
        self._loading_at: dict[int, float] = {}
        self._reported: list[tuple[float, int]] = []
        self._seen_near: dict[NearSave, float] = {}

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
        if self._has_no_successor(attempt, at=at):
            self._reported.append((at, step))

    def see_near(self, saves: Iterable[NearSave], *, at: float) -> None:
        """Saves that stood whole on disk before this time; those of zombies are inert, too."""
        for save in saves:
            if save.ref.attempt in self.last_steps and self._has_no_successor(
                save.ref.attempt, at=at
            ):
                self._seen_near.setdefault(save, at)

    def require_near(self) -> None:
        """Whoever makes room on a disk leaves the newest save that is whole, or what is newer."""
        newest = max((save.ref.step for save in self._seen_near), default=None)
        if newest is None:
            return
        for _ in range(LOOKS):
            # A look takes time, in which one save may go that was seen last and a newer one come.
            if any(save.ref.step >= newest for save in self._near()):
                return
        raise AssertionError(f"step {newest} was whole on disk and is gone, and no newer is there")

    def newest(self, *, before: float = math.inf) -> int:
        """The step that whoever looks from then on must find, or a later one."""
        return max((step for at, step in self._reported if at < before), default=0)

    def _has_no_successor(self, attempt: int, *, at: float) -> bool:
        later = (since for other, since in self._loading_at.items() if other > attempt)
        return not any(since < at for since in later)

    def _hear_resume(self, event: dict[str, Any], *, attempt: int, step: int) -> None:
        assert not event["faults"], f"attempt {attempt} resumed into another state: {event}"
        since = self._loading_at[attempt]
        newest = self.newest(before=since)
        assert step >= newest, f"{event}, and a commit of step {newest} was reported before"
        # A save that still stands has stood all the time: none is ever written again.
        standing = set(self._near())
        for save, at in self._seen_near.items():
            missed = at < since and save.serves(event["world"]) and save.ref.step > step
            assert not missed or save not in standing, f"{event}, and {save} stood there, whole"
        if attempt not in self.last_steps:
            self.last_steps[attempt] = step
            self.resumes += step > 0
            # What this attempt had no use for, its layout being another, is off the lineage now.
            for save in list(self._seen_near):
                if save.ref.attempt < attempt and save.ref.step > step:
                    del self._seen_near[save]
