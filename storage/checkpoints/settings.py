"""What those who work beside the ranks have to know of the trainer's payload, and no more of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from storage.checkpoints.disk import Disk
from storage.job import JobDescription

BUFFER_ROOT = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class _Disk:
    folder: Path


@dataclass(frozen=True, kw_only=True)
class _Checkpoint:
    buffer_dir: Path = BUFFER_ROOT
    disk: _Disk | None = None


@dataclass(frozen=True, kw_only=True)
class _Train:
    checkpoint: _Checkpoint = _Checkpoint()


@dataclass(frozen=True, kw_only=True)
class _Payload:
    train: _Train = _Train()


_PAYLOAD = TypeAdapter(_Payload)


def buffer_root(job: JobDescription) -> Path:
    """The memory in which the job's ranks and its flusher meet."""
    return _of(job).buffer_dir


def disk_of(job: JobDescription) -> Disk | None:
    """The nearer tier, where the spec names one."""
    disk = _of(job).disk
    return None if disk is None else Disk(disk.folder)


def _of(job: JobDescription) -> _Checkpoint:
    return _PAYLOAD.validate_python(job.payload).train.checkpoint
