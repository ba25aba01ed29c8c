"""What Slurm says of a user's jobs: the queue for the living, accounting for those that left.

The queue is asked for all jobs at once, and shared with the user's other engines. Accounting is
asked once about all jobs that have left since, and at growing distances about those of which it has
yet to hear. Where there is none, or none that answers, the controller's own memory serves: squeue
shows an ended job for some minutes, `scontrol show job` its exit code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm.answers import (
    accounting_by_ids,
    accounting_by_names,
    job_command,
    job_state,
    parse_accounting,
    parse_job,
    parse_queue,
)
from slurm.cluster import JobObservation, JobState
from slurm.commands import CommandFailed, Commands
from slurm.shared_queue import SHORTEST_S, SharedQueue, boot_clock_s
from storage.errors import SlurmError

LONGEST_S = 30.0
LAG_S = 4.0
"""Accounting that answers may be behind for so long, before the controller is asked."""
ACCOUNTING_TIMEOUT_S = 20.0
_MOST_CHARACTERS = 100_000

_NO_ACCOUNTING = re.compile(r"accounting storage is disabled", re.IGNORECASE)
_UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)


@dataclass(kw_only=True)
class _Trace:
    """What this process remembers of a token's job.

    `end` is the best that was said of its end, by accounting or by the controller; it `is_settled`
    when accounting has told it whole. Until then accounting is asked again, at growing distances.
    """

    job_id: str | None = None
    end: JobObservation | None = None
    is_settled: bool = False
    is_from_controller: bool = False
    said: str = ""
    due_at_s: float = 0.0
    distance_s: float = SHORTEST_S

    def learn(self, answer: JobObservation | None, *, from_accounting: bool, at_s: float) -> None:
        if answer is not None and answer.state in {JobState.ENDED, JobState.UNKNOWN}:
            self.is_settled = from_accounting and _is_whole(answer)
            if self.is_settled or not self.is_from_controller:
                self.end, self.job_id = answer, answer.job_id
                self.is_from_controller = not from_accounting
        elif answer is not None:
            self.said = answer.raw_state
        self.due_at_s = at_s + self.distance_s
        self.distance_s = min(LONGEST_S, 2 * self.distance_s)


class Watch:
    """Asks Slurm about jobs by their tokens, and remembers what need not be asked again."""

    def __init__(
        self,
        commands: Commands,
        *,
        folder: Path | None = None,
        clock: Callable[[], float] = boot_clock_s,
    ) -> None:
        self._commands = commands
        self._queue = SharedQueue(commands, folder=folder, clock=clock)
        self._clock = clock
        self._first_asked_at_s: dict[str, float] = {}
        self._fresh_from_s = float("-inf")
        self._looked_at_s: float | None = None
        self._traces: dict[str, _Trace] = {}
        self._silence = ""
        self._num_silences = 0
        self._accounting_due_at_s = 0.0

    def look_anew(self) -> None:
        """What the queue showed before now does not count any more: sbatch was called."""
        self._fresh_from_s = self._clock()

    def observe(self, tokens: Sequence[str]) -> Mapping[str, JobObservation]:
        """What is known of each token, as of the caller's last look or later.

        A token that the queue does not hold but accounting calls alive is `ABSENT`, with
        accounting's word as `raw_state`: only the queue can say that a job lives. It is `ABSENT`,
        too, where accounting says nothing; `accounting_silence` has the reason.
        """
        if not tokens:
            return {}
        queue = self._look(tokens)
        for token in tokens:
            self._note(token, queue.get(token))
        self._follow_up([token for token in tokens if not _is_alive(queue.get(token))])
        return {token: self._join(token, queue.get(token)) for token in tokens}

    def _look(self, tokens: Sequence[str]) -> dict[str, JobObservation]:
        """The queue, not older than this engine's own distance between two looks.

        It is younger than the first question about any of the tokens: what was not in the queue
        before its sbatch is not absent.
        """
        now_s = self._clock()
        asked = (self._first_asked_at_s.setdefault(token, now_s) for token in tokens)
        not_before_s = max(self._fresh_from_s, *asked)
        distance_s = 0.0 if self._looked_at_s is None else now_s - self._looked_at_s
        try:
            page = self._queue.read(
                max_age_s=min(LONGEST_S, max(SHORTEST_S, distance_s)), not_before_s=not_before_s
            )
        finally:
            self._looked_at_s = self._clock()
        return parse_queue(page.text or "", names=frozenset(tokens))

    def _note(self, token: str, queued: JobObservation | None) -> None:
        """A job that the queue shows, and that is not the one remembered, begins anew."""
        trace = self._traces.get(token)
        if trace is None or (
            queued is not None and (_is_alive(queued) or queued.job_id != trace.job_id)
        ):
            self._traces[token] = _Trace(job_id=queued.job_id if queued is not None else None)

    def _follow_up(self, left: Sequence[str]) -> None:
        """Ask how those ended that left the queue; all at once when the first of them is due."""
        lagging = {one: self._traces[one] for one in left if not self._traces[one].is_settled}
        now_s = self._clock()
        if all(trace.due_at_s > now_s for trace in lagging.values()):
            return
        accounts = self._accounts(lagging) if now_s >= self._accounting_due_at_s else None
        for token, trace in lagging.items():
            answer = None if accounts is None else accounts.get(token)
            from_accounting = answer is not None
            is_behind = accounts is None or trace.distance_s >= LAG_S
            if answer is None and trace.end is None and is_behind:
                answer = self._ask_controller(token, trace.job_id)
            trace.learn(answer, from_accounting=from_accounting, at_s=self._clock())

    def _accounts(self, traces: Mapping[str, _Trace]) -> dict[str, JobObservation] | None:
        """What accounting says, by ids where they are known; None while it says nothing."""
        ids = [trace.job_id for trace in traces.values() if trace.job_id is not None]
        names = [token for token, trace in traces.items() if trace.job_id is None]
        uid = os.getuid()
        commands = [
            *(accounting_by_ids(uid=uid, job_ids=some) for some in _bounded(ids)),
            *(accounting_by_names(uid=uid, names=some) for some in _bounded(names)),
        ]
        found: dict[str, JobObservation] = {}
        try:
            for command in commands:
                found |= parse_accounting(self._run(command, timeout_s=ACCOUNTING_TIMEOUT_S))
        except SlurmError as error:
            is_kept = not _NO_ACCOUNTING.search(str(error))
            self._silence = str(error) if is_kept else ""
            self._num_silences += 1
            delay_s = min(LONGEST_S, 2.0 ** min(self._num_silences - 1, 10))
            self._accounting_due_at_s = self._clock() + delay_s
            return None
        self._silence, self._num_silences = "", 0
        return found

    def _ask_controller(self, token: str, job_id: str | None) -> JobObservation | None:
        """The controller's own memory of a job, which lasts for `MinJobAge` after its end."""
        if job_id is None:
            return None
        try:
            text = self._run(job_command(job_id), timeout_s=ACCOUNTING_TIMEOUT_S)
        except CommandFailed as error:
            if _UNKNOWN_JOB.search(str(error)):
                return None
            raise
        return parse_job(text, token=token)

    def _run(self, command: Sequence[str], *, timeout_s: float) -> str:
        result = self._commands.run(command, timeout_s=timeout_s)
        if result.failed:
            raise CommandFailed(result)
        return result.stdout

    def _join(self, token: str, queued: JobObservation | None) -> JobObservation:
        if queued is not None and _is_alive(queued):
            return queued
        trace = self._traces[token]
        silence = self._silence
        if trace.end is not None:
            reason = trace.end.reason if queued is None else queued.reason
            return replace(trace.end, reason=reason, accounting_silence=silence)
        if queued is not None:
            return replace(queued, accounting_silence=silence)
        return JobObservation(
            token=token,
            state=JobState.ABSENT,
            raw_state=trace.said,
            reason=f"accounting is silent: {silence}" if silence else "",
            accounting_silence=silence,
        )


def _is_alive(queued: JobObservation | None) -> bool:
    return queued is not None and queued.state is not JobState.ENDED


def _is_whole(answer: JobObservation) -> bool:
    """Whether accounting has heard all of the end: the job's code, and that of each step.

    What it was told late, after an outage of its own, it has bit by bit: first the job's state.
    """
    states = [answer.state, *(job_state(step.state) for step in answer.steps)]
    lacks_code = answer.raw_state == "FAILED" and answer.exit_code == "0:0"
    lacks_steps = bool(answer.nodes) and not answer.steps
    return all(one is JobState.ENDED for one in states) and not lacks_code and not lacks_steps


def _bounded(items: Iterable[str]) -> Iterator[list[str]]:
    """The items in as many lists as keep each command line within what a kernel takes."""
    some: list[str] = []
    num_characters = 0
    for item in items:
        if some and num_characters + len(item) >= _MOST_CHARACTERS:
            yield some
            some, num_characters = [], 0
        some.append(item)
        num_characters += len(item) + 1
    if some:
        yield some
