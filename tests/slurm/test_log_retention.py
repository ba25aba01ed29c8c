"""Old logs leave the workdir by age and size, and never those that somebody still needs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.log_retention import (
    ALWAYS_KEPT,
    CODE,
    AttemptFolder,
    Removed,
    attempt_folders,
    outdated,
    sweep_logs,
)
from storage.records import Stage
from storage.spec import LogsSpec

DAY_S = 86_400.0
NOW_S = 1_800_000_000.0
GB = 1_000_000_000


def folder(
    attempt: int, *, age_days: float = 0.0, size_gb: float = 0.0, is_closed: bool = True
) -> AttemptFolder:
    return AttemptFolder(
        path=Path("train", f"{attempt:04d}"),
        stage=Stage.TRAIN,
        attempt=attempt,
        size_bytes=int(size_gb * GB),
        written_at_s=NOW_S - age_days * DAY_S,
        is_closed=is_closed,
    )


def numbers(folders: tuple[AttemptFolder, ...]) -> list[int]:
    return [one.attempt for one in folders]


YOUNG = [folder(100 + number) for number in range(ALWAYS_KEPT)]


def test_what_is_older_than_its_days_goes() -> None:
    found = [folder(1, age_days=31), folder(2, age_days=29), *YOUNG]
    assert numbers(outdated(found, LogsSpec(), now_s=NOW_S)) == [1]


def test_the_oldest_go_until_the_rest_is_small_enough() -> None:
    found = [folder(n, age_days=10 - n, size_gb=6) for n in (1, 2, 3, 4)]
    assert numbers(outdated([*found, *YOUNG], LogsSpec(), now_s=NOW_S)) == [1]
    small = LogsSpec(max_gb=7)
    assert numbers(outdated([*found, *YOUNG], small, now_s=NOW_S)) == [1, 2, 3]


@pytest.mark.parametrize("nothing", [0, None])
def test_without_bounds_all_is_kept(nothing: int | None) -> None:
    found = [folder(1, age_days=9999, size_gb=9999), *YOUNG]
    assert not outdated(found, LogsSpec(keep_days=nothing, max_gb=nothing), now_s=NOW_S)


@given(
    st.lists(
        st.builds(
            folder,
            st.integers(1, 40),
            age_days=st.floats(0, 90),
            size_gb=st.floats(0, 30),
            is_closed=st.booleans(),
        ),
        unique_by=lambda one: one.attempt,
    ),
    st.floats(0, 60),
    st.floats(0, 60),
)
def test_no_open_attempt_and_none_of_the_newest_ever_goes(
    found: list[AttemptFolder], keep_days: float, max_gb: float
) -> None:
    gone = outdated(found, LogsSpec(keep_days=keep_days, max_gb=max_gb), now_s=NOW_S)
    newest = sorted((one.attempt for one in found), reverse=True)[:ALWAYS_KEPT]
    assert all(one.is_closed and one.attempt not in newest for one in gone)
    left = [one for one in found if one not in gone]
    too_much = max_gb > 0 and sum(one.size_bytes for one in left) > max_gb * GB
    if too_much:
        assert all(not one.is_closed or one.attempt in newest for one in left)


class Work:
    """A workdir with one run of one stage, whose attempts are as old as they are asked to be."""

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self.code = self.snapshot("c0de", age_days=0)

    def snapshot(self, digest: str, *, age_days: float) -> Path:
        path = self.workdir / CODE / digest
        path.mkdir(parents=True)
        (path / "file.py").write_text("")
        return _aged(path, age_days=age_days)

    def attempt(self, number: int, *, age_days: float = 0.0, code: Path | None = None) -> Path:
        path = self.workdir / "run" / "train" / f"{number:04d}"
        path.mkdir(parents=True)
        job = {"code": str(code or self.code), "intent": {"token": f"token-{number}"}}
        (path / "job.json").write_text(json.dumps(job))
        (path / "node.n1.log").write_text("x" * 1000)
        for file in path.iterdir():
            _aged(file, age_days=age_days)
        return _aged(path, age_days=age_days)

    def sweep(self, *closed: int, logs: LogsSpec | None = None) -> Removed:
        (self.workdir / "run" / ".swept").unlink(missing_ok=True)
        return self.sweep_again(*closed, logs=logs)

    def sweep_again(self, *closed: int, logs: LogsSpec | None = None) -> Removed:
        return sweep_logs(
            self.workdir,
            "run",
            logs or LogsSpec(),
            code=self.code,
            closed_tokens=lambda: {f"token-{number}" for number in closed},
            now_s=NOW_S,
        )

    def left(self) -> list[int]:
        return [one.attempt for one in attempt_folders(self.workdir / "run")]


def _aged(path: Path, *, age_days: float) -> Path:
    at_s = NOW_S - age_days * DAY_S
    os.utime(path, (at_s, at_s))
    return path


@pytest.fixture
def work(tmp_path: Path) -> Work:
    work = Work(tmp_path)
    for number in range(ALWAYS_KEPT):
        work.attempt(100 + number)
    return work


def test_only_attempts_that_the_ledger_says_are_closed_are_removed(work: Work) -> None:
    work.attempt(1, age_days=40)
    work.attempt(2, age_days=40)
    work.attempt(3, age_days=1)
    removed = work.sweep(1, 3)
    assert work.left()[:2] == [2, 3]
    assert (removed.folders, removed.faults) == (1, ())
    assert removed.message.startswith("removed the logs of 1 old attempts")


def test_an_attempt_of_another_store_is_not_taken_for_ours(work: Work) -> None:
    path = work.attempt(1, age_days=40)
    job = {"code": "", "intent": {"token": "of-another-store"}}
    _aged((path / "job.json"), age_days=40).write_text(json.dumps(job))
    _aged(path / "job.json", age_days=40)
    work.sweep(1)
    assert work.left()[0] == 1


def test_where_nothing_is_old_the_ledger_is_not_asked(work: Work) -> None:
    def closed_tokens() -> set[str]:
        raise AssertionError("asked")

    found = sweep_logs(
        work.workdir, "run", LogsSpec(), code=work.code, closed_tokens=closed_tokens, now_s=NOW_S
    )
    assert found == Removed()
    assert found.message == ""


def test_a_run_is_swept_once_an_hour(work: Work) -> None:
    work.sweep()
    work.attempt(1, age_days=40)
    _aged(work.workdir / "run" / ".swept", age_days=1 / 48)
    assert work.sweep_again(1).folders == 0
    _aged(work.workdir / "run" / ".swept", age_days=1 / 12)
    assert work.sweep_again(1).folders == 1


def test_code_stays_as_long_as_a_job_names_it(work: Work) -> None:
    named = work.snapshot("aaaa", age_days=40)
    unnamed = work.snapshot("bbbb", age_days=40)
    young = work.snapshot("dddd", age_days=1)
    _aged(work.code, age_days=40)
    work.attempt(1, age_days=40, code=named)
    assert work.sweep().snapshots == 1
    assert not unnamed.exists()
    assert named.exists()
    assert young.exists()
    assert work.code.exists()
    assert work.sweep(1).snapshots == 1
    assert not named.exists()


def test_beside_a_job_that_cannot_be_read_all_code_stays(work: Work) -> None:
    unnamed = work.snapshot("bbbb", age_days=40)
    (work.attempt(1, age_days=1) / "job.json").write_text("{")
    assert work.sweep().snapshots == 0
    assert unnamed.exists()


def test_what_cannot_be_removed_is_told_and_left(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    work.attempt(1, age_days=40)
    monkeypatch.setattr("slurm.log_retention.shutil.rmtree", refuse)
    assert "could not remove 1 old folders" in work.sweep(1).message
    monkeypatch.undo()
    assert work.sweep(1) == Removed()
    assert not list((work.workdir / "run" / "train").glob(".*"))
