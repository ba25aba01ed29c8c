"""Measurements of one host, each a small function that returns a figure or raises.

They measure and never judge.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

import psutil

from storage.errors import StoreError
from storage.object_store import ObjectStore

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GIB = 2**30
MIB = 2**20
SMI_TIMEOUT_S = 20.0


class MissingToolError(Exception):
    """The host lacks the tool that would measure this."""


def cores() -> int:
    return os.cpu_count() or 0


def memory_gib() -> float:
    return round(psutil.virtual_memory().total / GIB, 2)


def kernel() -> str:
    return platform.release()


def python() -> str:
    return platform.python_version()


def torch_version() -> str:
    return importlib.metadata.version("torch")


def gpus() -> int:
    """GPUs that the driver's tool lists.

    Raises:
        MissingToolError: there is no such tool.
        OSError: it failed, or did not end in time, as it does when a driver hangs.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise MissingToolError("nvidia-smi is not installed")
    try:
        listed = subprocess.run(
            [tool, "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=SMI_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"nvidia-smi did not answer within {SMI_TIMEOUT_S:g} s") from error
    if listed.returncode:
        raise OSError(f"nvidia-smi failed: {(listed.stderr or listed.stdout).strip()[:300]}")
    return len(listed.stdout.splitlines())


def memory_copy_gb_per_s(*, size_bytes: int, seconds: float) -> float:
    """Bytes copied between two warm buffers a second."""
    source, target = bytearray(os.urandom(1024)) * (size_bytes // 1024), bytearray(size_bytes)

    def copy() -> None:
        memoryview(target)[: len(source)] = source

    return len(source) / _seconds_a_call(copy, seconds=seconds) / 1e9


def matmul_gflop_per_s(*, size: int, seconds: float) -> float:
    """Operations a second of a square float32 product, 2·size³ each, with the job's threads.

    By numpy, which is there in a tenth of a second: torch would take longer than all else here.
    """
    import numpy as np

    left, right = _matrix(size, seed=1), _matrix(size, seed=2)
    out = np.empty_like(left)

    def multiply() -> None:
        np.matmul(left, right, out=out)

    return 2 * size**3 / _seconds_a_call(multiply, seconds=seconds) / 1e9


def matmul_error(*, size: int) -> float:
    """The largest difference to the product in float64, in units of float32's own rounding.

    The rounding of a sum of `size` products grows with its root; a right result stays below 10.
    """
    import numpy as np

    left, right = _matrix(size, seed=3), _matrix(size, seed=4)
    exact = left.astype(np.float64) @ right.astype(np.float64)
    rounding = np.finfo(np.float32).eps * size**0.5 * np.abs(exact).mean()
    return float(np.abs(left @ right - exact).max() / rounding)


def disk_mb_per_s(folder: Path, *, size_bytes: int, rounds: int = 4) -> tuple[float, float]:
    """Speeds of writing a file with a flush to the disk, and of reading it back past the cache.

    Of several rounds the fastest counts, for the reason that `_seconds_a_call` gives.
    """
    content = os.urandom(size_bytes)
    writing = reading = float("inf")
    for _ in range(rounds):
        with NamedTemporaryFile(dir=folder, prefix="headrace-probe-") as file:
            begin = time.perf_counter()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            writing = min(writing, time.perf_counter() - begin)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begin = time.perf_counter()
            file.read()
            reading = min(reading, time.perf_counter() - begin)
    return size_bytes / writing / 1e6, size_bytes / reading / 1e6


def free_gib(folder: Path) -> float:
    return round(shutil.disk_usage(folder).free / GIB, 2)


def store_round_trip_ms(store: ObjectStore, key: str, *, size_bytes: int) -> float:
    """Puts, gets, compares and deletes an object; the time of all of it.

    Raises:
        StoreError: a request failed, or other bytes came back.
    """
    content = os.urandom(size_bytes)
    begin = time.perf_counter()
    store.put(key, content)
    try:
        if store.get(key) != content:
            raise StoreError(f"{key!r} came back with other bytes than were put")
    finally:
        failures = store.delete([key])
    if failures:
        raise StoreError(f"{key!r} could not be deleted: {failures[0].message}")
    return (time.perf_counter() - begin) * 1e3


def clock_offset_s(store: ObjectStore) -> float:
    """How far this host's clock is from the store's, to about half a second: its own is whole."""
    before = time.time()
    theirs = store.now().timestamp() + 0.5
    return round(abs((before + time.time()) / 2 - theirs), 2)


def _matrix(size: int, *, seed: int) -> NDArray[np.float32]:
    import numpy as np

    return np.random.default_rng(seed).random((size, size), dtype=np.float32)


def _seconds_a_call(call: Callable[[], None], *, seconds: float) -> float:
    """The fastest of the calls that are made in `seconds`, as STREAM counts them.

    What else runs on the host then is not the node's fault, and a mean would be made of it.
    """
    call()
    begin = now = time.perf_counter()
    fastest = float("inf")
    while now - begin < seconds:
        before = now
        call()
        now = time.perf_counter()
        fastest = min(fastest, now - before)
    return fastest
