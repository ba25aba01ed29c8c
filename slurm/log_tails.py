"""The end of a log that somebody else may still be writing."""

from __future__ import annotations

from pathlib import Path


def tail(path: Path, *, size_bytes: int) -> str:
    """The last whole lines within `size_bytes`; nothing where there is no such file."""
    try:
        with path.open("rb") as log:
            end = log.seek(0, 2)
            begin = max(0, end - size_bytes)
            log.seek(begin)
            body = log.read(size_bytes)
    except FileNotFoundError:
        return ""
    if begin > 0:
        body = body.partition(b"\n")[2]
    return body.decode(errors="replace").strip()


def shorten(text: str, *, size: int) -> str:
    """The beginning and, mostly, the end of a text that is too long for a record."""
    if len(text) <= size:
        return text
    head = size // 4
    cut = len(text) - size
    return f"{text[:head]}\n[... {cut} characters left out ...]\n{text[head + cut :]}"
