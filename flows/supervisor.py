"""The foreground process of `headrace serve`: a Prefect server and a worker, kept alive together.

The worker is a child in a session of its own, so that Ctrl-C in a terminal reaches neither it nor
the flow runs below it; they are told to end by name, or not at all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from flows.home import SERVER, WORKER, Child, Home, ProcessRef, ServerRecord
from flows.server import (
    HOST,
    POLL_S,
    POOL,
    START_TIMEOUT_S,
    Say,
    ServerUnavailableError,
    client_settings,
    end_children,
    free_port,
    import_settings,
    is_healthy,
    listens,
    require_port,
    server_settings,
    tail,
)
from storage.file_locks import FileLock

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
STEADY_AFTER_S = 120.0


@dataclass(kw_only=True)
class _Service:
    """One child process, started again when it ends by itself, ever more slowly."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    delay_s: float = 0.0

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        self.started_at = time.monotonic()

    @property
    def child(self) -> Child | None:
        if self.process is None or self.process.poll() is not None:
            return None
        return Child(name=self.name, process=ProcessRef.of(self.process.pid))

    def listens(self, port: int) -> bool:
        process = self.child.process.find() if self.child is not None else None
        return process is not None and listens(process, port)

    def is_due(self) -> bool:
        """Whether it has ended and its pause is over."""
        assert self.process is not None
        if self.process.poll() is None:
            if time.monotonic() - self.started_at > STEADY_AFTER_S:
                self.delay_s = 0.0
            return False
        return time.monotonic() - self.started_at > self.delay_s

    def restart(self) -> None:
        self.delay_s = min(max(self.delay_s * 2, FIRST_DELAY_S), LONGEST_DELAY_S)
        self.start()


class Supervisor:
    """Serves one home until it is told to stop."""

    def __init__(self, home: Home, *, say: Say, port: int | None = None) -> None:
        self._home = home
        self._say = say
        self._port = port
        self._stop = threading.Event()

    def serve(self) -> None:
        """Start everything, say where it is, and keep it running until SIGTERM or SIGINT.

        Raises:
            ServerUnavailableError: another one serves this home, or the server does not come up.
        """
        self._home.make()
        with FileLock(self._home.lock) as lock:
            if not lock.try_acquire():
                raise ServerUnavailableError(
                    f"a `headrace serve` of {self._home.folder} is running already; "
                    "use it, or end it with `headrace serve --stop`"
                )
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)
            last = self._home.read_record()
            if last is not None:
                end_children(last.children)
            self._serve(last)

    def _serve(self, last: ServerRecord | None) -> None:
        if self._port is not None:
            port = require_port(self._port)
        else:
            port = free_port(preferred=last.port if last else None)
        api_url = f"http://{HOST}:{port}/api"
        record = ServerRecord(api_url=api_url, supervisor=ProcessRef.of(os.getpid()))
        server = _Service(
            name=SERVER,
            command=_prefect("server", "start", "--host", HOST, "--port", str(port)),
            environment=server_settings(self._home, api_url=api_url),
            log=self._home.prefect_log,
        )
        worker = _Service(
            name=WORKER,
            command=_prefect("worker", "start", "--type", "process", "--pool", POOL),
            environment=client_settings(self._home, api_url=api_url) | import_settings(),
            log=self._home.prefect_log,
        )
        try:
            server.start()
            self._remember(record, server)
            os.environ.update(client_settings(self._home, api_url=api_url))
            # While the server starts: this takes seconds, too.
            from flows.deploy import deploy_all

            self._wait_until_healthy(record, server)
            if not self._stop.is_set():
                deploy_all()
                worker.start()
                record = replace(record, ready=True)
                self._remember(record, server, worker)
                self._say_where(record)
            self._watch(record, server, worker)
        finally:
            children = [child for child in (worker.child, server.child) if child is not None]
            end_children(children)
            self._home.write_record(replace(record, children=(), ready=False))

    def _watch(self, record: ServerRecord, *services: _Service) -> None:
        while not self._stop.wait(POLL_S):
            for service in services:
                if service.is_due():
                    self._say(f"the {service.name} ended by itself; starting it again")
                    service.restart()
                    self._remember(record, *services)

    def _remember(self, record: ServerRecord, *services: _Service) -> None:
        children = tuple(child for service in services if (child := service.child) is not None)
        self._home.write_record(replace(record, children=children))

    def _wait_until_healthy(self, record: ServerRecord, server: _Service) -> None:
        """Until our own server answers: another's at its port must never see our password."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (server.listens(record.port) and is_healthy(record.api_url)):
            if self._stop.is_set():
                return
            if server.child is None or time.monotonic() > deadline:
                raise ServerUnavailableError(
                    "the Prefect server did not come up; "
                    f"the end of {self._home.prefect_log}:\n{tail(self._home.prefect_log)}"
                )
            time.sleep(POLL_S)

    def _say_where(self, record: ServerRecord) -> None:
        self._say(f"Prefect is at {record.ui_url}")
        self._say(f"It asks for an authentication string: the line in {self._home.auth}")
        self._say('For the command `prefect` in a shell: eval "$(headrace serve --env)"')
        self._say(f"Deployments run by the worker of the pool `{POOL}`. Ctrl-C or SIGTERM stops.")
        kind = self._home.on_network()
        if kind is not None:
            self._say(
                f"{self._home.folder} is on {kind}, where SQLite is slow and may lock; "
                "name a local folder in HEADRACE_HOME"
            )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._stop.set()


def _prefect(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "prefect", *arguments]
