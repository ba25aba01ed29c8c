"""What belongs to a person stays private to that person, and is found again."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from flows.home import WORKER, Child, Home, ProcessRef, ServerRecord
from storage.errors import HeadraceError, SpecError
from storage.file_locks import FileLock


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(folder=tmp_path / "home")


def test_the_folder_is_named_by_variable_then_by_xdg() -> None:
    assert Home.of_user({"HEADRACE_HOME": "/x/y"}).folder == Path("/x/y")
    assert Home.of_user({"XDG_STATE_HOME": "/s"}).folder == Path("/s/headrace")
    assert Home.of_user({}).folder == Path("~/.local/state/headrace").expanduser()


def test_the_password_is_drawn_once_and_only_its_owner_can_read_it(home: Home) -> None:
    first = home.auth_string()
    assert first == home.auth_string()
    user, _, password = first.partition(":")
    assert user == "headrace"
    assert len(password) >= 24
    assert stat.S_IMODE(home.auth.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.folder.stat().st_mode) == 0o700


def test_it_is_served_while_somebody_holds_the_lock(home: Home) -> None:
    assert not home.is_served()
    home.make()
    with FileLock(home.lock) as lock:
        assert lock.try_acquire()
        assert home.is_served()
    assert not home.is_served()


def test_a_record_comes_back_as_it_was_written(home: Home) -> None:
    home.make()
    assert home.read_record() is None
    me = ProcessRef.of(os.getpid())
    record = ServerRecord(
        api_url="http://127.0.0.1:4200/api",
        supervisor=me,
        children=(Child(name=WORKER, process=me),),
        ready=True,
    )
    home.write_record(record)
    assert home.read_record() == record
    assert record.ui_url == "http://127.0.0.1:4200"
    assert record.port == 4200


def test_a_broken_record_is_told_and_not_believed(home: Home) -> None:
    home.make()
    home.record.write_text("{}")
    with pytest.raises(HeadraceError, match="remove it"):
        home.read_record()


def test_a_process_id_that_was_given_away_again_is_not_our_process() -> None:
    me = ProcessRef.of(os.getpid())
    assert me.find() is not None
    assert ProcessRef(pid=me.pid, created=me.created - 100).find() is None
    assert ProcessRef(pid=2**22 + 1, created=0).find() is None


def test_a_run_is_found_again_by_its_name(home: Home) -> None:
    home.remember_run("a", "{}")
    assert home.recall_run("a") == "{}"
    with pytest.raises(SpecError, match=r"never started from here.*known here: a"):
        home.recall_run("b")


def test_a_folder_that_cannot_be_made_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadraceError, match="HEADRACE_HOME"):
        Home(folder=tmp_path / "file" / "home").make()
