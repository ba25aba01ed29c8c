"""The command starts quickly, from anywhere, and always with Headrace's own packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=kept | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A working directory with packages of our names, and of a library's, which must not win."""
    for name in ("flows", "tasks", "slurm", "trainer", "storage", "yaml", "typer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('the wrong {name}')\n")
    (tmp_path / "bad.yaml").write_text("run: a\nclutser: {}\n")
    return tmp_path


def test_packages_of_the_working_directory_do_not_win(trap: Path) -> None:
    told = run("-m", "headrace", "plan", "bad.yaml", cwd=trap, PYTHONPATH=str(ROOT))
    assert told.returncode == 2
    assert told.stdout == ""
    assert told.stderr.splitlines() == [
        "bad.yaml:1: data: data is missing: name the documents to train on (data.inputs), or a "
        "script of your own (command.argv)",
        "bad.yaml:2: clutser: unknown key; did you mean `cluster`?",
    ]


def test_the_command_can_start_itself_again_without_any_path(trap: Path) -> None:
    told = run(*headrace.command("plan", "bad.yaml")[1:], cwd=trap)
    assert told.returncode == 2
    assert "did you mean `cluster`" in told.stderr


def test_a_wheel_keeps_the_packages_below_its_own(tmp_path: Path) -> None:
    assert headrace.application_folder() == ROOT
    packed = tmp_path / "headrace"
    (packed / "_app" / "flows").mkdir(parents=True)
    (packed / "__init__.py").write_text((ROOT / "headrace" / "__init__.py").read_text())
    (packed / "_app" / "flows" / "__init__.py").write_text("print('packed', __file__)\n")
    told = run(
        "-P", "-c", "import headrace; headrace.main()", cwd=tmp_path, PYTHONPATH=str(tmp_path)
    )
    assert told.stdout.split() == ["packed", str(packed / "_app" / "flows" / "__init__.py")]


def test_the_packages_come_first_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/a", "/b", "/a"])
    headrace.put_first(Path("/b"))
    assert sys.path == ["/b", "/a", "/a"]


def test_help_and_plans_do_not_wait_for_prefect_or_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from flows.cli.app import app; "
        "print(*sorted({'prefect', 'torch', 'boto3', 'submitit', 'matplotlib'} & set(sys.modules)))"
    )
    told = run("-P", "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert told.stdout.split() == [], told.stderr


def test_a_wrong_argument_is_no_traceback(tmp_path: Path) -> None:
    told = run(*headrace.command("run", "gone.yaml")[1:], cwd=tmp_path)
    assert told.returncode == 2
    assert told.stderr == "gone.yaml: file: there is no such file; check the path\n"
