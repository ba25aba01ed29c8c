"""A run's copy of the code: named by its content, taken once, and never a changed one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slurm.snapshot import PACKAGES, SnapshotError, digest_of, take_snapshot


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Five small packages, with what must be left out."""
    root = tmp_path / "source"
    for package in PACKAGES:
        (root / package / "__pycache__").mkdir(parents=True)
        (root / package / "__init__.py").write_text(f"name = {package!r}\n")
        (root / package / "data.json").write_text("{}")
        (root / package / "__pycache__" / "x.pyc").write_bytes(b"compiled")
    (root / "storage/deep/er").mkdir(parents=True)
    (root / "storage/deep/er/part.py").write_text("")
    (root / "trainer/.hidden").write_text("")
    (root / "README.md").write_text("not code")
    return root


def git_in(root: Path) -> Callable[..., str]:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        shown = subprocess.run(
            ["git", *who, *arguments], check=True, capture_output=True, cwd=root, text=True
        )
        return shown.stdout.strip()

    return git


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_a_snapshot_holds_the_packages_and_nothing_else(source: Path, tmp_path: Path) -> None:
    taken = take_snapshot(tmp_path / "work", root=source)
    assert taken.path == tmp_path / "work" / "code" / taken.digest
    expected = {f"{p}/{name}" for p in PACKAGES for name in ("__init__.py", "data.json")}
    assert files(taken.path) == expected | {"storage/deep/er/part.py"}
    assert (taken.git_commit, taken.git_dirty) == (None, None)


def test_the_digest_follows_names_and_bytes_alone(source: Path, tmp_path: Path) -> None:
    before = digest_of(source)
    (source / "slurm/__pycache__/y.pyc").write_bytes(b"more")
    (source / "slurm/data.json").touch()
    copy = shutil.copytree(source, tmp_path / "elsewhere")
    assert digest_of(source) == digest_of(copy) == before
    (copy / "slurm/data.json").write_text("{ }")
    assert digest_of(copy) != before
    (source / "slurm/data.json").rename(source / "slurm/other.json")
    assert digest_of(source) != before


def test_many_at_once_take_the_same_one_whole(source: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        taken = set(pool.map(lambda _: take_snapshot(tmp_path, root=source), range(16)))
    assert len(taken) == 1
    assert [path.name for path in (tmp_path / "code").iterdir()] == [taken.pop().digest]


def test_a_snapshot_that_was_changed_is_refused(source: Path, tmp_path: Path) -> None:
    taken = take_snapshot(tmp_path, root=source)
    (taken.path / "slurm/__init__.py").write_text("name = 'changed'\n")
    with pytest.raises(SnapshotError, match="was changed after it was copied"):
        take_snapshot(tmp_path, root=source)


def test_a_folder_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="choose a workdir"):
        take_snapshot(tmp_path / "file", root=source)


def test_commit_and_changes_are_told_in_a_checkout_of_ones_own(
    source: Path, tmp_path: Path
) -> None:
    git = git_in(source)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    clean = take_snapshot(tmp_path, root=source)
    assert (clean.git_commit, clean.git_dirty) == (git("rev-parse", "HEAD"), False)
    (source / "README.md").write_text("not code either")
    assert take_snapshot(tmp_path, root=source).git_dirty is False
    (source / "flows/__init__.py").write_text("")
    assert take_snapshot(tmp_path, root=source).git_dirty is True


def test_somebody_elses_repository_around_the_code_is_not_its_version(
    source: Path, tmp_path: Path
) -> None:
    git = git_in(tmp_path)
    git("init", "--quiet")
    git("add", "source")
    git("commit", "--quiet", "--message", "theirs")
    assert take_snapshot(tmp_path / "work", root=source).git_commit is None
