"""A copy of Headrace's own code for the jobs of a run: edits while they queue change nothing.

The copy is named by its content: its name is the code's version, and equal code is copied once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from storage.errors import HeadraceError

PACKAGES = ("flows", "tasks", "slurm", "trainer", "storage")
_SKIPPED = frozenset({"__pycache__", "tests"})
_GIT_TIMEOUT_S = 10.0


class SnapshotError(HeadraceError):
    """The code cannot be copied, or a copy was changed afterwards."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Code at rest. `digest` depends on the files' paths and bytes alone."""

    path: Path
    digest: str
    git_commit: str | None
    git_dirty: bool | None


def take_snapshot(workdir: Path, *, root: Path | None = None) -> Snapshot:
    """Copy the packages that run now to `<workdir>/code/<digest>/`, unless they are there.

    Raises:
        SnapshotError: the folder cannot be written, or an earlier copy was changed.
    """
    root = root or Path(__file__).resolve().parent.parent
    digest = digest_of(root)
    path = workdir.absolute() / "code" / digest
    try:
        if not path.is_dir():
            _copy(root, path)
        # Says to whoever removes old copies that it is in use. Another user's is left to them.
        with suppress(PermissionError):
            os.utime(path)
    except OSError as error:
        raise SnapshotError(
            f"cannot copy the code to {str(path)!r}: {error}; choose a workdir on a file system "
            "that every node mounts and that can be written"
        ) from error
    if digest_of(path) != digest:
        raise SnapshotError(
            f"the code in {str(path)!r} was changed after it was copied; remove that folder"
        )
    commit, dirty = _git_version(root)
    return Snapshot(path=path, digest=digest, git_commit=commit, git_dirty=dirty)


def digest_of(root: Path) -> str:
    """16 hexadecimal digits for the packages' content below `root`."""
    total = hashlib.sha256()
    for path in _files(root):
        name = path.relative_to(root).as_posix()
        body = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{name}\0{body}\n".encode())
    return total.hexdigest()[:16]


def _files(root: Path) -> Iterator[Path]:
    found = [
        Path(folder, name)
        for package in PACKAGES
        for folder, name in _walk(root / package)
        if not name.endswith(".pyc")
    ]
    return iter(sorted(found, key=lambda path: path.relative_to(root).as_posix()))


def _walk(package: Path) -> Iterator[tuple[str, str]]:
    for folder, folders, names in os.walk(package):
        folders[:] = [name for name in folders if name not in _SKIPPED and name[0] != "."]
        yield from ((folder, name) for name in names if name[0] != ".")


def _copy(root: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=path.parent) as temporary:
        new = Path(temporary, "code")
        for source in _files(root):
            target = new / source.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        try:
            new.rename(path)
        except OSError:
            if not path.is_dir():
                raise


def _git_version(root: Path) -> tuple[str | None, bool | None]:
    """Commit and whether it was changed, where `root` itself is a git checkout."""
    if _git(root, "rev-parse", "--show-toplevel") != str(root):
        return None, None
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", *PACKAGES)
    return commit, None if changes is None else changes != ""


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            check=False,
            text=True,
            timeout=_GIT_TIMEOUT_S,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
