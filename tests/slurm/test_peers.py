"""Who notices that a rank is gone, and who is not taken for gone. Cuts are real ones, of nodes."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm.devcluster import DevCluster
from slurm.peer_links import LinkRefused, dial
from slurm.peers import DEAF_S, Loss, Peers, strides, suspects
from storage.job import JobDescription, JobExit, Peer, RankIdentity
from storage.records import Exit, ExitCode
from tests.ranks import ALONE
from tests.slurm.jobs import Workplace, logs, wait_for, wait_for_file

FIRST = replace(ALONE, world_size=6, nodes=("n1", "n2", "n3"))
"""Rank 0 of three nodes with two ranks each."""


@contextmanager
def peers_of(
    identity: RankIdentity, *, secret: str, address_of: Callable[[str], str] = lambda _: ""
) -> Iterator[tuple[Peers, list[int]]]:
    """The links of one rank, and the codes with which it would have left."""
    left: list[int] = []
    before = set(threading.enumerate())
    peers = Peers(
        identity,
        secret=secret,
        host="127.0.0.1",
        address_of=address_of,
        on_silence=lambda _: None,
        silence_s=4.0,
        leave=left.append,
    )
    with peers:
        yield peers, left
    for thread in set(threading.enumerate()) - before:
        thread.join()


class Wire:
    """A neighbour, of which a test says every word."""

    def __init__(self, listens_at: str, *, secret: str, rank: int, node: str) -> None:
        host, _, port = listens_at.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._file = self._socket.makefile("r")
        self.say("hello", secret=secret, rank=rank, node=node)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, word: str, **body: Any) -> None:
        self._socket.sendall(f"{word} {json.dumps(body)}\n".encode())

    def stand(self) -> Wire:
        """Let the link count from now on."""
        assert self.hear()[0] == "hello"
        self.say("ping")
        assert self.hear()[0] == "pong"
        return self

    def hear(self) -> tuple[str, Any]:
        """The next word, or nothing at the end."""
        word, _, body = self._file.readline().partition(" ")
        return word, json.loads(body or "null")

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return tmp_path.name


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm.peers.END_PATIENCE_S", 0.0)


@pytest.mark.parametrize(
    ("unheard_s", "suspected"),
    [
        ({"n1": 0.4, "n3": 4.2}, ("n3",)),
        ({}, ("n3",)),
        ({"n3": 4.2}, ("n3",)),
        ({"n1": DEAF_S + 1, "n3": 4.2}, ()),
    ],
    ids=["a neighbour of two", "the only one", "the same on both sides", "maybe this one"],
)
def test_a_node_that_hears_nobody_blames_nobody(
    unheard_s: dict[str, float], suspected: tuple[str, ...]
) -> None:
    assert suspects("n3", unheard_s=unheard_s) == suspected


def test_news_crosses_a_large_job_in_few_hops() -> None:
    assert [strides(nodes) for nodes in (1, 2, 8)] == [(), (1,), (1,)]
    nodes, reached, hops = 1000, {0}, 0
    while len(reached) < nodes:
        steps = [sign * stride for stride in strides(nodes) for sign in (1, -1)]
        reached |= {(node + step) % nodes for node in reached for step in steps}
        hops += 1
    assert hops < 40


@pytest.mark.usefixtures("impatient")
def test_a_neighbour_that_ends_without_leave_is_noticed_and_told_on(secret: str) -> None:
    with (
        peers_of(FIRST, secret=secret) as (peers, left),
        Wire(peers.listens_at, secret=secret, rank=4, node="n3") as before,
        Wire(peers.listens_at, secret=secret, rank=2, node="n2") as after,
    ):
        before.stand()
        after.stand()
        assert peers.neighbours == (Peer(rank=2, node="n2"), Peer(rank=4, node="n3"))
        before.close()
        word, body = after.hear()
        wait_for(lambda: left, what="the rank to leave")
    assert (word, body["patience_s"], body["blamed_nodes"]) == ("lost", 0.0, [])
    assert body["text"].startswith("rank 4 on n3 ended without taking its leave")
    assert left == [ExitCode.PEER_LOST]


def test_what_a_neighbour_says_of_another_is_passed_on_and_believed(secret: str) -> None:
    loss = Loss(text="n9 is gone", blamed_nodes=("n9",))
    with (
        peers_of(FIRST, secret=secret) as (peers, left),
        Wire(peers.listens_at, secret=secret, rank=4, node="n3") as before,
        Wire(peers.listens_at, secret=secret, rank=2, node="n2") as after,
    ):
        before.stand()
        after.stand()
        before.say("lost", text=loss.text, blamed_nodes=loss.blamed_nodes, patience_s=0.0)
        word, body = after.hear()
        wait_for(lambda: left, what="the rank to leave")
    assert (word, body["text"], body["blamed_nodes"]) == ("lost", "n9 is gone", ["n9"])
    assert left == [ExitCode.PEER_LOST]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("error", [None, JobExit(ExitCode.RESUME, "asked to leave")])
def test_a_rank_that_ends_as_it_should_takes_its_leave(secret: str, error: JobExit | None) -> None:
    second = replace(FIRST, rank=1, local_rank=1)
    with (
        peers_of(FIRST, secret=secret) as (first, left),
        peers_of(second, secret=secret) as (peers, _),
    ):
        wait_for(lambda: first.neighbours and peers.neighbours, what="the link")
        peers.__exit__(type(error), error, None)
        wait_for(lambda: not first.neighbours, what="the leave")
    assert left == []


@pytest.mark.usefixtures("impatient")
def test_ranks_of_one_node_notice_each_other(secret: str) -> None:
    second = replace(FIRST, rank=1, local_rank=1)
    with (
        peers_of(FIRST, secret=secret) as (first, _),
        peers_of(second, secret=secret) as (peers, left),
        Wire(first.listens_at, secret=secret, rank=4, node="n3") as other_node,
    ):
        wait_for(lambda: peers.neighbours, what="the link")
        assert peers.neighbours == (Peer(rank=0, node="n1"),)
        other_node.stand().close()
        wait_for(lambda: left, what="the second rank to leave")
    assert left == [ExitCode.PEER_LOST]


@pytest.mark.usefixtures("impatient")
def test_a_stranger_and_a_link_that_never_stood_end_nothing(secret: str) -> None:
    with peers_of(FIRST, secret=secret) as (peers, left):
        with Wire(peers.listens_at, secret="another", rank=4, node="n3") as stranger:
            assert stranger.hear() == ("", None)
        with Wire(peers.listens_at, secret=secret, rank=4, node="n3") as given_up:
            assert given_up.hear()[0] == "hello"
        with Wire(peers.listens_at, secret=secret, rank=4, node="n3") as neighbour:
            neighbour.stand()
            neighbour.say("bye")
            wait_for(lambda: not peers.neighbours, what="the leave")
    assert left == []


def test_who_dials_a_stranger_says_so(secret: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(LinkRefused, match="is not rank 2 on n2"):
            dial(
                f"127.0.0.1:{server.getsockname()[1]}",
                peer=Peer(rank=2, node="n2"),
                hello={"secret": secret},
                silence_s=4.0,
            )
        thread.join()


def test_a_rank_that_answers_nothing_is_known(secret: str) -> None:
    with (
        peers_of(FIRST, secret=secret) as (peers, left),
        Wire(peers.listens_at, secret=secret, rank=4, node="n3") as silent,
    ):
        silent.stand()
        assert peers.unanswering(for_s=60.0) == ()
        silent_for = wait_for(lambda: peers.unanswering(for_s=1.0), what="silence")
        assert silent_for == (Peer(rank=4, node="n3"),)
        silent.say("ping")
        assert silent.hear()[0] == "pong"
        assert peers.unanswering(for_s=60.0) == ()
    assert left == []


def test_a_forked_child_does_not_hold_the_links(secret: str) -> None:
    with (
        peers_of(FIRST, secret=secret) as (peers, _),
        Wire(peers.listens_at, secret=secret, rank=4, node="n3") as neighbour,
    ):
        neighbour.stand()
        child = os.fork()
        if child == 0:
            os._exit(len([link for link in peers._links if link.fileno() >= 0]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert peers.neighbours


def started(place: Workplace, *nodes: str, ranks: int, **payload: Any) -> JobDescription:
    """A job whose ranks all wait, each linked to its neighbours."""
    job = place.job(nodes=len(nodes), ranks=ranks, **payload)
    job = replace(job, entry="peer_entries")
    place.submit(job, node_list=nodes, memory_per_node="900M")
    for rank in range(len(nodes) * ranks):
        wait_for_file(job.folder / f"pid.{rank}")
    return job


def pid_of(job: JobDescription, rank: int) -> int:
    return int((job.folder / f"pid.{rank}").read_text())


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def word_after_cut(
    place: Workplace, dev_cluster: DevCluster, *nodes: str, ranks: int, cut: str
) -> Exit:
    """What a job says after one of its nodes is cut off, and the ranks of the others have left."""
    job = started(place, *nodes, ranks=ranks)
    survivors = [rank for rank in range(len(nodes) * ranks) if nodes[rank // ranks] != cut]
    dev_cluster.cut(cut)
    try:
        wait_for(
            lambda: not any(is_running(pid_of(job, rank)) for rank in survivors),
            what="the survivors to leave",
        )
        word = place.exit(job)
        said = logs(job)
        assert all(f"{rank}: headrace: leaving with 88" in said for rank in survivors), said
    finally:
        dev_cluster.heal(cut)
    return word


@pytest.mark.slurm
def test_a_node_that_is_cut_off_is_named_by_its_neighbours(
    there: Workplace, dev_cluster: DevCluster
) -> None:
    word = word_after_cut(there, dev_cluster, "n1", "n2", "n3", "n4", ranks=1, cut="n3")
    assert (word.code, word.blamed_nodes) == (ExitCode.PEER_LOST, ("n3",)), word
    assert word.node in {"n2", "n4"}


@pytest.mark.slurm
def test_ranks_leave_when_the_first_node_is_dead_and_srun_with_it(
    there: Workplace, dev_cluster: DevCluster
) -> None:
    word = word_after_cut(there, dev_cluster, "n1", "n2", ranks=2, cut="n1")
    assert (word.code, word.blamed_nodes, word.rank) == (ExitCode.PEER_LOST, ("n1",), 2), word


@pytest.mark.slurm
def test_a_rank_that_is_stopped_or_deaf_is_not_taken_for_dead(there: Workplace) -> None:
    silence_s = 4.0
    job = started(there, "n1", "n2", ranks=2, busy=0, busy_s=int(2 * silence_s))
    assert job.peer_silence_s == silence_s
    stopped = pid_of(job, 2)
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(2 * silence_s)
    os.kill(stopped, signal.SIGCONT)
    wait_for_file(job.folder / "was busy")
    (job.folder / "go").touch()
    there.wait_for_end(job)
    word = there.exit(job)
    assert word.code == ExitCode.DONE, word
