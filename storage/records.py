"""Every record of the ledger, and the exit codes: what `slurm` and `trainer` tell each other.

Records are frozen dataclasses and, through `encode` and `decode`, the JSON in the object store.
A record that is created conditionally carries a `nonce`, so that its writer can tell its own write
from another's.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum, StrEnum
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from storage.checkpoint_records import CommitRef
from storage.errors import LedgerError

T = TypeVar("T")

_adapters: dict[type[Any], TypeAdapter[Any]] = {}


class Stage(StrEnum):
    """The five stages, in the order in which they run."""

    VALIDATE = "validate"
    SHARD = "shard"
    SMOKE = "smoke"
    TRAIN = "train"
    PRUNE = "prune"


class ExitCode(IntEnum):
    """How a job leaves. The values stay clear of the shell's, Python's and of 128 + signal."""

    DONE = 0
    CRASHED = 1
    RESUME = 75
    DIVERGED = 80
    BAD_CONFIG = 81
    BAD_DATA = 82
    HANG = 83
    OUT_OF_MEMORY = 84
    FENCED = 85
    STORAGE = 86
    NO_CHECKPOINT = 87
    PEER_LOST = 88


class Kind(StrEnum):
    """What kind of end an attempt had."""

    DONE = "done"
    HARDWARE = "hardware"
    NETWORK = "network"
    CASCADE = "cascade"
    MEMORY = "memory"
    TIME = "time"
    PREEMPTED = "preempted"
    OPERATOR = "operator"
    SITE = "site"
    OUTPUT = "output"
    STORAGE = "storage"
    CODE = "code"
    DATA = "data"
    NUMERIC = "numeric"
    HANG = "hang"
    LOST = "lost"
    LIMIT = "limit"
    FENCED = "fenced"
    UNKNOWN = "unknown"


class Action(StrEnum):
    """What follows an attempt's end."""

    DONE = "done"
    RESUME = "resume"
    RETRY_ELSEWHERE = "retry elsewhere"
    STEP_BACK = "step back"
    GIVE_UP = "give up"
    STOP = "stop"


class Why(StrEnum):
    """Why an attempt was made."""

    FIRST = "first"
    RESUMED = "resumed"
    RETRIED = "retried"


@dataclass(frozen=True, kw_only=True)
class Intent:
    """`<n>.json`: an attempt, before it exists in Slurm. Only its creator may call sbatch.

    With several `elements` its job is an array, each element of which has `nodes` nodes. Where
    `most_nodes` says so, the job takes as many as the cluster has for it, from `nodes` up to that.
    """

    run: str
    stage: Stage
    unit: str
    attempt: int
    token: str
    nonce: str
    cluster: str
    user: str
    why: Why
    after: int | None
    nodes: int
    most_nodes: int | None = None
    ranks_per_node: int
    elements: int = 1
    node_list: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    fingerprint: str
    floor: CommitRef | None = None
    ceiling: int | None = None
    skip_data: tuple[tuple[int, int], ...] = ()
    created_at: datetime


@dataclass(frozen=True, kw_only=True)
class JobIdentity:
    """A Slurm job is its id *and* its token: ids are reused. An array's elements have one id."""

    job_id: str
    step_id: str | None = None
    token: str
    restart_count: int = 0
    host: str


@dataclass(frozen=True, kw_only=True)
class Start:
    """`<n>.start.json`: the register with one winner. `job` is None when the attempt is void.

    Of an array it is the first element's that came; `<n>.element.<e>.start.json` is each one's own.
    """

    job: JobIdentity | None
    element: int | None = None
    nodes: tuple[str, ...] = ()
    nonce: str
    at: datetime

    @property
    def is_void(self) -> bool:
        return self.job is None


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """`<n>.submitted.json`: what sbatch answered its creator; a hint, never a proof of absence."""

    job_id: str
    nonce: str
    at: datetime


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """`<n>.cancel.json`: who cancels and why, written before scancel."""

    who: str
    why: str
    nonce: str
    at: datetime


@dataclass(frozen=True, kw_only=True)
class Exit:
    """`<n>.exit.json`: the job's own last word; the first writer wins.

    `blamed_nodes` are those that the job itself saw fail, such as a peer that fell silent.
    `<n>.element.<e>.exit.json` is the last word of an array's element, of its own part alone.
    """

    code: int
    element: int | None = None
    rank: int | None
    node: str
    error: str = ""
    blamed_nodes: tuple[str, ...] = ()
    outputs: Mapping[str, Any] = field(default_factory=dict)
    nonce: str
    at: datetime


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why an attempt ended: the kind, the nodes to blame, and what says so."""

    kind: Kind
    culprit_nodes: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        blame = f" on {', '.join(self.culprit_nodes)}" if self.culprit_nodes else ""
        detail = f": {self.evidence[0]}" if self.evidence else ""
        return f"{self.kind.value}{blame}{detail}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What follows from a diagnosis."""

    action: Action
    reason: str
    exclude_nodes: tuple[str, ...] = ()
    delay_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class End:
    """`<n>.end.json`: the diagnosis and decision that everybody acts on; closes the attempt."""

    diagnosis: Diagnosis
    decision: Decision
    by: str
    nonce: str
    at: datetime


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """`<n>.heartbeat.<node>.json`: overwritten every few seconds by the node's first rank.

    `listens_at` is where the first rank of the node before it in the job finds it.
    Each of an array's elements has its own, as several may share a node.
    """

    node: str
    element: int | None = None
    sequence: int
    step: int | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    listens_at: str = ""
    at: datetime


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """A finished stage; its existence is what lets the stage be skipped."""

    stage: Stage
    fingerprint: str
    generation: int
    outputs: Mapping[str, Any]
    attempts: tuple[int, ...]
    nonce: str
    at: datetime


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """`refusals/<stage>.json`: why a stage gave up, as no attempt's own decision may say it.

    It is the last word as long as `after` is the stage's newest attempt, None where there was none.
    `cancelled` says that a person ended it when no attempt was open whose own end would tell.
    """

    stage: Stage
    unit: str
    reason: str
    after: int | None
    cancelled: bool = False
    by: str
    at: datetime


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """`run.json`: the spec as first seen, the code's version and what the store's probe found.

    `forked_from` names the run that it descends from, `fork_point` the checkpoint of that run which
    it begins with, where it does not begin from scratch.
    """

    run: str
    forked_from: str | None = None
    fork_point: CommitRef | None = None
    spec: Mapping[str, Any]
    code: str
    git_commit: str | None
    git_dirty: bool | None
    store_probe: Mapping[str, Any]
    nonce: str
    at: datetime


def new_nonce() -> str:
    """64 random bits, as 16 hexadecimal digits."""
    return secrets.token_hex(8)


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """The type's adapter, built once: building one takes milliseconds, using it microseconds."""
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def encode(record: object, *, indent: int | None = 1) -> bytes:
    """The record's JSON, as it stands in the object store."""
    return _adapter(type(record)).dump_json(record, indent=indent)


def decode(kind: type[T], body: bytes) -> T:
    """The record in `body`.

    Raises:
        LedgerError: it is not JSON, or not of this kind.
    """
    try:
        record: T = _adapter(kind).validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        fault = f"{where}: {first['msg']}" if where else first["msg"]
        raise LedgerError(f"not a {kind.__name__} record: {fault}") from None
    return record
