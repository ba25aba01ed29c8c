"""Programs named `sbatch` that stand before the real one and answer falsely, as networks do.

Each logs a line a call, which is how often the engine called sbatch; what really was submitted is
for Slurm to say.
"""

from __future__ import annotations

import shutil
from pathlib import Path

_TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


def sbatch_calls(folder: Path) -> tuple[str, ...]:
    """The script of every call, in their order."""
    log = folder / "calls"
    return tuple(log.read_text().splitlines()) if log.exists() else ()


def honest(folder: Path) -> Path:
    """Only counts."""
    return _write(folder, 0, "")


def swallowing(folder: Path, *, calls: int = 1) -> Path:
    """The first calls submit nothing and report a time-out."""
    return _write(folder, calls, "exit 1", told=True)


def late(folder: Path, *, delay_s: float, calls: int = 1) -> Path:
    """The first calls report a time-out, and submit all the same some time after that."""
    background = f'(sleep {delay_s}; exec "$real" "$@") >/dev/null 2>&1 &'
    return _write(folder, calls, f"{background}\n  exit 1", told=True)


def timing_out(folder: Path, *, calls: int = 1) -> Path:
    """The first calls submit, and report a time-out instead of the job's id."""
    return _write(folder, calls, '"$real" "$@" >/dev/null\n  exit 1', told=True)


def orphaned(folder: Path, *, delay_s: float, calls: int = 1) -> Path:
    """The first calls kill who called, and submit some time after that."""
    return _write(folder, calls, f"kill -9 $PPID\n  sleep {delay_s}")


def followed_by(folder: Path, command: str, *, calls: int = 1) -> Path:
    """The first calls submit and answer well; right after the answer `command` is run."""
    return _write(folder, calls, f'"$real" "$@"\n  code=$?\n  {command}\n  exit $code')


def _write(folder: Path, calls: int, instead: str, *, told: bool = False) -> Path:
    folder.mkdir(parents=True)
    real = shutil.which("sbatch")
    assert real is not None
    error = f"echo '{_TIMED_OUT}' >&2\n  " if told else ""
    (folder / "sbatch").write_text(
        f"""#!/bin/sh
real={real}
for script; do :; done
echo "$script" >>{folder}/calls
if [ "$(wc -l <{folder}/calls)" -le {calls} ]; then
  {error}{instead or ":"}
fi
exec "$real" "$@"
"""
    )
    (folder / "sbatch").chmod(0o755)
    return folder
