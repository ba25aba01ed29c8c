"""What saving costs its clients: processor time, memory, requests. The server is left out."""

from __future__ import annotations

import http.client
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import psutil

SAMPLE_S = 0.2
COPY_BYTES = 2**20
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
_HOP_BY_HOP = frozenset({"connection", "expect", "keep-alive", "transfer-encoding"})


def family(pids: Iterable[int]) -> list[psutil.Process]:
    """These processes and all that they started."""
    found = {}
    for pid in pids:
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            found[one.pid] = one
    return list(found.values())


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of the family so far, of those that have ended, too."""
    total = 0.0
    for process in family(pids):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def memory_bytes(pids: Iterable[int]) -> int:
    """Resident memory of the family, shared memory included; what several map counts once."""
    total = 0
    for process in family(pids):
        with suppress(OSError):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total += sum(int(kib) for kib in _PSS.findall(text)) * 1024
    return total


class MemorySampler:
    """The most memory that the family held at once while this was open."""

    def __init__(self, pids: list[int]) -> None:
        self.peak_bytes = 0
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._pids:
            self.peak_bytes = max(self.peak_bytes, memory_bytes(self._pids))
            if self._over.wait(SAMPLE_S):
                return


class RequestCounter:
    """A proxy before the store that counts requests, by the phase that a client named last."""

    def __init__(self, upstream_url: str) -> None:
        self.counts: Counter[str] = Counter()
        self.url = ""
        self._upstream = urlsplit(upstream_url).netloc
        self._phase = "start"

    @contextmanager
    def serving(self) -> Iterator[Self]:
        counter = self

        class Handler(_Forwarding):
            upstream = counter._upstream

            def is_for_the_store(self) -> bool:
                if self.path.startswith("/-/"):
                    counter._phase = self.path.removeprefix("/-/")
                    return False
                counter.counts[counter._phase] += 1
                return True

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Forwarding(BaseHTTPRequestHandler):
    """Passes requests on as they came, since their signatures cover the host's name."""

    protocol_version = "HTTP/1.1"
    upstream = ""

    def is_for_the_store(self) -> bool:
        raise NotImplementedError

    def handle_any(self) -> None:
        if not self.is_for_the_store():
            self.send_response_only(204)
            self.end_headers()
            return
        with _connected(self.upstream) as store:
            store.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP_BY_HOP:
                    store.putheader(name, value)
            store.endheaders()
            left = int(self.headers.get("Content-Length", 0))
            while left:
                piece = self.rfile.read(min(left, COPY_BYTES))
                store.send(piece)
                left -= len(piece)
            answer = store.getresponse()
            self.send_response_only(answer.status)
            length = answer.getheader("Content-Length")
            body = answer.read() if length is None else b""
            for name, value in answer.getheaders():
                if name.lower() not in _HOP_BY_HOP:
                    self.send_header(name, value)
            if length is None:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            while piece := answer.read(COPY_BYTES):
                self.wfile.write(piece)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """What passes is counted, not told."""


@contextmanager
def _connected(address: str) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(address, timeout=120)
    try:
        yield connection
    finally:
        connection.close()
