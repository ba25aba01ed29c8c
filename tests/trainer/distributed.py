"""Real ranks for a test: processes that meet over gloo on the loopback.

They are forked from a server that has imported torch once, so a rank starts in a fraction of a
second; the server itself runs no thread, which is what makes forking it safe.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from storage.job import RankIdentity

DEADLINE_S = 120.0


class RankFunction(Protocol):
    """A function of the test module that each rank calls."""

    def __call__(self, identity: RankIdentity, /, *args: Any) -> Any: ...


def run_distributed_test(
    function: RankFunction, world_size: int, *args: Any, nodes: int = 1
) -> list[Any]:
    """Calls `function(identity, *args)` on every rank and returns what they returned, by rank.

    Raises:
        AssertionError: a rank raised, died or did not end; its traceback is in the message.
    """
    ranks = start_ranks(function, world_size, *args, nodes=nodes)
    try:
        outcomes = [rank.outcome() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failures = [f"rank {n}: {text}" for n, (good, text) in enumerate(outcomes) if not good]
    assert not failures, "\n".join(failures)
    return [value for _, value in outcomes]


class RankProcess:
    """One rank. `outcome` waits for it."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def outcome(self) -> tuple[bool, Any]:
        """(True, what it returned) or (False, why it did not return)."""
        if not wait([self._pipe], timeout=DEADLINE_S):
            return False, f"no end within {DEADLINE_S:g} s"
        try:
            good, value = pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            self._process.join(DEADLINE_S)
            return False, f"died with exit code {self._process.exitcode}"
        return good, value

    def exit_code(self) -> int | None:
        self._process.join(DEADLINE_S)
        return self._process.exitcode

    def kill(self) -> None:
        # The fork server tells of an end a moment after it, so the process may be gone already.
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._process.join(DEADLINE_S)
        self._pipe.close()


def start_ranks(
    function: RankFunction, world_size: int, *args: Any, nodes: int = 1
) -> list[RankProcess]:
    """Starts the ranks and returns at once; the caller kills what is left of them."""
    context = _fork_server()
    port = free_port()
    per_node = world_size // nodes
    ranks = []
    for rank in range(world_size):
        identity = RankIdentity(
            rank=rank,
            world_size=world_size,
            local_rank=rank % per_node,
            node=f"n{rank // per_node + 1}",
            nodes=tuple(f"n{node + 1}" for node in range(nodes)),
            master_addr="127.0.0.1",
            master_port=port,
        )
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(theirs, function, identity, args))
        process.start()
        theirs.close()
        ranks.append(RankProcess(process, ours))
    return ranks


@cache
def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainer.main", "torch._dynamo", "boto3.session"])
    # The server of Python 3.11 is not told of sys.path, and then preloads nothing, silently.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _run_rank(
    pipe: Connection, function: Callable[..., Any], identity: RankIdentity, args: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        answer = (True, function(identity, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    # Pickled by value: as torch would send tensors, they vanish with the process.
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    # As a real rank does: threads of gloo that wait for a dead peer must not keep it alive.
    os._exit(0)
