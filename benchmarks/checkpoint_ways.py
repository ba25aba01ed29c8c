"""The contestants: Headrace's saves and those of its peers, all behind the same four calls."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.tensor import DTensor

from storage.checkpoint_records import SaveFacts
from storage.checkpoints.buffers import BufferFolder, Result
from storage.checkpoints.load import load_newest
from storage.checkpoints.ranges import Piece
from storage.checkpoints.staging import Stager
from storage.job import JobContext, JobDescription, RankIdentity
from storage.records import Intent, Stage, Why, new_nonce
from storage.spec import StoreSpec

OURS = "headrace"
RANK_CORE, OTHER_CORE = 0, 1
THREADS = 4
PART_BYTES = 32 * 2**20
POLL_S = 0.02

State = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Where a contestant saves to."""

    store: StoreSpec
    run: str
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A save under way. The tensors may change once `staged` has returned; `durable` is when the
    store had all of it, by this host's clock, or 0 from ranks that are not told."""

    staged: Callable[[], None]
    durable: Future[float]


class Way(Protocol):
    """How one rank saves and restores."""

    def prepare(self, state: State) -> None:
        """Makes ready for the first save, and again from the beginning."""

    def begin(self, state: State, number: int) -> Saving: ...

    def restore(self, state: State, number: int) -> None: ...

    def close(self) -> None: ...


class Headrace:
    """A snapshot in shared memory beside the next step, and the flusher in a process of its own."""

    def __init__(self, job: Job, identity: RankIdentity) -> None:
        self._identity = identity
        self._job = JobDescription(
            intent=_intent(job.run, 1),
            store=job.store,
            entry="trainer.main",
            sidecar="storage.checkpoints.flusher",
            folder=job.folder,
            code=job.folder,
            python=Path(sys.executable),
        )
        self._folder = BufferFolder.of_job(self._job, node=identity.node)
        self._stager: Stager | None = None
        self._flusher: subprocess.Popen[bytes] | None = None
        self._attempt = 1

    def prepare(self, state: State) -> None:
        if self._stager is None:
            self._begin_attempt(state)
        else:
            self._stager.close()
        self._stager = Stager(self._folder)
        self._stager.prepare(dict(state))

    def begin(self, state: State, number: int) -> Saving:
        facts = SaveFacts(
            step=number + 1,
            save=f"{number:013x}",
            world_size=self._identity.world_size,
            mesh={"dp_shard": self._identity.world_size},
            samples_consumed=number,
            samples_hash="",
            dataset_id="none",
            model_hash="none",
            metrics={},
        )
        assert self._stager is not None
        self._stager.begin(state, facts)
        durable: Future[float] = Future()
        if self._identity.rank == 0:
            threading.Thread(target=self._await, args=(durable,), daemon=True).start()
        else:
            durable.set_result(0.0)
        return Saving(staged=self._stager.finish, durable=durable)

    def restore(self, state: State, number: int) -> None:  # noqa: ARG002  the newest is found
        self._attempt += 1
        self._load(self._attempt, state)

    def restore_unverified(self, state: State, number: int) -> None:
        """The same, and no checksum of a tensor is computed."""
        with patch.object(Piece, "agrees", lambda *_: True):
            self.restore(state, number)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
        if self._flusher is not None:
            self._flusher.kill()
            self._flusher.wait()
            self._folder.remove()

    def _begin_attempt(self, state: State) -> None:
        if self._identity.rank == 0:
            self._job.write(self._job.folder / "job.json")
            with _on_other_core():
                self._flusher = subprocess.Popen(
                    [sys.executable, "-m", "slurm.sidecar_work", self._job.folder / "job.json"],
                    stdin=subprocess.PIPE,
                )
        self._load(1, state)

    def _load(self, attempt: int, state: State) -> None:
        context = JobContext(
            replace(self._job, intent=_intent(self._job.intent.run, attempt)), self._identity
        )
        if self._identity.rank == 0:
            context.ledger.claim_intent(context.job.intent)
        load_newest(context, dict(state), model_hash="none", dataset_id="none")

    def _await(self, durable: Future[float]) -> None:
        while not (outcomes := self._folder.take_outcomes()):
            time.sleep(POLL_S)
        (outcome,) = outcomes
        if outcome.result is Result.COMMITTED:
            durable.set_result(time.time())
        else:
            durable.set_exception(RuntimeError(outcome.message))


class TorchSave:
    """Each rank writes its tensors to a file and uploads that; nothing else goes on meanwhile."""

    def __init__(self, job: Job, identity: RankIdentity) -> None:
        import boto3

        self._bucket = job.store.bucket
        self._prefix = f"{job.run}/torch-save"
        self._rank = identity.rank
        self._s3 = boto3.client(
            "s3", endpoint_url=job.store.endpoint_url, region_name=job.store.region
        )

    def prepare(self, state: State) -> None:
        pass

    def begin(self, state: State, number: int) -> Saving:
        with tempfile.NamedTemporaryFile() as file:
            torch.save(_local(state), file)
            file.flush()
            self._s3.upload_file(file.name, self._bucket, self._key(number))
        dist.barrier()
        return _durable_now()

    def restore(self, state: State, number: int) -> None:
        with tempfile.NamedTemporaryFile() as file:
            self._s3.download_file(self._bucket, self._key(number), file.name)
            saved = torch.load(file.name, mmap=True, weights_only=True)
            for name, one in _local(state).items():
                one.copy_(saved[name])

    def close(self) -> None:
        pass

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}/{self._rank}.pt"


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A way of torch.distributed.checkpoint."""

    via: str
    how: AsyncCheckpointerType | None = None
    stages_beside: bool = False


class TorchDistributed:
    """dcp.save or dcp.async_save, with the storage writer of fsspec or of s3torchconnector."""

    def __init__(self, job: Job, *, kind: _Kind) -> None:
        self._job = job
        self._kind = kind
        self._stager: DefaultStager | None = None
        self._group: dist.ProcessGroup | None = None

    def prepare(self, state: State) -> None:  # noqa: ARG002  it plans at each save
        if self._kind.how is AsyncCheckpointerType.THREAD:
            # Its collectives run beside those of the training, with which they must not mix.
            self._group = dist.new_group(backend="gloo")
        if self._kind.how is not None:
            self._close_stager()
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=self._kind.how is AsyncCheckpointerType.PROCESS,
                    use_async_staging=self._kind.stages_beside,
                    use_non_blocking_copy=False,
                )
            )

    def begin(self, state: State, number: int) -> Saving:
        writer = self._writer(number)
        if self._kind.how is None:
            save(cast("dict[str, Any]", state), storage_writer=writer)
            return _durable_now()
        with _on_other_core():
            answer: Any = async_save(
                cast("dict[str, Any]", state),
                storage_writer=writer,
                process_group=self._group,
                async_checkpointer_type=self._kind.how,
                async_stager=self._stager,
            )
        _children_on_other_core()
        durable: Future[float] = Future()
        upload = getattr(answer, "upload_completion", answer)
        upload.add_done_callback(partial(_pass_on, durable))
        staging = getattr(answer, "staging_completion", None)
        return Saving(staged=(lambda: None) if staging is None else staging.result, durable=durable)

    def restore(self, state: State, number: int) -> None:
        load(cast("dict[str, Any]", state), storage_reader=self._reader(number))

    def close(self) -> None:
        self._close_stager()
        for child in psutil.Process().children(recursive=True):
            child.kill()

    def _close_stager(self) -> None:
        if self._stager is not None:
            self._stager.close()

    def _writer(self, number: int) -> Any:
        if self._kind.via == "fsspec":
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

            # `sync_files` calls `os.sync` for want of a file, which flushes the whole host.
            return FsspecWriter(
                self._path(number), thread_count=THREADS, sync_files=False, **self._fsspec()
            )
        from s3torchconnector.dcp import S3FileSystem, S3StorageWriter

        region = self._job.store.region
        writer = S3StorageWriter(region, self._path(number), thread_count=THREADS)
        writer.fs = S3FileSystem(region, s3_client=self._connector())
        return writer

    def _reader(self, number: int) -> Any:
        if self._kind.via == "fsspec":
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

            return FsspecReader(self._path(number), **self._fsspec())
        from s3torchconnector import S3ReaderConstructor
        from s3torchconnector.dcp import S3FileSystem, S3StorageReader

        region, reading = self._job.store.region, S3ReaderConstructor.dcp_optimized()
        reader = S3StorageReader(region, self._path(number), reader_constructor=reading)
        reader.fs = S3FileSystem(region, s3_client=self._connector(), reader_constructor=reading)
        return reader

    def _path(self, number: int) -> str:
        return f"s3://{self._job.store.bucket}/{self._job.run}/dcp/{number}"

    def _fsspec(self) -> dict[str, Any]:
        return {"endpoint_url": self._job.store.endpoint_url, "default_block_size": PART_BYTES}

    def _connector(self) -> Any:
        """Its client, since its readers and writers cannot be given an endpoint."""
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client

        return S3Client(
            self._job.store.region,
            endpoint=self._job.store.endpoint_url,
            s3client_config=S3ClientConfig(force_path_style=True, part_size=PART_BYTES),
        )


Making = Callable[[Job, RankIdentity], Way]


def _dcp(**kind: Any) -> Making:
    return lambda job, _: TorchDistributed(job, kind=_Kind(**kind))


WAYS: Mapping[str, Making] = {
    OURS: Headrace,
    "torch.save + upload_file": TorchSave,
    "dcp.save, fsspec": _dcp(via="fsspec"),
    "dcp.async_save thread, fsspec": _dcp(via="fsspec", how=AsyncCheckpointerType.THREAD),
    "dcp.async_save process, fsspec": _dcp(via="fsspec", how=AsyncCheckpointerType.PROCESS),
    "dcp.async_save process, staged beside, fsspec": _dcp(
        via="fsspec", how=AsyncCheckpointerType.PROCESS, stages_beside=True
    ),
    "dcp.save, s3torchconnector": _dcp(via="s3torchconnector"),
    "dcp.async_save thread, s3torchconnector": _dcp(
        via="s3torchconnector", how=AsyncCheckpointerType.THREAD
    ),
}
"""By name, ours first."""


def missing(way: str) -> str | None:
    """The package that this contestant needs and that is not installed."""
    needs = {"fsspec": "s3fs", "s3torchconnector": "s3torchconnector"}
    package = next((needs[via] for via in needs if way.endswith(via)), None)
    installed = package is None or importlib.util.find_spec(package) is not None
    return None if installed else package


def _intent(run: str, attempt: int) -> Intent:
    return Intent(
        run=run,
        stage=Stage.TRAIN,
        unit="train",
        attempt=attempt,
        token=f"{run}-train-{attempt}",
        nonce=new_nonce(),
        cluster="local",
        user=str(os.getuid()),
        why=Why.FIRST if attempt == 1 else Why.RETRIED,
        after=None if attempt == 1 else attempt - 1,
        nodes=1,
        ranks_per_node=2,
        fingerprint="benchmark",
        created_at=datetime.now(UTC),
    )


def _local(state: State) -> State:
    return {
        name: (one.to_local() if isinstance(one, DTensor) else one).detach()
        for name, one in state.items()
    }


def _durable_now() -> Saving:
    durable: Future[float] = Future()
    durable.set_result(time.time())
    return Saving(staged=lambda: None, durable=durable)


def _pass_on(durable: Future[float], upload: Future[Any]) -> None:
    error = upload.exception()
    if error is None:
        durable.set_result(time.time())
    else:
        durable.set_exception(error)


@contextmanager
def _on_other_core() -> Any:
    """What is started here runs beside the ranks, not in their way."""
    os.sched_setaffinity(0, {OTHER_CORE})
    try:
        yield
    finally:
        os.sched_setaffinity(0, {RANK_CORE})


def _children_on_other_core() -> None:
    for child in psutil.Process().children(recursive=True):
        for thread in child.threads():
            os.sched_setaffinity(thread.id, {OTHER_CORE})
