"""Runs Slurm's commands with a deadline; `slurm.answers` reads what they print.

A command that stays silent or fails is an error with its own words in it; it never becomes a
statement about a job.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from storage.errors import SlurmError, SpecError

TIMEOUT_S = 60.0
_NO_WORD = "slurmctld is down, unreachable or overloaded"

_PASSED_ON = frozenset(
    {
        "AWS_CA_BUNDLE",
        "AWS_CONFIG_FILE",
        "AWS_PROFILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "BASH_ENV",
        "BASH_FUNC_ml%%",
        "BASH_FUNC_module%%",
        "HOME",
        "LANG",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "PATH",
        "SHELL",
        "SLURM_CONF",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TZ",
        "USER",
    }
)
_PASSED_ON_PREFIXES = ("LC_", "LMOD_", "MODULE")


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """What a command answered. A negative `returncode` is the signal that ended it."""

    command: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str

    @property
    def failed(self) -> bool:
        """squeue before 25.05 ends with 0, and lists nothing, where it cannot look its user up."""
        return self.returncode != 0 or "error: Invalid user" in self.stderr


class CommandFailed(SlurmError):
    """A command answered with an error."""

    def __init__(self, result: CommandResult) -> None:
        words = (result.stderr or result.stdout).strip() or "it said nothing"
        super().__init__(f"`{shlex.join(result.command)}` ended with {result.returncode}: {words}")
        self.result = result


class CommandTimedOut(SlurmError):
    """A command did not answer in time and was killed."""


class CommandMissing(SlurmError):
    """There is no such command on this host."""


class Commands(Protocol):
    """The way to Slurm's command line."""

    def run(self, command: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> CommandResult:
        """Run to the end, whatever the exit code.

        Raises:
            CommandMissing: it could not be started.
            CommandTimedOut: it was killed at the deadline.
        """
        ...


def command_environment(
    environ: Mapping[str, str], *, slurm_conf: Path | None = None
) -> dict[str, str]:
    """What Slurm's commands, and through sbatch the jobs, see of the caller's environment.

    An allow-list, because sbatch ships the environment to the controller, which may store it: no
    credential gets there. `SLURM_*` and `SBATCH_*` of an allocation that the caller itself runs in
    would change what is asked for.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }
    if slurm_conf is not None:
        kept["SLURM_CONF"] = str(slurm_conf)
    return kept


class SystemCommands:
    """Slurm's commands as this host has them."""

    def __init__(
        self, *, slurm_conf: Path | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._named_environment = command_environment(environ, slurm_conf=slurm_conf)
        self._config_field = "SLURM_CONF" if slurm_conf is None else "cluster.slurm_conf"

    @cached_property
    def _environment(self) -> dict[str, str]:
        """Slurm retries a configuration that cannot be read for a minute, in silence.

        So it is read before the first command; a job's script can be shown without it.

        Raises:
            SpecError: it cannot be read.
        """
        named = self._named_environment.get("SLURM_CONF")
        if named is not None:
            try:
                with Path(named).open("rb"):
                    pass
            except OSError as error:
                field = self._config_field
                raise SpecError(
                    f"{field} {named!r} cannot be read: {error.strerror}; correct the path, or "
                    f"leave {field} out where the site's own slurm.conf serves"
                ) from None
        return self._named_environment

    def run(self, command: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> CommandResult:
        """As in `Commands`; a SpecError where the named configuration cannot be read."""
        environment = self._environment
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                check=False,
                encoding="utf-8",
                env=environment,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=timeout_s,
            )
        except FileNotFoundError:
            raise CommandMissing(
                f"there is no command {command[0]!r} on this host; install Slurm's client commands "
                "(Debian: slurm-client), put them on PATH, or use `cluster.kind: local`"
            ) from None
        except subprocess.TimeoutExpired as expired:
            said = (expired.stderr or b"").decode(errors="replace").strip()
            raise CommandTimedOut(
                f"`{shlex.join(command)}` did not answer within {timeout_s:g} s; "
                + (f"it had said: {said}" if said else _NO_WORD)
            ) from None
        return CommandResult(
            command=tuple(command),
            returncode=done.returncode,
            stdout=done.stdout,
            stderr=done.stderr,
        )


def run_checked(commands: Commands, command: Sequence[str]) -> str:
    """What a command prints.

    Raises:
        SlurmError: it failed, timed out or does not exist.
    """
    result = commands.run(command)
    if result.failed:
        raise CommandFailed(result)
    return result.stdout
