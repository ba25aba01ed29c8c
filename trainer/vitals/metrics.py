"""`metrics.jsonl`: the run's curve, a line per logged step.

The file lies in the job's folder, from where the flusher copies it to the store before each commit.
So a curve that is cut at the step where the next attempt resumed has no gap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from storage.job import JobContext


@dataclass(frozen=True, kw_only=True)
class MetricsLine:
    """What is said of one step; `tokens` counts those consumed by the run so far."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    step_s: float
    split: Mapping[str, float]
    val_loss: float | None = None
    attempt: int

    def to_json(self) -> str:
        fields = {name: value for name, value in vars(self).items() if value is not None}
        return json.dumps(fields)


class MetricsLog:
    """The file of one attempt. Only rank 0 keeps one; the other ranks' methods do nothing."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._file: TextIO | None = None
        if context.identity.rank == 0:
            path = context.job.metrics_file
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")

    def write(self, line: MetricsLine) -> None:
        if self._file is not None:
            self._file.write(line.to_json() + "\n")
            self._file.flush()

    def upload(self) -> None:
        """Copies the curve so far to the store.

        Raises:
            StoreError: the store did not take it.
        """
        if self._file is not None:
            intent = self._context.job.intent
            key = self._context.job.keys.metrics(intent.stage, intent.attempt)
            self._context.store.put(key, Path(self._file.name).read_bytes())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
