"""A pool of real ranks: processes in one gloo group, started once and given work by the tests."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 180


@dataclass(frozen=True)
class Answer:
    """What a rank made of its work. `died` is true when the process ended instead."""

    value: Any = None
    error: str = ""
    kind: str = ""
    died: bool = False


class RankPool:
    """`run(work, *arguments)` calls it on every rank; work is a module's function."""

    def __init__(self, size: int) -> None:
        context = get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, port), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, work: Callable[..., Any], *arguments: Any) -> list[Answer]:
        for pipe in self._pipes:
            pipe.send((work, arguments))
        return [self._receive(pipe) for pipe in self._pipes]

    def values(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """As `run`, for work that must succeed on every rank."""
        answers = self.run(work, *arguments)
        assert not any(answer.error or answer.died for answer in answers), answers
        return [answer.value for answer in answers]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            pipe.close()
            process.kill()
            process.join()

    def _receive(self, pipe: Connection) -> Answer:
        assert pipe.poll(TIMEOUT_S), "a rank said nothing"
        try:
            answer: Answer = pipe.recv()
        except (EOFError, ConnectionResetError):
            return Answer(died=True)
        return answer


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
    )
    while True:
        try:
            work, arguments = pipe.recv()
        except EOFError:
            break
        try:
            answer = Answer(value=work(*arguments))
        except Exception as error:
            answer = Answer(error=f"{error}\n{traceback.format_exc()}", kind=type(error).__name__)
        pipe.send(answer)
