"""The shard job: documents in, token shards and a manifest out.

The inputs are cut into tasks. A task's objects have unique keys and its record is created
conditionally, so a job may die at any line, or run twice at once: the next one does the tasks that
have no record. The elements of an array share them out without a word to each other, and whoever
finds all records there after its own part writes the manifest; two that do write the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from storage.shards.task import SPLITS, Sums, build_task, too_many_bad
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
        # So does no other number of jobs.
        data=data.model_copy(update={"exclude": (), "jobs": 1}),
        inputs=freeze_inputs(data),
        tokenizer_digest=open_tokenizer(data).digest,
        build="",
    )
    content = f"{LAYOUT} {plan.model_dump_json(exclude={'data': {'jobs'}})}"
    return plan.model_copy(update={"build": hashlib.sha256(content.encode()).hexdigest()[:20]})


@dataclass(frozen=True, kw_only=True)
class Part:
    """The share of one element among several.

    Each attempt deals the tasks out anew, so that what a dead element left is shared by all. Of as
    many tasks in a row as there are elements each takes one, turned further from row to row.
    """

    element: int = 0
    elements: int = 1
    attempt: int = 1

    def has(self, task: int) -> bool:
        turned = task // self.elements * (self.attempt - 1)
        return (task + turned) % self.elements == self.element


WHOLE = Part()


def most_elements(job: ShardJob, *, jobs: int) -> int:
    """How many elements have something to do. What the first `max_documents` are, only one that
    goes through the tasks in their order can tell."""
    if job.data.max_documents is not None:
        return 1
    return max(1, min(jobs, len(share(job.inputs, task_bytes=job.task_bytes))))


def run(context: JobContext) -> Mapping[str, Any] | None:
    """Entry of the job. Rank 0 does it all. None where other elements have yet to do theirs.

    Raises:
        DataError: too many documents cannot be read, or none is left to train on.
    """
    if context.identity.rank != 0:
        return None
    job = ShardJob.model_validate(context.job.payload)
    keys = context.job.dataset_keys(job.build)
    part = Part(
        element=context.element,
        elements=context.job.intent.elements,
        attempt=context.job.intent.attempt,
    )
    manifest = build_dataset(job, store=context.store, keys=keys, watcher=context, part=part)
    return None if manifest is None else _outputs(manifest, keys)


def _outputs(manifest: Manifest, keys: DatasetKeys) -> Mapping[str, Any]:
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
    job: ShardJob,
    *,
    store: ObjectStore,
    keys: DatasetKeys,
    watcher: Watcher,
    part: Part = WHOLE,
) -> Manifest | None:
    """Builds the part's tasks that have no record yet, then the manifest if no task lacks one.

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
    tasks = share(job.inputs, task_bytes=job.task_bytes)
    own = _build_part(job, tasks, tokenizer, store=store, keys=keys, watcher=watcher, part=part)
    records = own if part.elements == 1 else _with_others(own, tasks, store=store, keys=keys)
    if records is None:
        return None
    _require_few_bad(records, job.data)
    manifest = assemble(
        records,
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


def _build_part(
    job: ShardJob,
    tasks: Sequence[Sequence[InputFile]],
    tokenizer: DocumentTokenizer,
    *,
    store: ObjectStore,
    keys: DatasetKeys,
    watcher: Watcher,
    part: Part,
) -> list[TaskRecord]:
    """The records of the part's tasks, in order. What is told is of the part alone, too."""
    limit = job.data.max_documents
    own = {task: files for task, files in enumerate(tasks) if part.has(task)}
    input_bytes = sum(file.size_bytes for files in own.values() for file in files)

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
    for task, files in own.items():
        if limit is not None and sums.documents >= limit:
            break
        key = keys.task_record(task)
        body = store.get_if_exists(key)
        is_there = body is not None
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
        if is_there:
            tell(sums)
    return records


def _with_others(
    own: Sequence[TaskRecord],
    tasks: Sequence[object],
    *,
    store: ObjectStore,
    keys: DatasetKeys,
) -> list[TaskRecord] | None:
    """The records of all tasks in order, or None while one is missing.

    A list of many keys is cheap, but some stores are late with it: what it lacks is asked for.
    """
    listed = {info.key for info in store.list(keys.tasks)}
    others = (keys.task_record(task) for task in range(len(tasks)))
    if any(store.head(key) is None for key in others if key not in listed):
        return None
    known = {record.task: record for record in own}
    return [
        known[task] if task in known else decode(TaskRecord, store.get(keys.task_record(task)))
        for task in range(len(tasks))
    ]


def _require_few_bad(records: Sequence[TaskRecord], data: DataSpec) -> None:
    """Elements each count their own; together they may have found too many."""
    bad = [one for record in records for one in record.bad]
    if len(bad) > data.max_bad_documents:
        raise too_many_bad(bad, data)
