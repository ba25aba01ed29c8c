"""Reads the recorded answers, and answers as they did."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm.answers import parse_accounting, parse_job, parse_queue
from slurm.cluster import JobObservation
from slurm.commands import CommandResult

RECORDED = Path(__file__).parent
VERSIONS = ("22.05", "23.11", "24.11", "25.05", "26.05")
UID = 1001


def _blocks(text: str) -> Iterator[CommandResult]:
    """`$ command`, `= exit code`, and `> ` or `! ` before each line of its output or errors."""
    for block in text.removeprefix("$ ").split("\n$ "):
        command, code, *said = block.splitlines()
        yield CommandResult(
            command=tuple(shlex.split(command)),
            returncode=int(code.removeprefix("= ")),
            stdout="".join(f"{line[2:]}\n" for line in said if line.startswith("> ")),
            stderr="".join(f"{line[2:]}\n" for line in said if line.startswith("! ")),
        )


def recorded(version: str, situation: str) -> tuple[CommandResult, ...]:
    """The commands of a situation in their order, with what they answered."""
    path = RECORDED / version / f"{situation}.txt"
    return tuple(_blocks(path.read_text(encoding="utf-8")))


NOT_BROUGHT_ABOUT = {
    ("22.05", "deadline"),
    ("23.11", "deadline"),
    ("24.11", "pending-too-many-cpus"),
    ("24.11", "pending-too-many-nodes"),
}


def everywhere(situations: Iterable[str]) -> list[tuple[str, str]]:
    """The situations in all versions that could be brought into them."""
    pairs = [(version, situation) for situation in situations for version in VERSIONS]
    return [pair for pair in pairs if pair not in NOT_BROUGHT_ABOUT]


@dataclass(frozen=True, kw_only=True)
class Views:
    """One job as the queue, accounting (asked by name and by id) and the controller saw it."""

    job_id: str
    queue: JobObservation
    by_name: JobObservation | None
    by_id: JobObservation | None
    controller: JobObservation | None


def views(version: str, situation: str) -> Views:
    queue, by_name, by_id, controller = recorded(version, situation)
    name = by_name.command[5].removeprefix("--name=")
    job_id = controller.command[-1]
    return Views(
        job_id=job_id,
        queue=parse_queue(queue.stdout)[name],
        by_name=parse_accounting(by_name.stdout).get(name),
        by_id=parse_accounting(by_id.stdout).get(name),
        controller=parse_job(controller.stdout, token=name),
    )


class Replay:
    """Slurm as it was recorded: answers each command as it was answered then, again and again."""

    def __init__(self, version: str, *situations: str) -> None:
        self.answers = {
            result.command: result
            for situation in situations
            for result in recorded(version, situation)
        }
        self.asked: list[tuple[str, ...]] = []

    def run(self, command: Sequence[str], *, timeout_s: float = 0.0) -> CommandResult:
        self.asked.append(tuple(command))
        return self.answers[tuple(command)]
