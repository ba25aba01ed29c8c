"""Advisory locks on files, which the kernel releases however their holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.errors import StoreError

_POLL_S = 0.05


class FileLock:
    """One open lock file; leaving the `with` block releases it.

    A child that inherits the descriptor (`pass_fds`) goes on holding the lock after the block.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> FileLock:
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"cannot open the lock file {str(self.path)!r}: {error}; make its directory "
                "writable or name another one"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def try_acquire(self, *, shared: bool = False) -> bool:
        """Takes the lock if that is possible at once. Raises StoreError where locks do not work."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise StoreError(
                f"cannot lock {str(self.path)!r}: {error}; its file system offers no locks, so "
                "choose a directory on another one"
            ) from error
        return True

    def acquire(self, *, shared: bool = False, timeout_s: float) -> None:
        """Waits for the lock. Raises StoreError when it is not to be had in time."""
        deadline = time.monotonic() + timeout_s
        while not self.try_acquire(shared=shared):
            if time.monotonic() >= deadline:
                raise StoreError(
                    f"{str(self.path)!r} stayed locked by another process for {timeout_s:g} s; "
                    f"find that process with `fuser {self.path}`"
                )
            time.sleep(_POLL_S)


@contextmanager
def holding(path: Path, *, shared: bool = False, timeout_s: float) -> Iterator[FileLock]:
    """Holds the lock of a file during the block, after waiting for it at most `timeout_s`."""
    with FileLock(path) as lock:
        lock.acquire(shared=shared, timeout_s=timeout_s)
        yield lock
