"""The frozen input list, and documents of which none is dropped in silence."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from storage.errors import DataError, SpecError
from storage.shards.inputs import (
    BadDocument,
    Document,
    EmptyDocument,
    InputFile,
    freeze_inputs,
    read_documents,
    require_unchanged,
    share,
)
from storage.spec import DataSpec


def spec(*inputs: Path | str, **fields: object) -> DataSpec:
    return DataSpec.model_validate({"inputs": [str(path) for path in inputs], **fields})


def write(path: Path, text: str | bytes = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def names(files: Iterable[InputFile], root: Path) -> list[str]:
    return [str(file.path.relative_to(root)) for file in files]


def read(path: Path, **fields: object) -> list[Document | EmptyDocument | BadDocument]:
    data = spec(path, **fields)
    (file,) = freeze_inputs(data)
    return list(read_documents(file, data))


def test_the_list_is_sorted_and_holds_each_file_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/a.txt", "c.jsonl", ".hidden", "a/.git/x.txt"):
        write(tmp_path / name)
    data = spec(tmp_path / "**/*.txt", tmp_path, tmp_path / "a/../b.txt")
    frozen = freeze_inputs(data)
    assert names(frozen, tmp_path) == ["a/a.txt", "a/z.txt", "b.txt", "c.jsonl"]
    assert frozen == freeze_inputs(data)
    assert {file.size_bytes for file in frozen} == {4}


def test_relative_patterns_become_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "odd [name]"
    write(root / "a.txt")
    monkeypatch.chdir(root)
    assert [file.path for file in freeze_inputs(spec("*.txt"))] == [root / "a.txt"]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("nothing/*.txt", "matches no file"),
        ("empty", "directory without a file"),
        ("*", "matches no file"),
        ("s3://bucket/corpus", "names a bucket"),
    ],
)
def test_an_entry_without_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, reason: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=reason) as caught:
        freeze_inputs(spec("empty/../empty/..", pattern) if pattern == "" else spec(pattern))
    assert "data.inputs[0]" in str(caught.value)
    assert repr(pattern) in str(caught.value)


def test_files_that_changed_after_the_plan_are_named(tmp_path: Path) -> None:
    paths = [write(tmp_path / name) for name in ("same", "longer", "touched", "gone")]
    frozen = freeze_inputs(spec(tmp_path))
    require_unchanged(frozen)
    write(paths[1], "longer text")
    os.utime(paths[2], ns=(0, 1))
    paths[3].unlink()
    with pytest.raises(DataError, match="3 input files") as caught:
        require_unchanged(frozen)
    assert all(str(path) in str(caught.value) for path in paths[1:])
    assert str(paths[0]) not in str(caught.value)


def test_tasks_are_consecutive_and_complete() -> None:
    files = [
        InputFile(path=Path(str(k)), size_bytes=size, modified_ns=0)
        for k, size in enumerate([3, 9, 0, 5, 5, 1])
    ]
    tasks = share(files, task_bytes=8)
    assert [[file.size_bytes for file in task] for task in tasks] == [[3, 9], [0, 5, 5], [1]]
    assert share(files, task_bytes=1000) == (tuple(files),)
    assert share([], task_bytes=8) == ()


def test_a_text_file_is_one_document_without_its_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\ufeffone\ntwo\n")
    assert read(path) == [Document(text="one\ntwo\n")]


def test_json_lines_are_read_by_their_field_and_every_line_is_accounted_for(
    tmp_path: Path,
) -> None:
    lines = [
        json.dumps({"body": "good", "text": None}).encode(),
        b'{"body": "caf\xe9"}',
        b'{"body": ',
        b'["body"]',
        b'{"text": "other"}',
        b'{"body": null}',
        b'{"body": 3}',
        b'{"body": "  "}',
        b"",
        b'{"body": "\\ud800"}',
        b"[" * 100_000,
        json.dumps({"body": "last ☃"}).encode(),
    ]
    path = write(tmp_path / "a.ndjson", b"\n".join(lines))
    found = read(path, text_field="body")
    assert [type(document) for document in found] == [
        Document,
        *[BadDocument] * 6,
        EmptyDocument,
        EmptyDocument,
        BadDocument,
        BadDocument,
        Document,
    ]
    assert found[-1] == Document(text="last ☃")
    bad = [document for document in found if isinstance(document, BadDocument)]
    assert [document.line for document in bad] == [2, 3, 4, 5, 6, 7, 10, 11]
    assert str(bad[0]) == f"{path}:2: not UTF-8 at byte 13"
    assert "'body' is missing" in str(bad[3])
    assert "'body' holds null" in str(bad[4])


def test_the_format_may_be_said(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "x"}\n')
    assert read(path, format="text") == [Document(text='{"text": "x"}\n')]
    other = write(tmp_path / "b.data", '{"text": "x"}\n')
    assert read(other, format="jsonl") == [Document(text="x")]


def test_what_is_no_readable_text_is_bad_or_empty_but_never_gone(tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "fifo")
    write(tmp_path / "blank.txt", " \n")
    write(tmp_path / "latin.txt", b"caf\xe9")
    data = spec(tmp_path)
    found = [document for file in freeze_inputs(data) for document in read_documents(file, data)]
    assert found == [
        EmptyDocument(),
        BadDocument(path=str(tmp_path / "broken"), reason="a broken link, or no regular file"),
        BadDocument(path=str(tmp_path / "fifo"), reason="a broken link, or no regular file"),
        BadDocument(path=str(tmp_path / "latin.txt"), reason="not UTF-8 at byte 3"),
    ]


@pytest.mark.parametrize("pattern", ["", "**/*", "work*/*/*", "link/store/*", "*"])
def test_nothing_is_taken_from_an_excluded_folder_by_whatever_name(
    tmp_path: Path, pattern: str
) -> None:
    write(tmp_path / "work" / "store" / "credentials", "secret")
    write(tmp_path / "work" / "run" / "node.n1.log")
    write(tmp_path / "workers.txt")
    (tmp_path / "link").symlink_to(tmp_path / "work")
    (tmp_path / "key.txt").symlink_to(tmp_path / "work" / "store" / "credentials")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    entry = f"{tmp_path}/{pattern}"
    data = spec(entry, tmp_path / "workers.txt", exclude=[str(tmp_path / "work")])
    if pattern in ("work*/*/*", "link/store/*"):
        with pytest.raises(SpecError, match=r"data\.inputs\[0\].*/work', .*keep the documents"):
            freeze_inputs(data)
    else:
        assert set(names(freeze_inputs(data), tmp_path)) <= {"circle", "workers.txt"}


@pytest.mark.parametrize("entry", ["work", "work/store", "link", "work/store/credentials"])
def test_an_entry_inside_an_excluded_folder_is_refused_with_both_names(
    tmp_path: Path, entry: str
) -> None:
    write(tmp_path / "work" / "store" / "credentials", "secret")
    (tmp_path / "link").symlink_to(tmp_path / "work")
    work = str(tmp_path / "work")
    with pytest.raises(SpecError) as caught:
        freeze_inputs(spec(tmp_path / entry, exclude=[work]))
    assert f"data.inputs[0] {str(tmp_path / entry)!r} lies in {work!r}" in str(caught.value)
