"""All engines of a user share one look at the queue, and none of them waits for a dead one."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from slurm.commands import CommandResult
from slurm.shared_queue import (
    LOCK_PATIENCE_S,
    SHORTEST_S,
    Page,
    QueueSilent,
    SharedQueue,
    shared_folder,
)
from storage.errors import SlurmError
from storage.file_locks import FileLock
from storage.records import decode, encode
from tests.slurm.jobs import wait_for_file

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Host:
    """One host's clock and its squeue, which says how often it was called."""

    now_s: float = 1000.0
    calls: int = 0
    failure: str = ""
    takes_s: float = 0.1
    slept_s: list[float] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None

    def run(self, command: Sequence[str], *, timeout_s: float = 60.0) -> CommandResult:
        self.calls += 1
        self.now_s += self.takes_s
        self.meanwhile()
        failed = bool(self.failure)
        return CommandResult(
            command=tuple(command),
            returncode=int(failed),
            stdout="" if failed else f"{self.calls}|RUNNING|n1|None|a\n",
            stderr=self.failure,
        )

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds

    def engine(self, folder: Path | None) -> SharedQueue:
        return SharedQueue(self, folder=folder, clock=self.clock, sleep=self.sleep)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "user" / "cluster"


def test_engines_share_an_answer_as_long_as_it_is_young_enough(folder: Path) -> None:
    host = Host()
    engines = [host.engine(folder) for _ in range(5)]
    pages = [engine.read(max_age_s=30.0) for engine in engines]
    assert {page.text for page in pages} == {"1|RUNNING|n1|None|a\n"}
    host.now_s += 10.0
    assert engines[1].read(max_age_s=30.0) == pages[0]
    assert engines[2].read(max_age_s=5.0).text == "2|RUNNING|n1|None|a\n"
    assert engines[3].read(max_age_s=5.0).began_at_s == pytest.approx(1010.1)
    assert host.calls == 2


def test_an_answer_from_before_what_the_caller_did_is_none(folder: Path) -> None:
    host = Host()
    engine = host.engine(folder)
    first = engine.read(max_age_s=30.0)
    submitted_at_s = host.now_s
    later = host.engine(folder).read(max_age_s=30.0, not_before_s=submitted_at_s)
    assert later.began_at_s >= submitted_at_s
    assert later.began_at_s - first.began_at_s >= SHORTEST_S
    assert engine.read(max_age_s=30.0, not_before_s=submitted_at_s) == later


def test_an_empty_list_of_a_user_that_cannot_be_looked_up_is_no_answer(folder: Path) -> None:
    class Nameless(Host):
        def run(self, command: Sequence[str], *, timeout_s: float = 60.0) -> CommandResult:
            words = "squeue: error: Invalid user: 0\n"
            return CommandResult(command=tuple(command), returncode=0, stdout="", stderr=words)

    for place in (folder, None):
        with pytest.raises(SlurmError, match="Invalid user"):
            Nameless().engine(place).read(max_age_s=0.5)


def test_an_answer_is_as_old_as_the_beginning_of_its_squeue(folder: Path) -> None:
    host = Host(takes_s=20.0)
    page = host.engine(folder).read(max_age_s=30.0)
    assert page.began_at_s == 1000.0
    assert host.engine(folder).read(max_age_s=19.0).began_at_s == 1020.0


def test_without_a_folder_an_engine_keeps_its_own_answers(folder: Path) -> None:
    host = Host()
    engine = host.engine(None)
    assert engine.read(max_age_s=1.0) == engine.read(max_age_s=1.0)
    assert host.calls == 1
    host.engine(None).read(max_age_s=1.0)
    assert host.calls == 2


def test_a_failure_is_shared_and_asked_about_at_growing_distances(folder: Path) -> None:
    host = Host(failure="slurm_load_jobs error: Unable to contact slurm controller")
    engines = [host.engine(folder) for _ in range(10)]
    for _ in range(200):
        for engine in engines:
            with pytest.raises(SlurmError, match="Unable to contact slurm controller"):
                engine.read(max_age_s=0.5)
        host.now_s += 0.5
    assert host.calls <= 10
    host.failure = ""
    host.now_s += 30.0
    assert all(engine.read(max_age_s=30.0).text for engine in engines)
    host.failure, before = "down again", host.calls
    host.now_s += 31.0
    with pytest.raises(SlurmError, match="down again"):
        engines[0].read(max_age_s=30.0)
    host.now_s += 1.1
    with pytest.raises(SlurmError, match="down again"):
        engines[1].read(max_age_s=30.0)
    assert host.calls == before + 2, "the distances begin anew after an answer"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"boot": "x", "began_at',
        b"\xff\xfe",
        b"[]",
        encode(Page(boot="another", began_at_s=999.9, text="9|RUNNING|n9|None|a\n")),
    ],
)
def test_a_page_that_cannot_be_believed_is_as_good_as_none(folder: Path, body: bytes) -> None:
    host = Host()
    engine = host.engine(folder)
    engine.read(max_age_s=30.0)
    (folder / "page.json").write_bytes(body)
    host.now_s += 1.0
    assert engine.read(max_age_s=30.0).text == "2|RUNNING|n1|None|a\n"
    assert decode(Page, (folder / "page.json").read_bytes()).text == "2|RUNNING|n1|None|a\n"


def test_a_page_from_the_future_is_not_believed(folder: Path) -> None:
    host = Host()
    host.engine(folder).read(max_age_s=30.0)
    host.now_s -= 500.0
    assert host.engine(folder).read(max_age_s=30.0).began_at_s < 600.0


def test_behind_a_squeue_that_is_stuck_nobody_waits_long(folder: Path) -> None:
    host = Host()
    engine = host.engine(folder)
    engine.read(max_age_s=0.5)
    with FileLock(folder / "lock") as held:
        assert held.try_acquire()
        os.pwrite(held.fileno(), f"{host.now_s}".encode(), 0)
        host.now_s += 1.0
        begin_s = host.now_s
        with pytest.raises(QueueSilent, match="another process is silent for 11 s"):
            engine.read(max_age_s=0.5)
        assert host.now_s - begin_s == pytest.approx(LOCK_PATIENCE_S, abs=0.1)
    assert host.calls == 1


def test_whoever_waits_for_the_lock_takes_what_another_has_got_meanwhile(folder: Path) -> None:
    host = Host()
    page = replace(host.engine(folder).read(max_age_s=0.5), began_at_s=1005.0)
    host.now_s = 1004.0
    with FileLock(folder / "lock") as held:
        assert held.try_acquire()
        sleep = host.sleep

        def sleep_and_find(seconds: float) -> None:
            sleep(seconds)
            if host.now_s > 1006.0:
                (folder / "page.json").write_bytes(encode(page))

        waiting = SharedQueue(host, folder=folder, clock=host.clock, sleep=sleep_and_find)
        assert waiting.read(max_age_s=0.5) == page
    assert host.calls == 1


@pytest.mark.parametrize("sign", ["900.0", "", "garbage"])
def test_a_stopped_holder_of_the_lock_stops_nobody_for_ever(folder: Path, sign: str) -> None:
    host = Host()
    engine, other = host.engine(folder), host.engine(folder)
    engine.read(max_age_s=0.5)
    host.now_s += 1.0
    with FileLock(folder / "lock") as held:
        assert held.try_acquire()
        os.ftruncate(held.fileno(), 0)
        os.pwrite(held.fileno(), sign.encode(), 0)
        page = engine.read(max_age_s=0.5)
        assert page.text == "2|RUNNING|n1|None|a\n"
        assert other.read(max_age_s=0.5) == page
    assert host.calls == 2


def test_one_that_was_stopped_within_its_squeue_replaces_nothing_newer(folder: Path) -> None:
    host = Host()
    stopped, other = host.engine(folder), host.engine(folder)

    def hours_later() -> None:
        host.meanwhile = lambda: None
        host.now_s += 7200.0
        newer.append(other.read(max_age_s=0.5))

    newer: list[Page] = []
    host.meanwhile = hours_later
    assert stopped.read(max_age_s=0.5).began_at_s == 1000.0
    assert newer[0].began_at_s > 8000.0
    assert host.engine(folder).read(max_age_s=5.0) == newer[0]


def test_a_folder_that_others_may_enter_is_not_used_and_that_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(parents=True)
    folder.parent.chmod(0o700)
    folder.chmod(0o750)
    host = Host()
    engine = host.engine(folder)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            host.now_s += 1.0
            assert engine.read(max_age_s=0.5).text
    assert (host.calls, len(caplog.records)) == (3, 1)
    assert "is not a folder of this user alone" in caplog.text
    assert "TMPDIR" in caplog.text
    assert list(folder.iterdir()) == []


def test_where_no_file_can_be_kept_each_asks_for_itself(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    host = Host()
    assert host.engine(tmp_path / "file" / "cluster").read(max_age_s=0.5).text
    host.failure = "down"
    engine = host.engine(tmp_path / "file" / "cluster")
    for _ in range(2):
        with pytest.raises(SlurmError, match="down"):
            engine.read(max_age_s=0.5)
    assert host.calls == 2


def test_a_cluster_is_known_by_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/etc/one.conf")
    one = shared_folder(None)
    assert shared_folder(Path("/etc/one.conf")) == one
    assert shared_folder(Path("/etc/two.conf")) != one
    assert one.parent.name == f"headrace-queue-{os.getuid()}"


ENGINE = """\
import sys, time
from pathlib import Path
from slurm.commands import CommandResult
from slurm.shared_queue import SharedQueue

folder, looks, takes_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

class Squeue:
    def run(self, command, *, timeout_s=60.0):
        with (folder.parent / "calls").open("a") as file:
            file.write("x")
        time.sleep(takes_s)
        return CommandResult(command=tuple(command), returncode=0, stdout="", stderr="")

queue = SharedQueue(Squeue(), folder=folder)
for _ in range(looks):
    print(queue.read(max_age_s=0.5).began_at_s, flush=True)
    time.sleep(0.1)
"""


def start_engine(folder: Path, *, looks: int, takes_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ENGINE, str(folder), str(looks), str(takes_s)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def test_processes_side_by_side_call_squeue_once_an_interval(folder: Path) -> None:
    processes = [start_engine(folder, looks=8, takes_s=0.05) for _ in range(4)]
    printed = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert [len(times) for times in printed] == [8] * 4
    begins = sorted({float(one) for times in printed for one in times})
    assert len((folder.parent / "calls").read_text()) == len(begins)
    distances = [later - earlier for earlier, later in itertools.pairwise(begins)]
    assert min(distances) >= SHORTEST_S - 0.001, begins


def test_a_process_killed_within_its_squeue_leaves_no_lock_and_no_half_page(folder: Path) -> None:
    process = start_engine(folder, looks=1, takes_s=600.0)
    wait_for_file(folder.parent / "calls")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    host = Host()
    assert host.engine(folder).read(max_age_s=0.5).text
    assert host.slept_s == []
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "page.json"]
