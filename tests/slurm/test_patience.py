"""Which commands are asked again, on which words, and how often at most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from slurm.commands import CommandResult, CommandTimedOut
from slurm.patience import LONGEST_WAIT_S, TRIES, PatientCommands

SILENCE = "slurm_load_jobs error: Socket timed out on send/recv operation"


@dataclass
class Told:
    """Commands that answer what they were told beforehand, the last answer for ever."""

    answers: list[CommandResult]
    seen: list[list[str]] = field(default_factory=list)

    def run(self, command: Sequence[str], *, timeout_s: float = 60.0) -> CommandResult:
        self.seen.append(list(command))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return replace(answer, command=tuple(command))


def says(stderr: str = "", *, returncode: int = 1, stdout: str = "") -> CommandResult:
    return CommandResult(command=(), returncode=returncode, stdout=stdout, stderr=stderr)


def ask(command: str, answers: Iterable[CommandResult]) -> tuple[CommandResult, int, list[float]]:
    told, slept = Told(list(answers)), list[float]()
    result = PatientCommands(told, sleep=slept.append).run([command, "x"])
    return result, len(told.seen), slept


GOOD = says(returncode=0, stdout="7|RUNNING")


@pytest.mark.parametrize("command", ["squeue", "sacct", "sinfo", "scontrol", "scancel"])
def test_a_passing_silence_is_asked_again(command: str) -> None:
    result, calls, slept = ask(command, [says(SILENCE), says(SILENCE), GOOD])
    assert (result.stdout, calls) == ("7|RUNNING", 3)
    assert all(0 <= one <= LONGEST_WAIT_S for one in slept)


def test_a_lasting_silence_is_the_answer_after_a_bounded_number_of_tries() -> None:
    result, calls, _ = ask("squeue", [says(SILENCE)])
    assert (result.stderr, calls) == (SILENCE, TRIES)


def test_sbatch_is_called_once_whatever_it_says() -> None:
    _, calls, slept = ask("sbatch", [says(SILENCE), GOOD])
    assert (calls, slept) == (1, [])


@pytest.mark.parametrize(
    "words",
    [
        "slurm_load_jobs error: Invalid job id specified",
        "Slurm accounting storage is disabled",
        # Whoever refuses a connection is not busy: slurmdbd is down, and stays so for long.
        "sacct: error: Sending PersistInit msg: Connection refused",
        "",
    ],
)
def test_an_answer_is_an_answer(words: str) -> None:
    _, calls, _ = ask("sacct", [says(words), GOOD])
    assert calls == 1


def test_a_command_killed_at_its_deadline_has_waited_long_enough() -> None:
    class Silent:
        calls = 0

        def run(self, command: Sequence[str], *, timeout_s: float = 60.0) -> CommandResult:
            self.calls += 1
            raise CommandTimedOut("no answer")

    silent = Silent()
    with pytest.raises(CommandTimedOut):
        PatientCommands(silent).run(["squeue"])
    assert silent.calls == 1
