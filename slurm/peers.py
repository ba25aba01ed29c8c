"""A dead or cut-off peer is noticed by the other ranks within seconds, and they leave at once.

Otherwise they would wait for it in a collective until that times out, or until Slurm misses the
node, minutes later at most sites; and where the first node is the dead one, nothing is left that
would end them. The first ranks of the nodes stand in a ring, each linked to the next and the one
before, and in large jobs to two across it; a node's other ranks are linked to its first. Whoever
sees a loss tells its neighbours, and they tell theirs.
"""

from __future__ import annotations

import math
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

from slurm.peer_links import (
    Link,
    LinkLost,
    LinkRefused,
    Message,
    dial,
    listen,
    listen_locally,
)
from storage.errors import HeadraceError
from storage.job import JobExit, Peer, RankIdentity
from storage.records import ExitCode

BEAT_S = 0.5
MIN_NODES_FOR_CHORDS = 9
DEAF_S = 2.0
"""A neighbour that answered nothing for so long may be cut off, or this rank may be."""
DOUBT_S = 1.0
"""A rank that cannot tell who is gone waits so long, so that those who can have the first word."""
END_PATIENCE_S = 3.0
"""After a rank has ended without leave, the others wait so long for whoever ends them."""
RECORD_DEADLINE_S = 5.0
SAY_DEADLINE_S = 1.0
_DIAL_FIRST_S, _DIAL_LAST_S = 0.1, 5.0


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A peer is gone: the ranks leave in `patience_s`, for the reason that `text` gives."""

    text: str
    blamed_nodes: tuple[str, ...] = ()
    patience_s: float = 0.0


def strides(num_nodes: int) -> tuple[int, ...]:
    """How far along the ring each node dials.

    With the second stride news passes a thousand nodes in some thirty hops, not five hundred, and
    gets round nodes that are stopped.
    """
    if num_nodes < MIN_NODES_FOR_CHORDS:
        return (1,) if num_nodes > 1 else ()
    return (1, math.isqrt(num_nodes))


def suspects(lost: str, *, unheard_s: Mapping[str, float]) -> tuple[str, ...]:
    """The node that is gone, where the link to node `lost` fell silent; none where that is unclear.

    `unheard_s` says for how long each neighbour has been silent: a node that hears none of two may
    be cut off itself.
    """
    others = [age_s for node, age_s in unheard_s.items() if node != lost]
    return () if others and min(others) > DEAF_S else (lost,)


class Peers:
    """This rank's links. As a context manager: an orderly end inside takes leave of the others.

    Any other end leaves the links to the death of the process, which the others see.
    """

    def __init__(
        self,
        identity: RankIdentity,
        *,
        secret: str,
        host: str,
        address_of: Callable[[str], str],
        on_silence: Callable[[Loss], None],
        silence_s: float,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        """
        Args:
            secret: what only this job's ranks know.
            host: this node's address, as the others reach it.
            address_of: a node's `listens_at`, "" while it is not known; asked for two at most.
            on_silence: writes down that a node fell silent; has RECORD_DEADLINE_S.
            silence_s: how long a node's kernel may answer nothing.

        Raises:
            OSError: no socket can be opened there.
        """
        self._me = Peer(rank=identity.rank, node=identity.node)
        self._nodes = identity.nodes
        self._per_node = identity.world_size // len(identity.nodes)
        self._secret = secret
        self._address_of = address_of
        self._on_silence = on_silence
        self._silence_s = silence_s
        self._leave_with = leave
        self._is_first = identity.local_rank == 0
        self._selector = selectors.DefaultSelector()
        self._links: set[Link] = set()
        self._dialled: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._loss: Loss | None = None
        self._leave_at = float("inf")
        self._looked = time.monotonic()
        self.listens_at = ""
        if self._is_first:
            self._listen(host)

    def __enter__(self) -> Self:
        os.register_at_fork(after_in_child=self._let_go)
        threading.Thread(target=self._watch, name="peers", daemon=True).start()
        if not self._is_first:
            hub = Peer(rank=self._index * self._per_node, node=self._me.node)
            self._start_dialling(hub, lambda: self._local_name)
        for stride in strides(len(self._nodes)) if self._is_first else ():
            index = (self._index + stride) % len(self._nodes)
            ahead = Peer(rank=index * self._per_node, node=self._nodes[index])
            self._start_dialling(ahead, partial(self._address_of, ahead.node))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, JobExit) and error.code is ExitCode.RESUME):
            self.take_leave()

    def take_leave(self) -> None:
        """Tell the neighbours that this rank ends as it should, and look no more."""
        with self._lock:
            self._over.set()
            for link in tuple(self._links):
                link.send("bye")

    @property
    def neighbours(self) -> tuple[Peer, ...]:
        """Those whose end would be noticed here now."""
        linked = {link.peer for link in tuple(self._links) if link.stands and not link.has_left}
        return tuple(sorted(peer for peer in linked if peer is not None))

    def unanswering(self, *, for_s: float) -> tuple[Peer, ...]:
        """Neighbours whose process is there, and has not answered for so long."""
        now = time.monotonic()
        if now - self._looked > DEAF_S:
            return ()  # It is this rank that did not listen.
        silent = {
            link.peer
            for link in tuple(self._links)
            if link.stands and not link.has_left and now - link.heard > for_s
        }
        return tuple(sorted(peer for peer in silent if peer is not None))

    @property
    def _index(self) -> int:
        return self._nodes.index(self._me.node)

    @property
    def _local_name(self) -> str:
        """In Linux's abstract namespace: it vanishes with the process, and needs no folder."""
        return f"\0headrace-{self._secret}-{self._me.node}"

    def _listen(self, host: str) -> None:
        listeners = [listen_locally(self._local_name)] if self._per_node > 1 else []
        if len(self._nodes) > 1:
            listeners.append(listen(host))
            self.listens_at = f"{host}:{listeners[-1].getsockname()[1]}"
        for listener in listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def _start_dialling(self, peer: Peer, find: Callable[[], str]) -> None:
        threading.Thread(target=self._dial, args=(peer, find), name="dial", daemon=True).start()

    def _dial(self, peer: Peer, find: Callable[[], str]) -> None:
        """Until the peer is there: one that starts late is not dead."""
        delay_s, told = _DIAL_FIRST_S, False
        hello = {"secret": self._secret, **asdict(self._me)}
        while not self._over.wait(delay_s):
            delay_s = min(_DIAL_LAST_S, delay_s * 1.5)
            try:
                if address := find():
                    self._dialled.put(
                        dial(address, peer=peer, hello=hello, silence_s=self._silence_s)
                    )
                    return
            except (OSError, HeadraceError) as error:
                if not told and delay_s == _DIAL_LAST_S:
                    told = True
                    _say(f"no link to {peer} yet, whose death would go unnoticed: {error}")

    def _let_go(self) -> None:
        """A forked child, such as a loader of data, would hide the death of its parent."""
        for link in self._links:
            link.close()

    def _watch(self) -> None:
        while not self._over.is_set():
            until_s = max(0.0, self._leave_at - time.monotonic())
            lost = self._look(timeout_s=min(BEAT_S, until_s))
            for link, error in lost:
                self._drop(link)
                self._judge(link, error)
            if time.monotonic() >= self._leave_at:
                self._leave()
        for key in tuple(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _look(self, *, timeout_s: float) -> list[tuple[Link, LinkLost]]:
        """One round. What was lost is judged after all has been read that others sent."""
        lost = []
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.fileobj, Link):
                try:
                    for message in key.fileobj.receive():
                        self._obey(key.fileobj, message)
                except LinkLost as error:
                    lost.append((key.fileobj, error))
                except LinkRefused:
                    self._drop(key.fileobj)
            else:
                self._accept(key.fileobj)
        while not self._dialled.empty():
            self._adopt(self._dialled.get())
        for link in self._links:
            link.ask(every_s=BEAT_S)
        self._looked = time.monotonic()
        return lost

    def _accept(self, listener: Any) -> None:
        assert isinstance(listener, socket.socket)
        try:
            connection, _ = listener.accept()
            link = Link(connection, silence_s=self._silence_s)
        except OSError:
            return  # It was given up before it was taken.
        self._adopt(link)

    def _adopt(self, link: Link) -> None:
        self._links.add(link)
        self._selector.register(link, selectors.EVENT_READ)

    def _drop(self, link: Link) -> None:
        self._links.discard(link)
        self._selector.unregister(link)
        link.close()

    def _obey(self, link: Link, message: Message) -> None:
        match message.word:
            case "hello" if link.peer is None:
                if message.body.get("secret") != self._secret:
                    raise LinkRefused("not of this job")
                link.peer = Peer(rank=message.body["rank"], node=message.body["node"])
                link.send("hello", secret=self._secret, rank=self._me.rank)
            case "bye" if link.stands:
                link.has_left = True
            case "lost" if link.stands:
                _say(f"{link.peer} says: {message.body['text']}")
                self._spread(Loss(**message.body), source=link)
            case _:
                raise LinkRefused(f"{message.word!r} was not expected")

    def _judge(self, link: Link, error: LinkLost) -> None:
        if link.has_left or not link.stands or link.peer is None:
            return
        if not error.is_silent:
            text = f"{link.peer} ended without taking its leave ({error})"
            self._spread(Loss(text=text, patience_s=END_PATIENCE_S), source=link)
            return
        now = time.monotonic()
        unheard_s = {
            other.peer.node: now - other.heard
            for other in self._links
            if other.peer is not None and other.stands and other.is_remote
        }
        blamed = suspects(link.peer.node, unheard_s=unheard_s)
        gone = f"{link.peer.node} is dead or cut off"
        unclear = f"{self._me.node} hears no other node either, and may itself be cut off"
        loss = Loss(
            text=f"{self._me} lost {link.peer}, whose node acknowledged nothing for "
            f"{self._silence_s:g} s ({error}): {gone if blamed else unclear}",
            blamed_nodes=blamed,
        )
        _say(loss.text)
        if not blamed:
            time.sleep(DOUBT_S)
        # The store may be what cannot be reached: the ranks leave all the same.
        record = threading.Thread(target=self._on_silence, args=(loss,), daemon=True)
        record.start()
        record.join(RECORD_DEADLINE_S)
        self._spread(loss, source=link)

    def _spread(self, loss: Loss, *, source: Link) -> None:
        """Tell the others, unless they know of a loss that ends this rank as soon."""
        if self._loss is not None and self._loss.patience_s <= loss.patience_s:
            return
        self._loss, self._leave_at = loss, time.monotonic() + loss.patience_s
        for link in self._links - {source}:
            if link.stands:
                link.send("lost", **asdict(loss))

    def _leave(self) -> None:
        with self._lock:
            if self._over.is_set() or self._loss is None:
                return
            self._over.set()
            _say(f"leaving with {ExitCode.PEER_LOST:d}: {self._loss.text}")
            self._leave_with(ExitCode.PEER_LOST)


def _say(words: str) -> None:
    """A log that cannot be written, since its file system went with the node, holds nobody up."""
    line, whole = f"headrace: {words}\n", {"end": "", "flush": True}
    writer = threading.Thread(target=print, args=(line,), kwargs=whole, daemon=True)
    writer.start()
    writer.join(SAY_DEADLINE_S)
