"""A job as its own processes see it: the description it was given, and what it may say.

The submitting side writes a `JobDescription` as JSON to the shared file system; the batch step and
every rank read it. It holds no secret: credentials come from the AWS chain on the node.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from storage.errors import HeadraceError
from storage.keys import DatasetKeys, RunKeys
from storage.ledger import Ledger
from storage.object_store import ObjectStore
from storage.records import ExitCode, Heartbeat, Intent, decode, encode
from storage.spec import StoreSpec


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """`job.json`: all that a job is told. `entry` is a module with `run(context) -> outputs`.

    `sidecar` is a module like `entry` that runs beside the ranks, once a node, and outlives them
    for as long as it has work to finish. The cluster that submits it fills in the launcher, and
    what a container or the site adds to srun's command. Paths are absolute: it works in `folder`,
    and writes to `folders` too, if any.
    """

    intent: Intent
    store: StoreSpec
    entry: str
    sidecar: str | None = None
    payload: Mapping[str, Any] = field(default_factory=dict)
    folder: Path
    code: Path
    python: Path
    launcher: Literal["local", "srun"] = "local"
    folders: tuple[Path, ...] = ()
    srun_options: tuple[str, ...] = ()
    rank_prefix: tuple[str, ...] = ()
    rank_python: str | None = None
    cpus_per_rank: int = 1
    heartbeat_s: float = 5.0
    peer_silence_s: float = 4.0

    @classmethod
    def read(cls, path: Path) -> JobDescription:
        return decode(cls, path.read_bytes())

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(encode(self))
        temporary.replace(path)

    @property
    def metrics_file(self) -> Path:
        """Where the trainer's rank 0 writes its curve, a JSON line for each logged step."""
        return self.folder / "metrics.jsonl"

    @property
    def keys(self) -> RunKeys:
        return RunKeys(prefix=self.store.prefix, run=self.intent.run)

    def dataset_keys(self, build: str) -> DatasetKeys:
        return DatasetKeys(prefix=self.store.prefix, build=build)

    def open_ledger(self) -> Ledger:
        return Ledger(ObjectStore(self.store), self.keys)


class JobExit(HeadraceError):
    """Raised by an entry that leaves before it is done, with the code that says why."""

    def __init__(
        self, code: ExitCode, message: str, *, outputs: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.outputs = dict(outputs or {})


@dataclass(frozen=True, kw_only=True)
class RankIdentity:
    """Where this process stands in its job, read from the variables that srun sets.

    In an array each `element` is a job of its own, with ranks and nodes of its own.
    """

    rank: int
    world_size: int
    local_rank: int
    node: str
    nodes: tuple[str, ...]
    master_addr: str
    master_port: int
    element: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> RankIdentity:
        nodes = tuple(environ["HEADRACE_NODES"].split(","))
        element = environ.get("HEADRACE_ELEMENT")
        return cls(
            element=None if element is None else int(element),
            rank=int(environ["SLURM_PROCID"]),
            world_size=int(environ["SLURM_NTASKS"]),
            local_rank=int(environ["SLURM_LOCALID"]),
            node=environ["SLURMD_NODENAME"],
            nodes=nodes,
            master_addr=environ["HEADRACE_MASTER_ADDR"],
            master_port=int(environ["HEADRACE_MASTER_PORT"]),
        )


@dataclass(frozen=True, kw_only=True, order=True)
class Peer:
    """Another rank of the same job."""

    rank: int
    node: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}"


class PeerWatch(Protocol):
    """What is known of the ranks next to this one."""

    def unanswering(self, *, for_s: float) -> tuple[Peer, ...]:
        """Those whose process is there, and has not answered for so long."""


class JobContext:
    """What an entry is handed: its description, its place, the ledger, and a voice.

    As a context manager it keeps the node's heartbeat going: the node's first rank overwrites one
    small object every `heartbeat_s` seconds. `peers` is None for a rank that has none or is not
    watched; `listens_at` is where the node's first rank awaits those of other nodes.
    """

    peers: PeerWatch | None = None
    listens_at: str = ""

    def __init__(self, job: JobDescription, identity: RankIdentity) -> None:
        self.job = job
        self.identity = identity
        self.ledger = job.open_ledger()
        self._beat = Heartbeat(
            node=identity.node, element=identity.element, sequence=0, at=datetime.now(UTC)
        )
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def store(self) -> ObjectStore:
        return self.ledger.store

    @property
    def attempt(self) -> int:
        return self.job.intent.attempt

    @property
    def element(self) -> int:
        """Which of the attempt's `job.intent.elements` this is part of."""
        return self.identity.element or 0

    def progress(self, *, step: int, **numbers: float) -> None:
        """Say how far the work is; the next heartbeat carries it."""
        with self._lock:
            self._beat = replace(self._beat, step=step, numbers=numbers)

    def address_of(self, node: str) -> str:
        """Where that node's first rank says that it listens; "" before it has said so."""
        body = self.store.get_if_exists(self._heartbeat_key(node))
        return "" if body is None else decode(Heartbeat, body).listens_at

    def is_fenced(self) -> bool:
        """Whether this attempt was closed, or another was made for the same unit."""
        return self.ledger.is_superseded(self.job.intent)

    def __enter__(self) -> Self:
        if self.identity.local_rank == 0:
            self._put_heartbeat()
            self._thread = threading.Thread(target=self._keep_beating, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=self.job.heartbeat_s)
            # The last step is what tells an attempt that got on from one that did not.
            self._try_to_beat()

    def _keep_beating(self) -> None:
        while not self._stop.wait(self.job.heartbeat_s):
            self._try_to_beat()

    def _try_to_beat(self) -> None:
        try:
            self._put_heartbeat()
        except HeadraceError as error:
            print(f"headrace: heartbeat not written: {error}", flush=True)

    def _put_heartbeat(self) -> None:
        with self._lock:
            self._beat = replace(
                self._beat,
                sequence=self._beat.sequence + 1,
                listens_at=self.listens_at,
                at=datetime.now(UTC),
            )
            beat = self._beat
        self.store.put(self._heartbeat_key(beat.node), encode(beat))

    def _heartbeat_key(self, node: str) -> str:
        intent, element = self.job.intent, self.identity.element
        return self.job.keys.heartbeat(intent.stage, intent.attempt, node, element=element)
