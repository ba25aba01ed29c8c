"""Shards and their manifest: whole, deterministic, and the first writer's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.checkpoint_records import FileRecord
from storage.errors import DataError, LedgerError, SpecError
from storage.job import JobExit
from storage.keys import DatasetKeys
from storage.object_store import ObjectStore
from storage.records import ExitCode, new_nonce
from storage.shards.build import Part, ShardJob, build_dataset, most_elements, plan_shards
from storage.shards.manifest import (
    ENDS_DTYPE,
    Manifest,
    Split,
    TaskRecord,
    TokenizerRecord,
    assemble,
    load_manifest,
    narrowest,
)
from storage.shards.task import split_of
from storage.shards.tokenizers import open_tokenizer
from storage.spec import DataSpec

pytestmark = pytest.mark.s3

END = 256


class Watcher:
    """A job's context as the build sees it; `then` runs at each progress."""

    def __init__(self, *, fenced: bool = False, then: Callable[[], None] = lambda: None) -> None:
        self.fenced = fenced
        self.then = then
        self.told: list[tuple[int, dict[str, float]]] = []

    def progress(self, *, step: int, **numbers: float) -> None:
        self.told.append((step, numbers))
        self.then()

    def is_fenced(self) -> bool:
        return self.fenced


def spec(*inputs: Path, **fields: object) -> DataSpec:
    return DataSpec.model_validate(
        {"inputs": [str(path) for path in inputs], "shard_tokens": 1000, **fields}
    )


def corpus(folder: Path, count: int = 24) -> list[str]:
    """Documents of very different lengths, one a file."""
    texts = [f"document {k} " + "é" * (k * k) for k in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text)
    return texts


def keys_of(job: ShardJob) -> DatasetKeys:
    return DatasetKeys(prefix=f"test-{new_nonce()}", build=job.build)


def build(
    store: ObjectStore, job: ShardJob, *, keys: DatasetKeys | None = None
) -> tuple[Manifest, DatasetKeys]:
    keys = keys or keys_of(job)
    manifest = build_dataset(job, store=store, keys=keys, watcher=Watcher())
    assert manifest is not None
    return manifest, keys


def documents_of(store: ObjectStore, manifest: Manifest, split: Split) -> Iterator[list[int]]:
    """The documents back from the shards, as token ids without their end."""
    pending: list[int] = []
    for shard in manifest.of_split(split):
        tokens = np.frombuffer(store.get(shard.data.key), dtype=manifest.dtype).tolist()
        ends = np.frombuffer(store.get(shard.ends.key), dtype=ENDS_DTYPE).tolist()
        assert len(tokens) == shard.tokens
        assert len(ends) == shard.documents
        begin = 0
        for end in ends:
            document = pending + tokens[begin:end]
            assert document[-1] == manifest.tokenizer.end_of_document
            yield document[:-1]
            pending, begin = [], end
        pending += tokens[begin:]
    assert not pending


def test_every_document_comes_back_whole_from_its_split(store: ObjectStore, tmp_path: Path) -> None:
    texts = corpus(tmp_path)
    manifest, keys = build(store, plan_shards(spec(tmp_path, validation_fraction=0.3)))
    for split in ("train", "validation"):
        expected = [t for t in texts if split_of(t, validation_fraction=0.3) == split]
        found = [bytes(d).decode() for d in documents_of(store, manifest, split)]
        assert found == expected
        assert found
    assert manifest.documents == len(texts)
    assert manifest.text_bytes == sum(len(text.encode()) for text in texts)
    assert manifest.tokens == manifest.text_bytes + len(texts)
    assert load_manifest(store, keys.manifest) == manifest


def test_shards_are_full_but_the_last_and_their_sizes_are_the_stored_ones(
    store: ObjectStore, tmp_path: Path
) -> None:
    corpus(tmp_path)
    manifest, _ = build(store, plan_shards(spec(tmp_path, validation_fraction=0)))
    assert manifest.token_type == "uint16"
    assert [shard.tokens for shard in manifest.shards[:-1]] == [1000] * (len(manifest.shards) - 1)
    assert len(manifest.shards) > 5
    assert not manifest.of_split("validation")
    for shard in manifest.shards:
        info = store.head(shard.data.key)
        assert info is not None
        assert info.size_bytes == shard.data.size_bytes == 2 * shard.tokens


def test_a_moved_corpus_is_the_same_data_set_and_a_changed_one_is_not(
    store: ObjectStore, tmp_path: Path
) -> None:
    for folder in ("here", "there"):
        corpus(tmp_path / folder)
    here, _ = build(store, plan_shards(spec(tmp_path / "here")))
    there, _ = build(store, plan_shards(spec(tmp_path / "there")))
    assert here.dataset_id == there.dataset_id
    assert {s.data.key for s in here.shards}.isdisjoint(s.data.key for s in there.shards)
    (tmp_path / "there" / "000.txt").write_text("document O ")
    changed, _ = build(store, plan_shards(spec(tmp_path / "there")))
    assert changed.dataset_id != here.dataset_id


def test_the_build_id_follows_inputs_and_spec(tmp_path: Path) -> None:
    corpus(tmp_path, count=2)
    first = plan_shards(spec(tmp_path))
    assert first == plan_shards(spec(tmp_path))
    others = [
        plan_shards(spec(tmp_path, validation_fraction=0.5)),
        first.for_generation(1),
    ]
    (tmp_path / "more.txt").write_text("more")
    others.append(plan_shards(spec(tmp_path)))
    assert len({first.build, *(other.build for other in others)}) == 4


def test_a_build_goes_on_behind_the_tasks_that_have_a_record(
    store: ObjectStore, tmp_path: Path
) -> None:
    corpus(tmp_path)
    job = plan_shards(spec(tmp_path)).model_copy(update={"task_bytes": 2000})
    keys = keys_of(job)

    class KilledError(Exception):
        pass

    def die_in_the_third_task() -> None:
        if store.head(keys.task_record(1)) is not None:
            raise KilledError

    watcher = Watcher(then=die_in_the_third_task)
    with pytest.raises(KilledError):
        build_dataset(job, store=store, keys=keys, watcher=watcher)
    records = [store.get(keys.task_record(task)) for task in (0, 1)]
    assert store.head(keys.task_record(2)) is None
    assert store.head(keys.manifest) is None
    done = [
        keys.shard(f"{split}-{task:06d}") for split in ("train", "validation") for task in (0, 1)
    ]
    stored = [info.key for prefix in done for info in store.list(prefix)]

    manifest, _ = build(store, job, keys=keys)
    assert [info.key for prefix in done for info in store.list(prefix)] == stored
    assert [store.get(keys.task_record(task)) for task in (0, 1)] == records
    assert manifest.dataset_id == build(store, job)[0].dataset_id
    assert manifest.documents == 24


def test_of_two_builds_at_once_the_first_record_wins(store: ObjectStore, tmp_path: Path) -> None:
    corpus(tmp_path, count=5)
    job = plan_shards(spec(tmp_path))
    keys = keys_of(job)
    inner: list[Manifest] = []

    def another_one_is_faster() -> None:
        if not inner:
            inner.append(build(store, job, keys=keys)[0])

    outer = build_dataset(job, store=store, keys=keys, watcher=Watcher(then=another_one_is_faster))
    assert outer == inner[0] == load_manifest(store, keys.manifest)


def test_a_fenced_build_records_nothing(store: ObjectStore, tmp_path: Path) -> None:
    corpus(tmp_path, count=3)
    job = plan_shards(spec(tmp_path))
    keys = keys_of(job)
    with pytest.raises(JobExit) as caught:
        build_dataset(job, store=store, keys=keys, watcher=Watcher(fenced=True))
    assert caught.value.code == ExitCode.FENCED
    assert store.head(keys.task_record(0)) is None


def test_unreadable_documents_are_listed_up_to_the_limit_and_fail_the_build_beyond(
    store: ObjectStore, tmp_path: Path
) -> None:
    corpus(tmp_path, count=3)
    (tmp_path / "x.jsonl").write_text('{"text": "good"}\nnot json\n\n{"text": 3}\n')
    (tmp_path / "y.jsonl").write_text("nor this\n")
    manifest, _ = build(
        store,
        plan_shards(spec(tmp_path, max_bad_documents=3)).model_copy(update={"task_bytes": 1}),
    )
    assert [(Path(bad.path).name, bad.line) for bad in manifest.bad] == [
        ("x.jsonl", 2),
        ("x.jsonl", 4),
        ("y.jsonl", 1),
    ]
    assert (manifest.documents, manifest.empty, manifest.unreadable) == (4, 1, 3)
    with pytest.raises(DataError, match=r"3 documents .* data.max_bad_documents 2: .*y.jsonl:1"):
        build(
            store,
            plan_shards(spec(tmp_path, max_bad_documents=2)).model_copy(update={"task_bytes": 1}),
        )


@pytest.mark.parametrize("task_bytes", [1, 2**20])
def test_max_documents_takes_the_first_ones(
    store: ObjectStore, tmp_path: Path, task_bytes: int
) -> None:
    texts = corpus(tmp_path, count=12)
    job = plan_shards(spec(tmp_path, max_documents=7, validation_fraction=0))
    manifest, _ = build(store, job.model_copy(update={"task_bytes": task_bytes}))
    found = [bytes(d).decode() for d in documents_of(store, manifest, "train")]
    assert found == texts[:7]


def test_a_corpus_without_text_is_an_error_with_figures(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n")
    with pytest.raises(DataError, match=r"1 input files hold no document .* 1 empty"):
        build(store, plan_shards(spec(tmp_path)))


def test_a_manifest_that_is_missing_or_changed_is_refused(
    store: ObjectStore, tmp_path: Path
) -> None:
    corpus(tmp_path, count=3)
    _, keys = build(store, plan_shards(spec(tmp_path)))
    with pytest.raises(DataError, match="no manifest at"):
        load_manifest(store, f"{keys.root}/other.json")
    record = json.loads(store.get(keys.manifest))
    record["shards"][0]["tokens"] += 1
    store.put(keys.manifest, json.dumps(record).encode())
    with pytest.raises(DataError, match="was changed by hand"):
        load_manifest(store, keys.manifest)


def test_progress_counts_over_all_tasks(store: ObjectStore, tmp_path: Path) -> None:
    corpus(tmp_path, count=8)
    job = plan_shards(spec(tmp_path)).model_copy(update={"task_bytes": 1})
    watcher = Watcher()
    manifest = build_dataset(job, store=store, keys=keys_of(job), watcher=watcher)
    assert manifest is not None
    assert [step for step, _ in watcher.told] == list(range(1, 9))
    assert watcher.told[-1][1]["tokens"] == manifest.tokens


def save_tokenizer(path: Path, *, truncate: bool = False) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["document é"] * 5, trainer)
    if truncate:
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file_is_used_whole_even_if_it_says_to_truncate(
    store: ObjectStore, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    texts = corpus(tmp_path / "corpus", count=10)
    path = save_tokenizer(tmp_path / "tokenizer.json", truncate=True)
    job = plan_shards(
        spec(
            tmp_path / "corpus",
            tokenizer=str(path),
            end_of_document="<|end|>",
            validation_fraction=0,
        )
    )
    manifest, _ = build(store, job)
    tokenizer = Tokenizer.from_file(str(path))
    found = [tokenizer.decode(d) for d in documents_of(store, manifest, "train")]
    assert found == texts
    assert manifest.vocab == tokenizer.get_vocab_size()
    assert manifest.tokenizer.end_of_document == tokenizer.token_to_id("<|end|>")

    save_tokenizer(path)
    with pytest.raises(DataError, match="is not the file that the stage was planned with"):
        build(store, job)


def test_a_tokenizer_that_does_not_fit_is_refused_before_any_job(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "no.json").write_text("{}")
    cases = [
        ({"tokenizer": str(path)}, "data.end_of_document is required"),
        ({"tokenizer": str(path), "end_of_document": "</s>"}, r"'</s>' is not .*: <\|end\|>"),
        ({"tokenizer": str(tmp_path / "gone"), "end_of_document": "x"}, "cannot be read"),
        ({"tokenizer": str(tmp_path / "no.json"), "end_of_document": "x"}, "not a tokenizer.json"),
        ({"end_of_document": "</s>"}, "has no meaning with `tokenizer: bytes`"),
    ]
    for fields, message in cases:
        with pytest.raises(SpecError, match=message):
            open_tokenizer(spec(tmp_path, **fields))


@settings(max_examples=30)
@given(text=st.text(), fraction=st.floats(0, 0.99))
def test_a_larger_fraction_only_adds_to_the_validation_split(text: str, fraction: float) -> None:
    if split_of(text, validation_fraction=fraction) == "validation":
        assert split_of(text, validation_fraction=fraction + 0.01) == "validation"
    assert split_of(text, validation_fraction=0) == "train"


def test_the_narrowest_type_holds_every_id() -> None:
    assert [narrowest(vocab) for vocab in (257, 2**16, 2**16 + 1)] == ["uint16", "uint16", "uint32"]
    with pytest.raises(DataError, match="does not fit uint32"):
        narrowest(2**32 + 1)


def test_a_manifest_takes_exactly_all_tasks() -> None:
    def record(task: int) -> TaskRecord:
        return TaskRecord(task=task, shards=(), sources=(), text_bytes=0, bad=(), nonce="n")

    tokenizer = TokenizerRecord(name="bytes", digest="d", vocab=257, end_of_document=END)
    assemble([record(0), record(1)], tokenizer=tokenizer)
    for tasks in ([0, 2], [1], [0, 0]):
        with pytest.raises(LedgerError):
            assemble([record(task) for task in tasks], tokenizer=tokenizer)


def test_checksums_are_those_of_the_store(store: ObjectStore, tmp_path: Path) -> None:
    corpus(tmp_path, count=3)
    manifest, _ = build(store, plan_shards(spec(tmp_path)))
    file: FileRecord = manifest.shards[0].data
    answer = store.client.head_object(Bucket=store.bucket, Key=file.key, ChecksumMode="ENABLED")
    assert answer["ChecksumCRC64NVME"] == file.crc64nvme


@settings(max_examples=100)
@given(tasks=st.integers(0, 60), elements=st.integers(1, 12), attempt=st.integers(1, 9))
def test_every_task_is_one_elements_whatever_their_number(
    tasks: int, elements: int, attempt: int
) -> None:
    parts = [Part(element=one, elements=elements, attempt=attempt) for one in range(elements)]
    shares = [[task for task in range(tasks) if part.has(task)] for part in parts]
    assert sorted(task for share in shares for task in share) == list(range(tasks))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("elements", [2, 3, 8])
def test_what_a_dead_element_left_is_shared_out_anew(elements: int) -> None:
    dead = Part(element=1, elements=elements, attempt=1)
    left = [task for task in range(elements * elements) if dead.has(task)]
    again = [Part(element=one, elements=elements, attempt=2) for one in range(elements)]
    assert [sum(part.has(task) for task in left) for part in again] == [1] * elements


def test_parts_make_what_one_job_makes_and_the_last_one_ends_it(
    store: ObjectStore, tmp_path: Path
) -> None:
    corpus(tmp_path)
    job = plan_shards(spec(tmp_path)).model_copy(update={"task_bytes": 1500})
    keys, watchers = keys_of(job), [Watcher(), Watcher(), Watcher()]

    def build_part(element: int, *, attempt: int = 1) -> Manifest | None:
        part = Part(element=element, elements=3, attempt=attempt)
        watcher = watchers[element]
        return build_dataset(job, store=store, keys=keys, watcher=watcher, part=part)

    assert [build_part(2), build_part(0)] == [None, None]
    assert store.head(keys.manifest) is None
    manifest = build_part(1)
    assert manifest is not None
    alone, _ = build(store, job)
    assert manifest.dataset_id == alone.dataset_id
    assert replace(manifest, shards=()) == replace(alone, shards=())
    # Whoever comes later, or again, says the same.
    assert build_part(0, attempt=2) == manifest == load_manifest(store, keys.manifest)
    input_bytes = sum(watcher.told[0][1]["input_bytes"] for watcher in watchers)
    assert input_bytes == sum(file.size_bytes for file in job.inputs)


def test_too_many_unreadable_documents_are_found_together(
    store: ObjectStore, tmp_path: Path
) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text('not json\n{"text": "good"}\n')
    job = plan_shards(spec(tmp_path, max_bad_documents=2)).model_copy(update={"task_bytes": 1})
    keys = keys_of(job)

    def build_part(element: int) -> Manifest | None:
        part = Part(element=element, elements=3)
        return build_dataset(job, store=store, keys=keys, watcher=Watcher(), part=part)

    assert [build_part(0), build_part(1)] == [None, None]
    with pytest.raises(DataError, match=r"3 documents .* data.max_bad_documents 2: .*c.jsonl:1"):
        build_part(2)


def test_a_small_corpus_needs_one_job_and_the_number_of_jobs_makes_no_other_data_set(
    tmp_path: Path,
) -> None:
    corpus(tmp_path, count=6)
    assert plan_shards(spec(tmp_path)) == plan_shards(spec(tmp_path, jobs=3))
    job = plan_shards(spec(tmp_path))
    assert most_elements(job, jobs=8) == 1
    small = job.model_copy(update={"task_bytes": 1})
    assert [most_elements(small, jobs=jobs) for jobs in (1, 4, 99)] == [1, 4, 6]
    first = plan_shards(spec(tmp_path, max_documents=3)).model_copy(update={"task_bytes": 1})
    assert most_elements(first, jobs=8) == 1
