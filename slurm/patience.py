"""Commands that may be repeated are, when Slurm was only short of an answer.

A controller that is busy, or restarted, leaves a question unanswered for seconds; asked again it
answers, and nobody has to hear of it. Longer silence is the caller's to wait out and to tell, as
Slurm's own commands have tried for some 5 s before they say that they cannot reach it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from tenacity import RetryError, Retrying, retry_if_result, stop_after_attempt
from tenacity.stop import stop_before_delay
from tenacity.wait import wait_random_exponential

from slurm.commands import TIMEOUT_S, CommandResult, Commands

TRIES = 3
TOTAL_S = 15.0
LONGEST_WAIT_S = 4.0

NO_ANSWER = re.compile(
    r"unable to contact slurm controller|socket timed out|communication|connection|"
    r"transport endpoint|zero bytes|timed out|unexpected message|protocol authentication",
    re.IGNORECASE,
)
"""Slurm's words where nobody knows whether a request arrived."""

_PASSING = re.compile(
    r"unable to contact slurm controller|socket timed out|communication connection failure|"
    r"transport endpoint|zero bytes",
    re.IGNORECASE,
)
"""Of these, the words that a busy or restarting controller leaves behind."""

_ONCE = frozenset({"sbatch"})


class PatientCommands:
    """Repeats what reads or is idempotent (squeue, sacct, sinfo, scontrol show, scancel).

    sbatch never: a request that got no answer may still be carried out. A command that was killed
    at its deadline is not repeated either, as it has waited long enough.
    """

    def __init__(self, commands: Commands, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._commands = commands
        self._sleep = sleep

    def run(self, command: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> CommandResult:
        """As in `Commands`; what the last try answered."""
        if command[0] in _ONCE:
            return self._commands.run(command, timeout_s=timeout_s)
        tries = Retrying(
            retry=retry_if_result(_is_silence),
            sleep=self._sleep,
            stop=stop_after_attempt(TRIES) | stop_before_delay(TOTAL_S),
            wait=wait_random_exponential(multiplier=0.5, max=LONGEST_WAIT_S),
        )
        try:
            return tries(self._commands.run, command, timeout_s=timeout_s)
        except RetryError as given_up:
            last: CommandResult = given_up.last_attempt.result()
            return last


def _is_silence(result: CommandResult) -> bool:
    return result.returncode != 0 and _PASSING.search(result.stderr) is not None
