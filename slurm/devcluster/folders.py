"""Folders that go wrong on one node: full, or not to be written, as a disk or an export may be.

A node sees the file system of this machine. What is mounted over one of its folders is seen there
alone, by its slurmd and the jobs that it starts from then on.
"""

from __future__ import annotations

from pathlib import Path

from slurm.devcluster.command import run
from slurm.devcluster.errors import DevClusterError


def make_tiny(*, slurmd_pid: int, folder: Path, size_mb: int) -> None:
    """Put an empty file system of this size over a folder."""
    _inside(slurmd_pid, "mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder))


def make_readonly(*, slurmd_pid: int, folder: Path) -> None:
    """Let a folder be read, but not written."""
    _inside(slurmd_pid, "mount", "--bind", str(folder), str(folder))
    _inside(slurmd_pid, "mount", "-o", "remount,bind,ro", str(folder))


def restore(*, slurmd_pid: int, folder: Path) -> None:
    """Take away what was put over a folder.

    Raises:
        DevClusterError: there is nothing.
    """
    _inside(slurmd_pid, "umount", "--lazy", str(folder))


def _inside(slurmd_pid: int, *argv: str) -> None:
    folder = Path(argv[-1])
    if not folder.is_dir():
        raise DevClusterError(f"{folder} is no folder; make it first")
    run(["nsenter", f"--mount=/proc/{slurmd_pid}/ns/mnt", *argv])
