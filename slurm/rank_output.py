"""Writes what the ranks of a local job print into their nodes' logs, as `srun --label` does.

A process of its own has to read a rank's pipe: what a rank prints right before it is killed, or
what C code prints, never passes through the rank's Python. The batch step does it; whoever kills
the batch step of a local job kills its ranks with it, so none is left writing to nobody.
"""

from __future__ import annotations

import os
import selectors
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from slurm.job_logs import label, node_log

READ_BYTES = 1024 * 1024
"""More than a pipe holds, so that one reading has all that a dead rank left in its own."""
LINE_BYTES = 64 * 1024
"""A line longer than this is cut, so that a rank that never ends one costs no memory."""


@dataclass(kw_only=True)
class _Voice:
    """One rank's pipe, its node's log, and the line that it has not ended yet."""

    pipe: IO[bytes]
    label: bytes
    log: Path
    partial: bytes = b""

    def take(self, said: bytes) -> bytes:
        """The labelled lines that are whole now."""
        *whole, rest = (self.partial + said).split(b"\n")
        pieces = [piece for line in whole for piece in _pieces(line)]
        *more, self.partial = _pieces(rest)
        return b"".join(self.label + piece + b"\n" for piece in (*pieces, *more))

    def finish(self) -> bytes:
        rest, self.partial = self.partial, b""
        return self.label + rest + b"\n" if rest else b""


def _pieces(line: bytes) -> list[bytes]:
    ends = range(LINE_BYTES, max(len(line), 1) + LINE_BYTES, LINE_BYTES)
    return [line[end - LINE_BYTES : end] for end in ends]


class RankOutput:
    """The output of all local ranks. Use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._logs: dict[Path, int] = {}
        self._lost: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.pump(0.0)
        for key in list(self._selector.get_map().values()):
            self._end(key.data)
        self._selector.close()
        for log in self._logs.values():
            os.close(log)

    def add(self, pipe: IO[bytes], *, rank: int, node: str) -> None:
        """Read the rank's pipe from now on."""
        log = node_log(self._folder, node)
        if log not in self._logs:
            self._logs[log] = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.set_blocking(pipe.fileno(), False)
        voice = _Voice(pipe=pipe, label=label(rank), log=log)
        self._selector.register(pipe, selectors.EVENT_READ, voice)

    def pump(self, wait_s: float) -> None:
        """Write what there is to read, waiting so long for the first of it."""
        for key, _ in self._selector.select(wait_s):
            voice: _Voice = key.data
            said = os.read(voice.pipe.fileno(), READ_BYTES)
            if said:
                self._write(voice.log, voice.take(said))
            else:
                self._end(voice)

    def _end(self, voice: _Voice) -> None:
        self._write(voice.log, voice.finish())
        self._selector.unregister(voice.pipe)
        voice.pipe.close()

    def _write(self, log: Path, lines: bytes) -> None:
        """A full disk ends no job that does not need it: its lines are lost, counted, and told of
        as soon as there is room."""
        lost = self._lost.pop(log, 0)
        note = b"\nheadrace: %d bytes could not be written here\n" % lost if lost else b""
        left = note + lines
        try:
            while left:
                left = left[os.write(self._logs[log], left) :]
        except OSError:
            self._lost[log] = lost + min(len(left), len(lines))
