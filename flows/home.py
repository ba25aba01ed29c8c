"""Where Headrace keeps what belongs to a person and not to a run: the Prefect server's state.

Where homes are on NFS, HEADRACE_HOME should name a local folder: SQLite and file locks suffer
there.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import TypeAdapter, ValidationError

from storage.errors import HeadraceError, SpecError
from storage.file_locks import FileLock

VARIABLE = "HEADRACE_HOME"
SERVER = "server"
WORKER = "worker"
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph"}
)


@dataclass(frozen=True, kw_only=True)
class ProcessRef:
    """A process is its id *and* its start: ids are reused."""

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> ProcessRef:
        return cls(pid=pid, created=psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < 1.0
            lives = same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if lives else None


@dataclass(frozen=True, kw_only=True)
class Child:
    """A process that `headrace serve` watches over."""

    name: str
    process: ProcessRef


@dataclass(frozen=True, kw_only=True)
class ServerRecord:
    """What a running `headrace serve` lets others know."""

    api_url: str
    supervisor: ProcessRef
    children: tuple[Child, ...] = ()
    ready: bool = False

    @property
    def ui_url(self) -> str:
        return self.api_url.removesuffix("/api")

    @property
    def port(self) -> int:
        return int(self.ui_url.rpartition(":")[2])


_RECORD = TypeAdapter(ServerRecord)


@dataclass(frozen=True, kw_only=True)
class Home:
    """The folder, and what lies where in it."""

    folder: Path

    @classmethod
    def of_user(cls, environ: Mapping[str, str] = os.environ) -> Home:
        named = environ.get(VARIABLE)
        if named:
            return cls(folder=Path(named).expanduser().absolute())
        state = environ.get("XDG_STATE_HOME") or "~/.local/state"
        return cls(folder=Path(state).expanduser() / "headrace")

    @property
    def prefect(self) -> Path:
        return self.folder / "prefect"

    @property
    def auth(self) -> Path:
        return self.folder / "auth"

    @property
    def log(self) -> Path:
        return self.folder / "serve.log"

    @property
    def prefect_log(self) -> Path:
        return self.folder / "prefect.log"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def record(self) -> Path:
        return self.folder / "serve.json"

    @property
    def lock(self) -> Path:
        return self.folder / "serve.lock"

    def make(self) -> None:
        """Create the folder, for its owner only.

        Raises:
            HeadraceError: it cannot be made.
        """
        try:
            self.prefect.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        except OSError as error:
            raise HeadraceError(
                f"cannot make the folder {self.folder}: {error.strerror}; "
                f"name a writable, local one in {VARIABLE}"
            ) from error

    def auth_string(self) -> str:
        """`user:password` of this person's Prefect server, drawn when first asked for."""
        self.make()
        try:
            descriptor = os.open(self.auth, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return self.auth.read_text().strip()
        with os.fdopen(descriptor, "w") as file:
            file.write(f"headrace:{secrets.token_urlsafe(24)}\n")
        return self.auth.read_text().strip()

    def is_served(self) -> bool:
        """Whether a `headrace serve` of this home lives: only it holds the lock."""
        if not self.folder.is_dir():
            return False
        with FileLock(self.lock) as lock:
            return not lock.try_acquire()

    def read_record(self) -> ServerRecord | None:
        try:
            return _RECORD.validate_json(self.record.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise HeadraceError(
                f"{self.record} cannot be read: {error}; remove it, after ending what it names"
            ) from None

    def write_record(self, record: ServerRecord) -> None:
        temporary = self.record.with_suffix(".tmp")
        temporary.write_bytes(_RECORD.dump_json(record))
        temporary.replace(self.record)

    def remember_run(self, run: str, spec: str) -> None:
        """Keep the JSON of a run's newest spec, so that its name is enough to find it again."""
        self.make()
        self.runs.mkdir(exist_ok=True)
        temporary = self.runs / f".{run}.tmp"
        temporary.write_text(spec)
        temporary.replace(self.runs / f"{run}.json")

    def recall_run(self, run: str) -> str:
        """What was kept of the run.

        Raises:
            SpecError: nothing was.
        """
        try:
            return (self.runs / f"{run}.json").read_text()
        except OSError:
            known = sorted(path.stem for path in self.runs.glob("*.json"))
            raise SpecError(
                f"run {run!r} was never started from here ({self.folder}); name its file with "
                f"--spec, or one of the runs known here: {', '.join(known) or 'none'}"
            ) from None

    def known_run(self, run: str) -> str | None:
        """What was kept of the run, if anything was."""
        path = self.runs / f"{run}.json"
        return path.read_text() if path.is_file() else None

    def on_network(self) -> str | None:
        """The network file system that holds this folder, if one does."""
        holders = [
            part
            for part in psutil.disk_partitions(all=True)
            if self.folder.is_relative_to(part.mountpoint)
        ]
        kind = max(holders, key=lambda part: len(part.mountpoint)).fstype if holders else ""
        return kind if kind in NETWORK_FILE_SYSTEMS else None
