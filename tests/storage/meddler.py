"""A small HTTP proxy in front of a real S3 server that spoils what a test tells it to spoil."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "expect", "server", "date"}


@dataclass(frozen=True)
class Asked:
    """A request as it came in; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    def without(self, *names: str) -> Asked:
        kept = {name: value for name, value in self.headers.items() if name not in names}
        return replace(self, headers=kept)


@dataclass(frozen=True)
class Answered:
    """An answer; `promised_bytes` lets it promise more bytes than it sends."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    promised_bytes: int | None = None


Forward = Callable[[Asked], Answered]
Rule = Callable[[Asked, Forward], Answered]


class Meddler:
    """`rule` decides on each request; by default everything is forwarded as it came."""

    def __init__(self, upstream_url: str | None) -> None:
        self.upstream = urlsplit(upstream_url).netloc if upstream_url else None
        self.rule: Rule = lambda asked, forward: forward(asked)
        self.seen: list[Asked] = []
        self.endpoint_url = ""
        self._forwarding = threading.Lock()

    def forward(self, asked: Asked) -> Answered:
        """One request at a time: moto looks, then writes, so two writers in a race may both win."""
        assert self.upstream is not None
        upstream = http.client.HTTPConnection(self.upstream, timeout=30)
        with self._forwarding, closing(upstream) as connection:
            connection.request(asked.method, asked.path, body=asked.body, headers={**asked.headers})
            answer = connection.getresponse()
            headers = {
                name: value
                for name, value in answer.getheaders()
                if name.lower() not in _HOP_BY_HOP - {"date"}
            }
            length = answer.getheader("Content-Length")
            promised = int(length) if asked.method == "HEAD" and length else None
            return Answered(answer.status, headers, answer.read(), promised)

    @contextmanager
    def serving(self) -> Iterator[Meddler]:
        meddler = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {
                    name.lower(): value
                    for name, value in self.headers.items()
                    if name.lower() not in _HOP_BY_HOP
                }
                asked = Asked(self.command, self.path, headers, body)
                meddler.seen.append(asked)
                answer = meddler.rule(asked, meddler.forward)
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                promised = answer.promised_bytes
                self.send_header(
                    "Content-Length", str(len(answer.body) if promised is None else promised)
                )
                self.end_headers()
                self.wfile.write(answer.body)
                self.close_connection = promised is not None

            def log_message(self, format: str, *args: object) -> None:
                """The tests' output is no access log."""

        for method in ("GET", "PUT", "POST", "HEAD", "DELETE"):
            setattr(Handler, f"do_{method}", Handler.handle_any)
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        self.endpoint_url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
