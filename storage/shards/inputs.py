"""The input list, frozen before a job is queued, and the documents in it.

Nothing is dropped in silence: a document is taken, empty or unreadable, and the unreadable ones are
named by file and position.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from storage.errors import DataError, SpecError
from storage.spec import DataSpec, Model

_JSON_LINES = (".jsonl", ".ndjson")
_SHOWN = 5


class InputFile(Model):
    """One file as it was when the list was frozen.

    `modified_ns` is None for what is no file that can be read: a broken link, a pipe, a file in a
    folder that may not be entered.
    """

    path: Path
    size_bytes: int
    modified_ns: int | None


@dataclass(frozen=True, kw_only=True)
class Document:
    """A document with text in it."""

    text: str


@dataclass(frozen=True, kw_only=True)
class EmptyDocument:
    """A document with nothing in it but white space."""


@dataclass(frozen=True, kw_only=True)
class BadDocument:
    """A document that cannot be read, and why. `line` is None where the whole file is one."""

    path: str
    line: int | None = None
    reason: str

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{place}: {self.reason}"


class _UnreadableError(Exception):
    """Why a document has no text."""


def freeze_inputs(data: DataSpec) -> tuple[InputFile, ...]:
    """All files that `data.inputs` names, each once, in the order of their paths.

    A directory is read recursively; a glob names files, as in a shell. Hidden files and folders
    are left out unless an entry names them. Links to files are followed, links to directories not.
    What lies in a folder of `data.exclude` is left out, by whatever name it is reached.

    Raises:
        SpecError: an entry matches no file, or none outside `data.exclude`.
    """
    excluded = _Excluded(data.exclude)
    found: set[Path] = set()
    for index, pattern in enumerate(data.inputs):
        matches, held_back = _matches(Path(pattern).expanduser(), excluded)
        if not matches:
            reason = _why_no_file(pattern) if held_back is None else _why_excluded(held_back)
            raise SpecError(f"data.inputs[{index}] {pattern!r} {reason}")
        # Not `absolute()`, which leaves `..` in, so that one file would be read under two names.
        found.update(Path(os.path.abspath(path)) for path in matches)  # noqa: PTH100
    return tuple(_freeze(path) for path in sorted(found, key=str))


def require_unchanged(files: Iterable[InputFile]) -> None:
    """Refuses to go on with files that are not what they were when the list was frozen.

    Raises:
        DataError: a file is missing here, or its size or its time of change is another.
    """
    changed = [file for file in files if _freeze(file.path) != file]
    if changed:
        raise DataError(
            f"{len(changed)} input files are not what they were when the stage was planned, or are "
            f"missing on this node: {_some([str(file.path) for file in changed])}; run the same "
            "command again if they were meant to change, and keep them on a file system that every "
            "node mounts"
        )


def share(files: Sequence[InputFile], *, task_bytes: int) -> tuple[tuple[InputFile, ...], ...]:
    """Cuts the list into consecutive tasks of whole files, each ended once it holds `task_bytes`.

    The cut depends on nothing but the list, so that a task means the same wherever it runs.
    """
    tasks: list[tuple[InputFile, ...]] = []
    begin = size_bytes = 0
    for end, file in enumerate(files, start=1):
        size_bytes += file.size_bytes
        if size_bytes >= task_bytes or end == len(files):
            tasks.append(tuple(files[begin:end]))
            begin, size_bytes = end, 0
    return tuple(tasks)


def read_documents(
    file: InputFile, data: DataSpec
) -> Iterator[Document | EmptyDocument | BadDocument]:
    """Every document of a file, in order. Raises OSError where the file system fails."""
    path = str(file.path)
    if file.modified_ns is None:
        yield BadDocument(path=path, reason="a broken link, or no regular file")
        return
    try:
        content = file.path.open("rb")
    except PermissionError:
        yield BadDocument(path=path, reason="no permission to read it")
        return
    with content:
        if not _is_json_lines(file.path, data):
            yield _document(content.read(), _text, path=path, line=None)
            return

        def parse(line: bytes) -> str:
            return _json_text(line, field=data.text_field)

        for number, line in enumerate(content, start=1):
            yield _document(line, parse, path=path, line=number)


def _document(
    content: bytes, parse: Callable[[bytes], str], *, path: str, line: int | None
) -> Document | EmptyDocument | BadDocument:
    if not content.strip():
        return EmptyDocument()
    try:
        text = parse(content)
    except _UnreadableError as error:
        return BadDocument(path=path, line=line, reason=str(error))
    return Document(text=text) if text.strip() else EmptyDocument()


def _text(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _UnreadableError(f"not UTF-8 at byte {error.start}") from None


def _json_text(line: bytes, *, field: str) -> str:
    try:
        record = json.loads(_text(line))
    except (ValueError, RecursionError) as error:
        raise _UnreadableError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise _UnreadableError(f"a JSON {type(record).__name__} where an object was expected")
    text = record.get(field)
    if not isinstance(text, str):
        found = "is missing" if field not in record else f"holds {json.dumps(text)[:40]}"
        raise _UnreadableError(f"data.text_field {field!r} {found}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _UnreadableError(
            f"{field!r} holds half a surrogate pair at character {error.start}"
        ) from None
    return text


def _is_json_lines(path: Path, data: DataSpec) -> bool:
    if data.format == "auto":
        return path.suffix.lower() in _JSON_LINES
    return data.format == "jsonl"


class _Excluded:
    """The folders of `data.exclude`, compared by where paths really lead."""

    def __init__(self, folders: Iterable[str]) -> None:
        self._folders = {_real(Path(folder).expanduser()): folder for folder in folders}
        self._names = {folder.name for folder in self._folders} | {"", ".."}
        # Of a folder's files only the links are resolved one by one: corpora have millions.
        self._parents: dict[Path, str | None] = {}

    def folder_of(self, path: Path) -> str | None:
        """The folder of `data.exclude` that `path` lies in or is, as the spec names it."""
        if not self._folders:
            return None
        if path.parent not in self._parents:
            self._parents[path.parent] = self._holding(_real(path.parent))
        inside = self._parents[path.parent]
        # Path.is_symlink raises where a folder may not be entered.
        if inside is None and (os.path.islink(path) or path.name in self._names):  # noqa: PTH114
            return self._holding(_real(path))
        return inside

    def _holding(self, place: Path) -> str | None:
        return next(
            (self._folders[each] for each in (place, *place.parents) if each in self._folders), None
        )


def _real(path: Path) -> Path:
    """Where a path leads; Path.resolve fails on links in a circle."""
    return Path(os.path.realpath(path))


def _matches(pattern: Path, excluded: _Excluded) -> tuple[list[Path], str | None]:
    """The files of an entry, and the folder of `data.exclude` that held others back, if any did."""
    inside = excluded.folder_of(pattern)
    if inside is not None:
        return [], inside
    if pattern.is_dir():
        return list(_files_below(pattern, excluded)), None
    if pattern.is_symlink() or pattern.exists():
        return [pattern], None
    # Path.glob refuses absolute patterns.
    found = map(Path, glob.iglob(str(pattern), recursive=True))  # noqa: PTH207
    files = {path: excluded.folder_of(path) for path in found if not path.is_dir()}
    held_back = next((folder for folder in files.values() if folder is not None), None)
    return [path for path, folder in files.items() if folder is None], held_back


def _files_below(directory: Path, excluded: _Excluded) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise SpecError(f"data.inputs: {error.filename!r} cannot be listed: {error.strerror}")

    for folder, folders, names in os.walk(directory, onerror=fail):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and excluded.folder_of(Path(folder, name)) is None
        ]
        files = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (path for path in files if excluded.folder_of(path) is None)


def _freeze(path: Path) -> InputFile:
    try:
        state = path.stat()
    except OSError as error:
        # The last is a link in a circle. Any other means that the file system itself fails.
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP):
            raise
        return InputFile(path=path, size_bytes=0, modified_ns=None)
    if not stat.S_ISREG(state.st_mode):
        return InputFile(path=path, size_bytes=0, modified_ns=None)
    return InputFile(path=path, size_bytes=state.st_size, modified_ns=state.st_mtime_ns)


def _why_no_file(pattern: str) -> str:
    if pattern.startswith("s3://"):
        return "names a bucket, and inputs are paths; copy it to a file system that nodes mount"
    if Path(pattern).expanduser().is_dir():
        return "is a directory without a file that is neither hidden nor excluded; name another"
    return f"matches no file, looked for from {Path.cwd()}; correct the path, or name a directory"


def _why_excluded(folder: str) -> str:
    return (
        f"lies in {folder!r}, from which nothing is taken: it is the workdir, the embedded store's "
        "folder or a part of data.exclude; keep the documents elsewhere, or name another workdir"
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
