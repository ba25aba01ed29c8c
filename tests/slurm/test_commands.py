"""Commands are run with a deadline and an environment of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurm.commands import (
    CommandFailed,
    CommandMissing,
    CommandTimedOut,
    SystemCommands,
    command_environment,
    run_checked,
)
from storage.errors import SpecError


def test_only_what_a_job_may_see_is_passed_on() -> None:
    environ = {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_PROFILE": "team",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "BASH_FUNC_module%%": "() { true; }",
        "HOME": "/home/me",
        "LC_ALL": "C",
        "PATH": "/bin",
        "PREFECT_API_AUTH_STRING": "secret",
        "PYTHONPATH": "/mine",
        "SBATCH_PARTITION": "other",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JOB_ID": "5",
        "SQUEUE_FORMAT": "%i",
    }
    kept = {"AWS_PROFILE", "BASH_FUNC_module%%", "HOME", "LC_ALL", "PATH", "SLURM_CONF"}
    assert set(command_environment(environ)) == kept
    named = command_environment(environ, slurm_conf=Path("/other.conf"))
    assert named["SLURM_CONF"] == "/other.conf"


def test_a_slurm_conf_that_cannot_be_read_is_refused_before_slurm_retries_it(
    tmp_path: Path,
) -> None:
    gone = tmp_path / "gone.conf"
    with pytest.raises(
        SpecError, match=r"^cluster\.slurm_conf '.*gone\.conf' cannot be read: No s"
    ):
        SystemCommands(slurm_conf=gone, environ={}).run(["sinfo"])
    with pytest.raises(SpecError, match=r"^SLURM_CONF .* correct the path, or leave SLURM_CONF"):
        SystemCommands(environ={"SLURM_CONF": str(gone)}).run(["sinfo"])
    gone.touch()
    found = SystemCommands(slurm_conf=gone, environ={"SLURM_CONF": "/overruled"})
    assert found.run([sys.executable, "-c", ""]).returncode == 0


def test_a_command_that_stays_silent_is_killed() -> None:
    with pytest.raises(CommandTimedOut, match=r"within 0\.2 s"):
        SystemCommands().run([sys.executable, "-c", "while True: pass"], timeout_s=0.2)


def test_what_a_command_had_said_before_it_was_killed_is_told() -> None:
    program = "echo sleeping and retrying >&2; exec sleep 60"
    with pytest.raises(CommandTimedOut, match="it had said: sleeping and retrying"):
        SystemCommands().run(["/bin/sh", "-c", program], timeout_s=2.0)


def test_a_command_that_does_not_exist_says_what_to_install() -> None:
    with pytest.raises(CommandMissing, match="slurm-client"):
        SystemCommands().run(["no-such-command"])


def test_a_command_that_fails_gives_its_code_and_words() -> None:
    program = "import sys; sys.exit('slurm_load_jobs error: Unable to contact')"
    with pytest.raises(CommandFailed, match="ended with 1: slurm_load_jobs error") as caught:
        run_checked(SystemCommands(), [sys.executable, "-c", program])
    assert caught.value.result.returncode == 1
