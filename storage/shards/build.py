"""The shard job: documents in, token shards and a manifest out.

The inputs are cut into tasks. A task's objects have unique keys and its record is created
conditionally, so a job may die at any line, or run twice at once: the next one goes on behind the
last task that has a record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from storage.errors import DataError
from storage.job import JobContext, JobExit
from storage.keys import DatasetKeys
from storage.object_store import ObjectStore
from storage.records import ExitCode, decode, encode
from storage.shards.inputs import InputFile, freeze_inputs, require_unchanged, share
from storage.shards.manifest import Manifest, TaskRecord, TokenizerRecord, assemble
from storage.shards.task import SPLITS, Sums, build_task
from storage.shards.tokenizers import BYTES, DocumentTokenizer, open_tokenizer
from storage.spec import DataSpec, Model

# Part of every build's id: raise it when the same inputs come to make other shards.
LAYOUT = 1
TASK_BYTES = 256 * 2**20


class ShardJob(Model):
    """The payload of a `storage.shards.build` job. `build` names its folder in the bucket."""

    data: DataSpec
    inputs: tuple[InputFile, ...]
    tokenizer_digest: str
    build: str
    task_bytes: int = Field(TASK_BYTES, ge=1)

    def for_generation(self, generation: int) -> ShardJob:
        """The same job in a folder of its own: what an earlier generation stored is not reused."""
        return self.model_copy(update={"build": f"{self.build}-{generation}"})


class Watcher(Protocol):
    """What a build needs of its job's context."""

    def progress(self, *, step: int, **numbers: float) -> None: ...

    def is_fenced(self) -> bool: ...


def plan_shards(data: DataSpec) -> ShardJob:
    """The job for a spec, with its inputs frozen.

    Raises:
        SpecError: an entry of `data.inputs` matches no file, or the tokenizer does not fit.
    """
    if data.tokenizer != BYTES:
        tokenizer = str(Path(data.tokenizer).expanduser().absolute())
        data = data.model_copy(update={"tokenizer": tokenizer})
    plan = ShardJob(
        # What was excluded shows in the list: another workdir alone makes no other data set.
        data=data.model_copy(update={"exclude": ()}),
        inputs=freeze_inputs(data),
        tokenizer_digest=open_tokenizer(data).digest,
        build="",
    )
    content = f"{LAYOUT} {plan.model_dump_json()}"
    return plan.model_copy(update={"build": hashlib.sha256(content.encode()).hexdigest()[:20]})


def run(context: JobContext) -> Mapping[str, Any]:
    """Entry of the job. Rank 0 does it all.

    Raises:
        DataError: too many documents cannot be read, or none is left to train on.
    """
    if context.identity.rank != 0:
        return {}
    job = ShardJob.model_validate(context.job.payload)
    keys = context.job.dataset_keys(job.build)
    manifest = build_dataset(job, store=context.store, keys=keys, watcher=context)
    return {
        "manifest_key": keys.manifest,
        "dataset_id": manifest.dataset_id,
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "bytes": manifest.text_bytes,
        "dropped": manifest.empty + manifest.unreadable,
        "empty": manifest.empty,
        "unreadable": manifest.unreadable,
        "vocab": manifest.vocab,
        "shards": len(manifest.shards),
        "split_tokens": {
            split: sum(shard.tokens for shard in manifest.of_split(split)) for split in SPLITS
        },
    }


def build_dataset(
    job: ShardJob, *, store: ObjectStore, keys: DatasetKeys, watcher: Watcher
) -> Manifest:
    """Builds the tasks that have no record yet, then the manifest.

    Raises:
        DataError: see `run`.
        JobExit: the attempt was superseded meanwhile.
    """
    require_unchanged(file for file in job.inputs if file.modified_ns is not None)
    tokenizer = open_tokenizer(job.data)
    if tokenizer.digest != job.tokenizer_digest:
        raise DataError(
            f"data.tokenizer {job.data.tokenizer!r} is not the file that the stage was planned "
            "with; run the same command again if it was meant to change"
        )
    manifest = assemble(
        _records(job, tokenizer, store=store, keys=keys, watcher=watcher),
        tokenizer=TokenizerRecord(
            name=tokenizer.name,
            digest=tokenizer.digest,
            vocab=tokenizer.vocab,
            end_of_document=tokenizer.end_of_document,
        ),
    )
    if not manifest.of_split("train"):
        raise DataError(
            f"{len(job.inputs)} input files hold no document to train on: {manifest.documents} "
            f"taken with data.validation_fraction {job.data.validation_fraction:g}, "
            f"{manifest.empty} empty, {manifest.unreadable} unreadable; add documents"
        )
    store.create(keys.manifest, encode(manifest))
    return manifest


def _records(
    job: ShardJob,
    tokenizer: DocumentTokenizer,
    *,
    store: ObjectStore,
    keys: DatasetKeys,
    watcher: Watcher,
) -> list[TaskRecord]:
    limit = job.data.max_documents
    input_bytes = sum(file.size_bytes for file in job.inputs)

    def tell(now: Sums) -> None:
        watcher.progress(
            step=now.documents,
            tokens=now.tokens,
            bytes=now.text_bytes,
            input_bytes=input_bytes,
            unreadable=now.bad,
        )

    records: list[TaskRecord] = []
    sums = Sums()
    for task, files in enumerate(share(job.inputs, task_bytes=job.task_bytes)):
        if limit is not None and sums.documents >= limit:
            break
        key = keys.task_record(task)
        body = store.get_if_exists(key)
        if body is None:
            record = build_task(
                task,
                files,
                data=job.data,
                tokenizer=tokenizer,
                store=store,
                keys=keys,
                before=sums,
                tell=tell,
            )
            if watcher.is_fenced():
                raise JobExit(ExitCode.FENCED, f"superseded while task {task} was being built")
            body = store.create(key, encode(record)).body
        records.append(decode(TaskRecord, body))
        sums = sums.plus(records[-1])
    return records
