"""Free ports for the embedded server, which needs ten of them and tells nobody when two overlap."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from storage.errors import StoreError

GRPC_OFFSET = 10_000
LOWEST_PORT = 10_240
# Above this the gRPC twin of a port would lie in Linux's range of ephemeral ports.
HIGHEST_PORT = 22_767
_TRIES = 200
EXIT_S = 2.0
# SeaweedFS puts these sockets here whatever TMPDIR says, and two servers with the same port number
# on different addresses, or in different network namespaces, would take them from each other.
_SOCKET_FOLDER = Path("/tmp")


@dataclass(frozen=True)
class Ports:
    """The HTTP ports of the server's parts; each part also has a gRPC port 10,000 above."""

    s3: int
    master: int
    volume: int
    filer: int
    admin: int


def require_own_address(host: str) -> None:
    """Raises StoreError unless `host` is one address of this machine that others can be told."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            wildcard = probe.getsockname()[0] == "0.0.0.0"
    except OSError as error:
        raise StoreError(
            f"store.embedded.host {host!r} is no IPv4 address of this machine ({error}); name one "
            "that `ip address` shows here"
        ) from error
    if wildcard:
        raise StoreError(
            f"store.embedded.host {host!r} would serve every network and is no address that a job "
            "could be told; name one address of this machine"
        )


def choose_ports(*, preferred: Ports | None) -> Ports:
    """The preferred ports when all of them are free, else others; another process may be faster.

    A server that was killed a moment ago gives its lock up before its ports: these are waited for.
    """
    if preferred is not None and _all_free_within(preferred, seconds=EXIT_S):
        return preferred
    count = len(fields(Ports))
    for _ in range(_TRIES):
        first = random.randint(LOWEST_PORT, HIGHEST_PORT - count + 1)
        ports = Ports(*range(first, first + count))
        if _all_free(ports):
            return ports
    raise StoreError(
        f"no {count} neighbouring ports are free between {LOWEST_PORT} and {HIGHEST_PORT}, with "
        f"those {GRPC_OFFSET} above; end some of the programs that listen there"
    )


def remove_sockets(ports: Ports) -> None:
    """Removes the socket files that a stopped server left, not those of one that came after it."""
    for port in _with_grpc(ports):
        for path in filter(_is_stale, _socket_files(port)):
            path.unlink(missing_ok=True)


def _with_grpc(ports: Ports) -> Iterator[int]:
    for port in astuple(ports):
        yield port
        yield port + GRPC_OFFSET


def _all_free_within(ports: Ports, *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not _all_free(ports):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _all_free(ports: Ports) -> bool:
    return all(_is_free(port) for port in _with_grpc(ports))


def _is_free(port: int) -> bool:
    # The wildcard address, so that a listener on any single address counts as well; with
    # SO_REUSEADDR closed connections that linger after a crash do not.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return all(_is_stale(path) for path in _socket_files(port))


def _socket_files(port: int) -> list[Path]:
    return list(_SOCKET_FOLDER.glob(f"seaweedfs-*-{port}.sock"))


def _is_stale(path: Path) -> bool:
    """Whether a socket file is our own and nobody listens on it, so that it may be replaced."""
    try:
        if path.stat().st_uid != os.getuid():
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False
