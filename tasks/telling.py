"""Turns what changed between two looks into what the eyes are told, each thing once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slurm.cluster import JobObservation, JobState
from slurm.job_logs import element_folder
from slurm.pending import Outlook, PendingReason, explain
from storage.attempts import Attempt
from storage.records import ExitCode
from tasks.eyes import Eyes
from tasks.rank_log import LogFollower


class Teller:
    """Remembers, for each attempt that was open when first seen, what was told of it already."""

    def __init__(self, eyes: Eyes, folder: Callable[[Attempt], Path]) -> None:
        self._eyes = eyes
        self._folder = folder
        self._logs: dict[int, LogFollower | None] = {}
        self._states: dict[int, tuple[str, str]] = {}
        self._steps: dict[int, int] = {}
        self._reasons: set[tuple[int, str]] = set()
        self._elements: set[tuple[int, int]] = set()
        self._sizes: set[int] = set()
        self._resumed: set[int] = set()
        self._accounting_is_silent = False

    def tell(self, attempt: Attempt, observation: JobObservation | None) -> None:
        number = attempt.number
        if number not in self._logs:
            if not attempt.is_open:
                return
            self._logs[number] = None
            self._eyes.attempt_opened(attempt)
            self._eyes.attempt_log(attempt, (f"logs: {self._folder(attempt)}",))
        if observation is not None:
            self._tell_state(attempt, observation)
        self._tell_size(attempt)
        self._tell_step_back(attempt)
        self._tell_progress(attempt)
        self._tell_elements(attempt)
        log = self._logs[number] = self._logs[number] or self._log_of(attempt)
        if log is None:
            return
        lines = log.new_lines() if attempt.is_open else log.last_lines()
        if lines:
            self._eyes.attempt_log(attempt, lines)

    def tell_end(self, attempt: Attempt) -> None:
        """The last of an attempt that has an end; nothing where it was never told of."""
        if attempt.number in self._logs:
            self.tell(attempt, None)
            self._eyes.attempt_closed(attempt)

    def _log_of(self, attempt: Attempt) -> LogFollower | None:
        """Rank 0's, which is on the first of the nodes that the job said it has; of an array, that
        of the element that came first."""
        if attempt.start is None or not attempt.start.nodes:
            return None
        folder = element_folder(self._folder(attempt), attempt.start.element)
        return LogFollower(folder, node=attempt.start.nodes[0], rank=0)

    def _tell_state(self, attempt: Attempt, observation: JobObservation) -> None:
        reason = observation.reason
        if observation.state is JobState.PENDING and reason:
            explained = explain(reason)
            self._tell_reason(attempt, explained)
            reason = str(explained)
        self._tell_silence(observation)
        where = f"on {', '.join(observation.nodes)}" if observation.nodes else ""
        job = f"job {observation.job_id}" if observation.job_id is not None else ""
        words = (job, observation.raw_state, reason, where)
        state = (observation.state.value, " ".join(word for word in words if word))
        if self._states.get(attempt.number) != state:
            self._states[attempt.number] = state
            self._eyes.attempt_state(attempt, state=state[0], detail=state[1])

    def _tell_reason(self, attempt: Attempt, reason: PendingReason) -> None:
        """What may need a person is said aloud, once for each reason."""
        told = (attempt.number, reason.name)
        if reason.outlook is not Outlook.WAIT and told not in self._reasons:
            self._reasons.add(told)
            self._eyes.say(f"attempt {attempt.number} waits: {reason}")

    def _tell_silence(self, observation: JobObservation) -> None:
        """That accounting is away, and that it is back. It is asked only about ended jobs."""
        silence = observation.accounting_silence
        if silence and not self._accounting_is_silent:
            self._accounting_is_silent = True
            self._eyes.say(
                "Slurm's accounting does not answer, so ends are told by the jobs and the "
                f"controller: {silence}"
            )
        elif not silence and self._accounting_is_silent and observation.state is JobState.ENDED:
            self._accounting_is_silent = False
            self._eyes.say("Slurm's accounting answers again")

    def _tell_size(self, attempt: Attempt) -> None:
        """That it had to start with fewer nodes than it takes."""
        most, got = attempt.intent.most_nodes, len(attempt.nodes)
        if most is None or not 0 < got < most or attempt.number in self._sizes:
            return
        self._sizes.add(attempt.number)
        self._eyes.say(
            f"attempt {attempt.number} takes up to {most} nodes, and Slurm had {got} for it at its "
            "start"
        )

    def _tell_step_back(self, attempt: Attempt) -> None:
        """That it could not go on from the newest checkpoint, and why."""
        resume = attempt.resume
        if resume is None or not resume.passed or attempt.number in self._resumed:
            return
        self._resumed.add(attempt.number)
        where = "the beginning" if resume.source is None else f"step {resume.source.step}"
        for reason in resume.passed:
            self._eyes.say(
                f"attempt {attempt.number} goes on from {where}, stepping back from {reason}"
            )

    def _tell_progress(self, attempt: Attempt) -> None:
        now = attempt.progress
        if now is not None and self._steps.get(attempt.number) != now.step:
            self._steps[attempt.number] = now.step
            self._eyes.attempt_progress(attempt, step=now.step, numbers=now.numbers)

    def _tell_elements(self, attempt: Attempt) -> None:
        """That one has failed, though others may go on for hours."""
        for one in attempt.elements:
            told = (attempt.number, one.number)
            if one.exit is None or one.exit.code == ExitCode.DONE or told in self._elements:
                continue
            self._elements.add(told)
            self._eyes.say(
                f"element {one.number} of attempt {attempt.number} has left {one.exit.node} with "
                f"code {one.exit.code}"
            )
