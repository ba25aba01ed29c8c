"""What Slurm says of a user's jobs: the queue for the living, accounting for those that left."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from slurm.answers import (
    accounting_command,
    parse_accounting,
    parse_queue,
    queue_command,
)
from slurm.cluster import JobObservation, JobState
from slurm.commands import (
    CommandFailed,
    Commands,
    run_checked,
)
from storage.errors import SlurmError

_NO_ACCOUNTING = re.compile(r"accounting storage is disabled", re.IGNORECASE)


class Watch:
    """Asks Slurm about jobs by their tokens."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    def observe(self, tokens: Sequence[str]) -> Mapping[str, JobObservation]:
        """What is known of each token.

        A token that the queue does not hold but accounting calls alive is `ABSENT`, with
        accounting's word as `raw_state`: only the queue can say that a job lives.
        """
        if not tokens:
            return {}
        queue = parse_queue(run_checked(self._commands, queue_command(uid=os.getuid())))
        left = [
            token for token in tokens if token not in queue or queue[token].state is JobState.ENDED
        ]
        try:
            accounts = self._accounts(left)
            silence = None
        except SlurmError as error:
            accounts, silence = {}, str(error)
        return {
            token: _join(token, queue.get(token), accounts.get(token), silence=silence)
            for token in tokens
        }

    def _accounts(self, tokens: Sequence[str]) -> dict[str, JobObservation]:
        if not tokens:
            return {}
        try:
            text = run_checked(self._commands, accounting_command(uid=os.getuid(), tokens=tokens))
        except CommandFailed as error:
            if _NO_ACCOUNTING.search(error.result.stderr + error.result.stdout):
                return {}
            raise
        return parse_accounting(text)


def _join(
    token: str,
    queued: JobObservation | None,
    accounted: JobObservation | None,
    *,
    silence: str | None,
) -> JobObservation:
    if queued is not None and queued.state is not JobState.ENDED:
        return queued
    if accounted is not None and accounted.state in {JobState.ENDED, JobState.UNKNOWN}:
        return replace(accounted, reason=queued.reason if queued else "")
    if queued is not None:
        return queued
    if silence is not None:
        return JobObservation(token=token, state=JobState.UNKNOWN, reason=silence)
    if accounted is not None:
        return replace(accounted, state=JobState.ABSENT)
    return JobObservation(token=token, state=JobState.ABSENT)
