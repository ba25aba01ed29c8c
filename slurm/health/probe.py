"""The entry of a probe job: measures one node and judges nothing.

Each measure stands alone: one that fails is a finding, and the others are still made.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from slurm.health import host
from slurm.health.registry import Measure, ProbeJob, Value
from storage.errors import HeadraceError
from storage.job import JobContext
from storage.records import new_nonce

MATMUL_ERROR_LIMIT = 10.0


def run(context: JobContext) -> Mapping[str, Any]:
    """Entry of the job. The node's first rank measures."""
    if context.identity.rank != 0:
        return {}
    job = ProbeJob.model_validate(context.job.payload)
    key = f"{context.job.keys.probes}/{context.identity.node}-{new_nonce()}"
    measures = measure_node(job, context=context, key=key)
    return {
        "node": context.identity.node,
        "measures": {name: asdict(measure) for name, measure in measures.items()},
    }


def measure_node(job: ProbeJob, *, context: JobContext, key: str) -> Mapping[str, Measure]:
    """All measures of this node, by the names of their checks; `key` is used to try the store."""
    disk = _Disk(job)
    plan: Mapping[str, Callable[[], Value]] = {
        "cores": host.cores,
        "memory": host.memory_gib,
        "kernel": host.kernel,
        "python": host.python,
        "torch": host.torch_version,
        "gpus": host.gpus,
        "memory_copy": lambda: host.memory_copy_gb_per_s(
            size_bytes=job.copy_mib * host.MIB, seconds=job.seconds_each
        ),
        "matmul": lambda: host.matmul_gflop_per_s(size=job.matmul_size, seconds=job.seconds_each),
        "matmul_correct": lambda: _require_correct(host.matmul_error(size=job.matmul_size)),
        "disk_write": disk.write,
        "disk_read": disk.read,
        "scratch_free": lambda: host.free_gib(job.scratch),
        "store": lambda: host.store_round_trip_ms(
            context.store, key, size_bytes=job.store_kib * 1024
        ),
        "clock": lambda: host.clock_offset_s(context.store),
    }
    measures: dict[str, Measure] = {}
    for number, (name, take) in enumerate(plan.items()):
        measures[name] = measure(take)
        context.progress(step=number + 1)
    return measures


def measure(take: Callable[[], Value]) -> Measure:
    """The value, or why there is none."""
    try:
        value = take()
    except host.MissingToolError as error:
        return Measure(unknown=str(error))
    except importlib.metadata.PackageNotFoundError as error:
        return Measure(failure=f"the package {error.name} is not installed")
    except (OSError, RuntimeError, ImportError, MemoryError, HeadraceError) as error:
        return Measure(failure=f"{type(error).__name__}: {error}")
    return Measure(value=round(value, 4) if isinstance(value, float) else value)


def _require_correct(error: float) -> bool:
    if not error < MATMUL_ERROR_LIMIT:
        raise WrongResultError(
            f"a product is off by {error:.3g} times what rounding explains "
            f"(at most {MATMUL_ERROR_LIMIT:g})"
        )
    return True


class WrongResultError(HeadraceError):
    """The node computed a wrong result."""


class _Disk:
    """Writes and reads once, for two checks; a write that failed leaves nothing to read."""

    def __init__(self, job: ProbeJob) -> None:
        self._job = job
        self._read_mb_per_s: float | None = None

    def write(self) -> float:
        written, self._read_mb_per_s = host.disk_mb_per_s(
            self._job.scratch, size_bytes=self._job.disk_mib * host.MIB
        )
        return written

    def read(self) -> float:
        if self._read_mb_per_s is None:
            raise host.MissingToolError("nothing was written that could be read back")
        return self._read_mb_per_s
