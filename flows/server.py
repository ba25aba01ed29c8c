"""The Prefect server of one person: started with the right settings, found again, stopped.

By default Prefect's server asks nobody who they are, reports home, and its client silently starts a
second one; on a shared login node the first lets anybody run code as its user. So everything here
goes through `server_settings` and `client_settings`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from flows.home import WORKER, Child, Home, ServerRecord
from headrace import application_folder, command
from storage.errors import HeadraceError

HOST = "127.0.0.1"
POOL = "headrace"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.2

Say = Callable[[str], None]

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    # Where no server is named, an error is better than a hidden one that costs 13 s.
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    # `uv`, where it is installed, would otherwise install this project's dependencies anew.
    "PREFECT_RUNNER_AUTO_INSTALL_DEPENDENCIES": "false",
    "PREFECT_CLI_PROMPT": "false",
}


class ServerUnavailableError(HeadraceError):
    """No Prefect server could be started or found."""


def import_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment in which the five packages are found first, and the working directory's never."""
    folders = [str(application_folder()), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(folder for folder in folders if folder)),
        "PYTHONSAFEPATH": "1",
    }


def client_settings(home: Home, *, api_url: str) -> dict[str, str]:
    """Environment of everything that talks to this person's server."""
    return QUIET | {
        "PREFECT_API_URL": api_url,
        "PREFECT_API_AUTH_STRING": home.auth_string(),
        "PREFECT_HOME": str(home.prefect),
        "PREFECT_CLIENT_MAX_RETRIES": "60",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "60",
        "PREFECT_WORKER_QUERY_SECONDS": "5",
    }


def shell_lines(home: Home, *, api_url: str) -> list[str]:
    """Lines that make a shell talk to this server; the password is named by its file."""
    settings = client_settings(home, api_url=api_url)
    password = "PREFECT_API_AUTH_STRING"
    lines = [
        f"export {name}={shlex.quote(value)}"
        for name, value in settings.items()
        if name != password
    ]
    return [*lines, f'export {password}="$(cat {shlex.quote(str(home.auth))})"']


def server_settings(home: Home, *, api_url: str) -> dict[str, str]:
    """Environment of the server itself."""
    return client_settings(home, api_url=api_url) | {
        "PREFECT_SERVER_API_AUTH_STRING": home.auth_string(),
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        # By default it unpacks its pages into site-packages.
        "PREFECT_UI_STATIC_DIRECTORY": str(home.prefect / "ui"),
    }


def find_server(home: Home) -> ServerRecord | None:
    """The server of this home that answers now."""
    if not home.is_served():
        return None
    record = home.read_record()
    # A supervisor that was killed leaves a record, and maybe a server that its successor ends soon.
    if record is None or not record.ready or record.supervisor.find() is None:
        return None
    return record if is_healthy(record.api_url) else None


def is_healthy(api_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{api_url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def connect(home: Home, *, say: Say) -> str:
    """Point this process, before it imports Prefect, at a server; returns the address of its UI.

    Raises:
        ServerUnavailableError: none is named by PREFECT_API_URL, and none could be started.
    """
    named = os.environ.get("PREFECT_API_URL")
    if named:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        return os.environ.get("PREFECT_UI_URL") or named.removesuffix("/api")
    record = ensure_server(home, say=say)
    os.environ.update(client_settings(home, api_url=record.api_url))
    return record.ui_url


def ensure_server(home: Home, *, say: Say, port: int | None = None) -> ServerRecord:
    """The server of this home, started in the background, at `port`, where none runs.

    Raises:
        ServerUnavailableError: it did not come up.
    """
    found = find_server(home)
    if found is not None:
        return found
    started = None
    if not home.is_served():
        say("Starting a Prefect server in the background (`headrace serve --stop` ends it).")
        started = _start_in_background(home, port=port)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        found = find_server(home)
        if found is not None:
            return found
        if started is not None and started.poll() is not None:
            break
        time.sleep(POLL_S)
    raise ServerUnavailableError(
        f"the Prefect server of {home.folder} did not come up; "
        f"the end of {home.log}:\n{tail(home.log)}"
    )


def stop_server(home: Home) -> bool:
    """End worker and server, and whoever watches over them; flow runs and their jobs go on.

    Returns whether anything ran.
    """
    record = home.read_record()
    if record is None:
        return False
    supervisor = record.supervisor.find()
    if supervisor is not None:
        supervisor.terminate()
        psutil.wait_procs([supervisor], timeout=STOP_TIMEOUT_S)
    return end_children(record.children) or supervisor is not None


def end_children(children: Sequence[Child]) -> bool:
    """End those of `children` that live; returns whether any did.

    A worker is killed, since one that is told to end takes its flow runs with it.
    """
    living = [(child, process) for child in children if (process := child.process.find())]
    for child, process in living:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill() if child.name == WORKER else process.terminate()
    _, late = psutil.wait_procs([process for _, process in living], timeout=STOP_TIMEOUT_S)
    for process in late:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return bool(living)


def free_port(*, preferred: int | None) -> int:
    """`preferred` when it is free, else any port that is; another process may be faster."""
    for port in (preferred, 0):
        found = None if port is None else _bound(port)
        if found is not None:
            return found
    raise ServerUnavailableError(
        f"{HOST} has no free port; end some of the programs that listen there"
    )


def require_port(port: int) -> int:
    """`port`, which can be bound.

    Raises:
        ServerUnavailableError: something, maybe the server of another home, listens there.
    """
    if _bound(port) is None:
        raise ServerUnavailableError(
            f"port {port} of {HOST} is in use by another program, maybe by the server of another "
            "HEADRACE_HOME; end that one, give another --port, or leave --port out for a free one"
        )
    return port


def listens(process: psutil.Process, port: int) -> bool:
    """Whether this process, or one below it, is the one that listens at `port`."""
    try:
        return any(
            one.status == psutil.CONN_LISTEN and one.laddr.port == port
            for member in (process, *process.children(recursive=True))
            for one in member.net_connections(kind="tcp")
        )
    except psutil.NoSuchProcess:
        return False


def _bound(port: int) -> int | None:
    """The port that a socket was bound to for a moment; None where that is refused."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return None
        return int(probe.getsockname()[1])


def _start_in_background(home: Home, *, port: int | None) -> subprocess.Popen[bytes]:
    home.make()
    options = [] if port is None else ["--port", str(port)]
    with home.log.open("ab") as log:
        return subprocess.Popen(
            command("serve", *options),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def tail(path: Path, *, lines: int = 20) -> str:
    if not path.exists():
        return "(nothing)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
