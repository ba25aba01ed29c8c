"""The wire between two ranks: a socket with short messages, and what it means when it breaks.

That the other host lives is told by its kernel, which acknowledges the probes of an idle connection
whatever its processes do. So a rank that is stopped, swapped out or deaf in a long call is not
taken for dead, and a host that is gone is, after `silence_s`.
"""

from __future__ import annotations

import errno
import json
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storage.errors import HeadraceError
from storage.job import Peer

DIAL_TIMEOUT_S = 5.0
_PROBE_S = 1
_READ_BYTES = 4096
_MESSAGE_BYTES = 4096

_SILENT = frozenset(
    {
        errno.ETIMEDOUT,
        errno.EHOSTUNREACH,
        errno.EHOSTDOWN,
        errno.ENETUNREACH,
        errno.ENETDOWN,
    }
)


class LinkLost(HeadraceError):
    """The link broke. `is_silent` when nothing at the other end answers any more, not even its
    kernel; else the process there has ended."""

    def __init__(self, error: OSError | None) -> None:
        super().__init__("closed by the other end" if error is None else str(error.strerror))
        self.is_silent = error is not None and error.errno in _SILENT


class LinkRefused(HeadraceError):
    """Somebody answered who is not of this job."""


@dataclass(frozen=True)
class Message:
    """A word, and what belongs to it."""

    word: str
    body: Mapping[str, Any]


class Link:
    """One end. The end that dialled asks the other one, again and again, to answer.

    A link stands when both ends have said who they are; only a link that stood can be lost. There
    is at most one question under way, so that a rank that reads nothing for hours fills no buffer.
    """

    def __init__(
        self, connection: socket.socket, *, peer: Peer | None = None, silence_s: float
    ) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.is_remote = connection.family != socket.AF_UNIX
        if self.is_remote:
            _probe(connection, silence_s=silence_s)
        self.peer = peer
        self.stands = peer is not None
        self.has_left = False
        self.heard = time.monotonic()
        self._dialled = peer is not None
        self._is_asked = False
        self._asked = 0.0
        self._rest = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def send(self, word: str, **body: Any) -> None:
        # What cannot be sent is found out by reading.
        try:
            self.socket.send(f"{word} {json.dumps(body)}\n".encode())
        except OSError:
            return

    def ask(self, *, every_s: float) -> None:
        """A question, where this end is the one to ask and the last one was answered."""
        now = time.monotonic()
        if self._dialled and not self._is_asked and now - self._asked >= every_s:
            self._is_asked, self._asked = True, now
            self.send("ping")

    def receive(self) -> list[Message]:
        """What came, without questions and answers to them, which are dealt with here.

        Raises:
            LinkLost: the link is broken, and all that came before has been received.
        """
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkLost(error) from None
        if not data:
            raise LinkLost(None)
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MESSAGE_BYTES:
            raise LinkRefused("a message without an end")
        return [message for line in lines if (message := self._take(_parse(line))) is not None]

    def _take(self, message: Message) -> Message | None:
        if message.word == "pong":
            self._is_asked = False
            return None
        if message.word == "ping":
            self.stands = self.peer is not None
            self.send("pong")
            return None
        return message


def dial(address: str, *, peer: Peer, hello: Mapping[str, Any], silence_s: float) -> Link:
    """A standing link to `peer`, at `host:port` or at the name of a socket of this host.

    Raises:
        OSError: nobody is there, or nobody answered in time.
        LinkRefused: somebody else is.
    """
    connection = _connect(address)
    try:
        connection.settimeout(DIAL_TIMEOUT_S)
        connection.sendall(f"hello {json.dumps(hello)}\n".encode())
        line = b""
        while not line.endswith(b"\n"):
            data = connection.recv(1)
            if not data or len(line) > _MESSAGE_BYTES:
                raise LinkRefused(f"{address} is not {peer}")
            line += data
        answer = _parse(line)
        expected = {"secret": hello["secret"], "rank": peer.rank}
        if answer.word != "hello" or {**answer.body} != expected:
            raise LinkRefused(f"{address} is not {peer}")
        return Link(connection, peer=peer, silence_s=silence_s)
    except BaseException:
        connection.close()
        raise


def listen(host: str) -> socket.socket:
    """A listening socket at a free port of one of this host's addresses."""
    family = socket.getaddrinfo(host, None)[0][0]
    listener = socket.create_server((host, 0), family=family)
    listener.setblocking(False)
    return listener


def listen_locally(name: str) -> socket.socket:
    """A listening socket that only this host reaches."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen()
    listener.setblocking(False)
    return listener


def _connect(address: str) -> socket.socket:
    if address.startswith("\0"):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
        except BaseException:
            connection.close()
            raise
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DIAL_TIMEOUT_S)


def _probe(connection: socket.socket, *, silence_s: float) -> None:
    """Let the kernel ask the other kernel every second, and give up after `silence_s`.

    The second bound holds when something is under way that nobody acknowledges.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _PROBE_S),
        (socket.TCP_KEEPINTVL, _PROBE_S),
        (socket.TCP_KEEPCNT, math.ceil(silence_s / _PROBE_S)),
        (socket.TCP_USER_TIMEOUT, math.ceil(silence_s * 1000)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _parse(line: bytes) -> Message:
    """The message in a line; an empty one where it is none."""
    word, _, rest = line.decode(errors="replace").partition(" ")
    try:
        body = json.loads(rest)
    except ValueError:
        body = None
    return Message(word, body) if isinstance(body, dict) else Message("", {})
