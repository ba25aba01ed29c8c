"""The launcher: finds the five packages, puts them first on the path, and starts the command line.

Their folder names (`flows`, `tasks`, `slurm`, `trainer`, `storage`) are also names of other
packages, so a wheel keeps them in `headrace/_app`; in a checkout they lie beside this folder.
"""

from __future__ import annotations

import sys
from pathlib import Path


def application_folder() -> Path:
    """The folder that holds the five packages."""
    here = Path(__file__).resolve().parent
    packed = here / "_app"
    return packed if packed.is_dir() else here.parent


def put_first(folder: Path) -> None:
    """Make the five packages win over anything else of their names, the cwd's included."""
    text = str(folder)
    sys.path[:] = [text, *(entry for entry in sys.path if entry != text)]


def command(*arguments: str) -> list[str]:
    """The command that runs Headrace again in a process of its own, whatever is on the PATH."""
    parent = str(Path(__file__).resolve().parent.parent)
    start = f"import sys; sys.path.append({parent!r}); from headrace import main; main()"
    return [sys.executable, "-P", "-c", start, *arguments]


def main() -> None:
    """The console command `headrace`."""
    put_first(application_folder())
    from flows.cli.app import main as run

    run()
