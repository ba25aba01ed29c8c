"""The object store for those who name none: one SeaweedFS process, started on demand.

It outlives whoever started it, since jobs go on using it, and comes back on the same address with
the same data after a crash, since running jobs know no other. Whether it lives is told by a file
lock that only the server itself holds: neither a `kill -9` of its starter at any line nor a process
id that was given away again can deceive that.
"""

from __future__ import annotations

import configparser
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import psutil

from storage.embedded_ports import Ports, choose_ports, remove_sockets, require_own_address
from storage.embedded_process import find_binary, find_process, spawn
from storage.errors import StoreError
from storage.file_locks import FileLock, holding
from storage.object_store import ObjectStore
from storage.spec import StoreSpec

PROFILE = "headrace-embedded"
START_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 10.0
START_TRIES = 3
# After this it only waits for idle connections: what was acknowledged is on disk.
TERMINATE_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 20.0
EXIT_TIMEOUT_S = 2.0
# How far a listing is searched for an object with bytes to read.
MOST_EMPTY_OBJECTS = 10
LOCK_TIMEOUT_S = 120.0
LOG_BYTES = 16 * 2**20
LOG_TAIL_BYTES = 3000
FREE_BYTES = 256 * 2**20
# Below one percent SeaweedFS makes its volumes read-only.
FREE_FRACTION = 0.015


@dataclass(frozen=True)
class Endpoint:
    """Where a running embedded server is reached, and with which credentials."""

    endpoint_url: str
    bucket: str
    credentials_file: Path
    profile: str


@dataclass(frozen=True)
class EmbeddedStatus:
    """What `status` found; the address is the last known one while the server is down."""

    running: bool
    pid: int | None
    endpoint_url: str | None


@dataclass(frozen=True)
class _Record:
    """Where the newest server of a directory listens; written before that server is started."""

    hostname: str
    host: str
    ports: Ports

    @property
    def endpoint_url(self) -> str:
        return f"http://{self.host}:{self.ports.s3}"


class _DiedError(Exception):
    """The server ended before it answered; its ports may have been taken in between."""


@dataclass(frozen=True)
class EmbeddedStore:
    """The server of one directory. Any number of processes may hold one of these at once."""

    directory: Path
    host: str
    bucket: str

    def ensure(self) -> Endpoint:
        """The address of a server that answers, which is started where none runs.

        Raises StoreError, with the end of the server's log, when there is none to be had.
        """
        self._make_directory()
        with holding(self._path("start.lock"), timeout_s=LOCK_TIMEOUT_S):
            last = self._read_record()
            if not self._alive():
                self._make_credentials()
                return self._start(last)
            if last is None or last.host != self.host:
                raise StoreError(
                    f"the embedded store in {str(self.directory)!r} already serves at "
                    f"{'an unknown address' if last is None else last.host}, not at "
                    f"store.embedded.host {self.host!r}; stop it first, or name another "
                    "`store.embedded.directory`"
                )
            if last.hostname == socket.gethostname():
                # Of one whose address is gone no answer has to be awaited.
                require_own_address(self.host)
            try:
                return self._wait_ready(last)
            except _DiedError:
                return self._start(last)

    @contextmanager
    def in_use(self) -> Iterator[Endpoint]:
        """A running server that no `stop_if_unused`, of any process, stops during the block."""
        self._make_directory()
        with holding(self._path("users.lock"), shared=True, timeout_s=LOCK_TIMEOUT_S):
            yield self.ensure()

    def stop_if_unused(self) -> bool:
        """Stops the server unless somebody is inside `in_use`; returns whether it is down now."""
        if not self.directory.exists():
            return True
        with (
            holding(self._path("start.lock"), timeout_s=LOCK_TIMEOUT_S),
            FileLock(self._path("users.lock")) as users,
        ):
            if not users.try_acquire():
                return False
            self._stop()
            return True

    def stop(self) -> None:
        """Stops the server whoever uses it; data, address and credentials stay for the next."""
        if self.directory.exists():
            with holding(self._path("start.lock"), timeout_s=LOCK_TIMEOUT_S):
                self._stop()

    def status(self) -> EmbeddedStatus:
        """Whether the server runs, and where; changes nothing."""
        last = self._read_record()
        if last is None:
            return EmbeddedStatus(running=False, pid=None, endpoint_url=None)
        process = find_process(self._path("data"))
        return EmbeddedStatus(
            running=self._alive(),
            pid=None if process is None else process.pid,
            endpoint_url=last.endpoint_url,
        )

    def _path(self, name: str) -> Path:
        return self.directory.resolve() / name

    def _make_directory(self) -> None:
        try:
            self._path("data").mkdir(parents=True, exist_ok=True)
            self.directory.chmod(0o700)
        except OSError as error:
            raise StoreError(
                f"the embedded store cannot use its directory {str(self.directory)!r}: {error}; "
                "name a folder that can be written in `workdir`, or in `store.embedded.directory`"
            ) from error

    def _alive(self) -> bool:
        with FileLock(self._path("alive.lock")) as lock:
            return not lock.try_acquire(shared=True)

    def _start(self, last: _Record | None) -> Endpoint:
        binary = find_binary()
        require_own_address(self.host)
        if last is None:
            # Not for what holds data already: a full disk must come back to be read and pruned.
            self._require_space()
        preferred = last.ports if last is not None and last.host == self.host else None
        for _ in range(START_TRIES):
            record = _Record(
                hostname=socket.gethostname(),
                host=self.host,
                ports=choose_ports(preferred=preferred),
            )
            _write_private(self._path("server.json"), json.dumps(asdict(record)))
            self._spawn(binary, record)
            try:
                return self._wait_ready(record)
            except _DiedError:
                remove_sockets(record.ports)
                preferred = None
        raise StoreError(
            f"the embedded store in {str(self.directory)!r} ended {START_TRIES} times while it "
            f"started; its log ends with:\n{self._log_tail()}"
        )

    def _spawn(self, binary: Path, record: _Record) -> None:
        log = self._path("server.log")
        if log.exists() and log.stat().st_size > LOG_BYTES:
            log.replace(log.with_name("server.log.1"))
        access_key, secret_key = self._read_credentials()
        with log.open("ab") as output, FileLock(self._path("alive.lock")) as alive:
            alive.acquire(timeout_s=KILL_TIMEOUT_S)
            spawn(
                binary,
                data=self._path("data"),
                host=record.host,
                ports=record.ports,
                bucket=self.bucket,
                access_key=access_key,
                secret_key=secret_key,
                log=output,
                inherited_lock=alive.fileno(),
            )

    def _wait_ready(self, record: _Record) -> Endpoint:
        """Waits until it really serves. Raises _DiedError, and StoreError at the deadline."""
        endpoint = Endpoint(
            endpoint_url=record.endpoint_url,
            bucket=self.bucket,
            credentials_file=self._path("credentials"),
            profile=PROFILE,
        )
        store = ObjectStore(
            StoreSpec(
                bucket=endpoint.bucket,
                endpoint_url=endpoint.endpoint_url,
                credentials_file=endpoint.credentials_file,
                profile=endpoint.profile,
                connect_timeout_s=2.0,
                read_timeout_s=READ_TIMEOUT_S,
                max_attempts=1,
            )
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            alive = self._alive()
            try:
                _exercise(store)
            except StoreError as error:
                if not alive:
                    raise _DiedError from error
                if time.monotonic() >= deadline:
                    raise StoreError(
                        f"the embedded store in {str(self.directory)!r} runs on "
                        f"{record.hostname} but does not serve this host after "
                        f"{START_TIMEOUT_S:g} s: {error}; its log ends with:\n{self._log_tail()}"
                    ) from error
            else:
                store.close()
                return endpoint
            time.sleep(0.1)

    def _stop(self) -> None:
        record = self._read_record()
        if record is None:
            return
        if self._alive():
            process = find_process(self._path("data"))
            if process is not None:
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
                    if not self._wait_down(TERMINATE_TIMEOUT_S):
                        process.kill()
            # One that was killed already is no longer found, but may hold the lock for a moment.
            if not self._wait_down(KILL_TIMEOUT_S if process is not None else EXIT_TIMEOUT_S):
                raise StoreError(
                    f"the embedded store in {str(self.directory)!r} runs on {record.hostname} and "
                    "cannot be stopped from here: "
                    + (
                        "stop it on that host"
                        if process is None
                        else f"its process {process.pid} outlives SIGKILL, so look at its disk"
                    )
                )
        remove_sockets(record.ports)

    def _wait_down(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._alive():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def _require_space(self) -> None:
        usage = shutil.disk_usage(self._path("data"))
        needed = max(FREE_BYTES, int(FREE_FRACTION * usage.total))
        if usage.free < needed:
            raise StoreError(
                f"the embedded store in {str(self.directory)!r} has {usage.free / 2**20:.0f} MiB "
                f"of free space and needs {needed / 2**20:.0f} MiB; make room, or name another "
                "`workdir`, or `store.embedded.directory`"
            )

    def _make_credentials(self) -> None:
        path = self._path("credentials")
        if not path.exists():
            access_key = f"HEADRACE{secrets.token_hex(6).upper()}"
            secret_key = secrets.token_urlsafe(32)
            _write_private(
                path,
                f"[{PROFILE}]\naws_access_key_id = {access_key}\n"
                f"aws_secret_access_key = {secret_key}\n",
            )

    def _read_credentials(self) -> tuple[str, str]:
        path = self._path("credentials")
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(path.read_text())
            return parser[PROFILE]["aws_access_key_id"], parser[PROFILE]["aws_secret_access_key"]
        except (OSError, configparser.Error, KeyError) as error:
            raise StoreError(
                f"the embedded store's credentials {str(path)!r} cannot be read: "
                f"{' '.join(str(error).split())}; stop the server, if it runs, and remove the "
                "file: new ones are made"
            ) from None

    def _read_record(self) -> _Record | None:
        path = self._path("server.json")
        try:
            found = json.loads(path.read_text())
            return _Record(
                hostname=found["hostname"], host=found["host"], ports=Ports(**found["ports"])
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"the embedded store's record {str(path)!r} cannot be read: {error!r}; end the "
                "`weed` process of this directory if there is one, then remove the file"
            ) from error

    def _log_tail(self) -> str:
        log = self._path("server.log")
        if not log.exists():
            return "(there is no log)"
        return log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()


def store_of(spec: StoreSpec, *, workdir: Path) -> EmbeddedStore | None:
    """The embedded server that a spec asks for, not started; None when it names a store."""
    if not spec.is_embedded:
        return None
    directory = spec.embedded.directory or workdir / "store"
    return EmbeddedStore(directory=directory, host=spec.embedded.host, bucket=spec.bucket)


def resolve(spec: StoreSpec, *, workdir: Path) -> StoreSpec:
    """A spec that `ObjectStore` takes: unchanged, or with the address of the embedded server.

    Starts that server where it does not run. Raises StoreError.
    """
    embedded = store_of(spec, workdir=workdir)
    return spec if embedded is None else resolved(spec, embedded.ensure())


def resolved(spec: StoreSpec, endpoint: Endpoint) -> StoreSpec:
    """The spec with the address and the credentials of the embedded server filled in."""
    return spec.model_copy(
        update={
            "endpoint_url": endpoint.endpoint_url,
            "credentials_file": endpoint.credentials_file,
            "profile": endpoint.profile,
        }
    )


def _exercise(store: ObjectStore) -> None:
    """Reads one object, after writing it where there is none. Raises StoreError while that fails.

    A listing is not enough: it comes from another part of the server than the bytes.
    """
    store.ensure_bucket()
    for stored in islice(store.list(""), MOST_EMPTY_OBJECTS):
        if stored.size_bytes > 0:
            store.get_range(stored.key, start=0, length=1)
            return
    key = f"headrace-starts-{secrets.token_hex(8)}"
    store.put(key, key.encode())
    store.get(key)
    for failure in store.delete([key]):
        raise StoreError(f"cannot delete {key!r}: {failure.code} {failure.message}")


def _write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner reads, whole or not at all."""
    staged = path.with_name(f"{path.name}.{os.getpid()}")
    staged.unlink(missing_ok=True)
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)
