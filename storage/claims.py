"""Claims on a shared file system, for stores that have no conditional writes.

A claim is a folder that holds the body to be stored. It is made under another name, and renamed: a
rename onto a folder that is not empty fails on every file system, so of several one wins, and none
is ever seen half. Whoever comes next, and finds a claim whose object is not in the store, puts it
there: the claimant may be dead.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from pathlib import Path

from storage.errors import StoreError

PATIENCE_S = 10.0
"""A client of a network file system may go on believing for some seconds that a file is absent."""

_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST})


class Claims:
    """The claims on the keys of one bucket, below `folder`/<bucket>/."""

    def __init__(self, folder: Path, *, bucket: str) -> None:
        """Raises StoreError when the folder is not there: a new one would know of no claim."""
        if not folder.is_dir():
            raise StoreError(
                f"{folder}, where claims are made since the store has no conditional writes, is no "
                "folder on this host; it must lie on a file system that this host and all nodes "
                "share, as it did when the run began"
            )
        self._root = folder / bucket

    def take(self, key: str, body: bytes) -> bytes:
        """The body that holds the claim on the key: this one, unless another was first.

        Raises:
            StoreError: the file system failed.
        """
        final = self._place(key)
        draft = final.with_name(f".{secrets.token_hex(8)}.draft")
        try:
            held = self.holder(key)
            if held is not None:
                return held
            draft.mkdir(parents=True)
            _write(draft / "body", body)
            try:
                draft.rename(final)
            except OSError as error:
                # A rename that was sent twice finds the draft gone, for it has won already.
                if error.errno not in _TAKEN and not isinstance(error, FileNotFoundError):
                    raise
                return self._read_taken(final)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
            _sync(final.parent)
        except OSError as error:
            raise StoreError(
                f"cannot claim {key!r} at {final}: {error}; all jobs and engines must be able to "
                "write there"
            ) from error
        return body

    def holder(self, key: str) -> bytes | None:
        """The body that holds the claim, or None where there is no claim."""
        try:
            return (self._place(key) / "body").read_bytes()
        except FileNotFoundError:
            return None

    def drop(self, key: str) -> None:
        """Forget the claim on a key that is about to be deleted."""
        place = self._place(key)
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)

    def _place(self, key: str) -> Path:
        place = self._root / key
        return place.with_name(f"{place.name}.claim")

    def _read_taken(self, final: Path) -> bytes:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return (final / "body").read_bytes()
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)


def _write(path: Path, body: bytes) -> None:
    with path.open("xb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
