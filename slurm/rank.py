"""The wrapper of every rank: hands the entry its context, and turns its end into a record.

Run as `python -P -m slurm.rank <job.json>` under srun or the local launcher. The first rank that
fails writes why; rank 0 writes what came out.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from slurm.job_logs import element_folder, srun_log
from slurm.launchers import first_failure
from slurm.log_patterns import Sign, find_sign, is_peer_loss
from slurm.log_tails import shorten, tail
from slurm.peers import Loss, Peers
from storage.errors import (
    CheckpointError,
    DataError,
    HeadraceError,
    SpecError,
    StoreError,
)
from storage.job import JobContext, JobDescription, JobExit, RankIdentity
from storage.ledger import Ledger
from storage.records import Exit, ExitCode, new_nonce
from storage.rendezvous import address_towards

ERROR_CHARACTERS = 8000
PEER_LOSS_PATIENCE_S = 3.0
"""A rank that only lost a peer waits this long, and as long as it takes to see that a node is gone,
so that the one at fault has the first word, or whoever saw which it was."""
_SRUN_BYTES = 100_000

_CODES: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (SpecError, ExitCode.BAD_CONFIG),
    (DataError, ExitCode.BAD_DATA),
    (StoreError, ExitCode.STORAGE),
    (CheckpointError, ExitCode.NO_CHECKPOINT),
    (MemoryError, ExitCode.OUT_OF_MEMORY),
)


def exit_code_of(error: BaseException) -> ExitCode:
    """The code with which a rank leaves that fell over `error`."""
    if isinstance(error, JobExit):
        return error.code
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    text = f"{type(error).__name__}: {error}"
    if find_sign(text, among=frozenset({Sign.OUT_OF_MEMORY})):
        return ExitCode.OUT_OF_MEMORY
    return ExitCode.CRASHED


def error_text(error: BaseException) -> str:
    """What the exit record says: a user's message where there is one, else the traceback."""
    if _is_told(error):
        return shorten(str(error), size=ERROR_CHARACTERS)
    return shorten("".join(traceback.format_exception(error)).strip(), size=ERROR_CHARACTERS)


def _is_told(error: BaseException) -> bool:
    """Whether the error is a message to a person, to whom the way to it in our code is noise."""
    is_expected = exit_code_of(error) is not ExitCode.CRASHED
    return isinstance(error, JobExit) or (isinstance(error, HeadraceError) and is_expected)


def run_rank(job: JobDescription, identity: RankIdentity) -> int:
    """Run the entry and return the code to leave with.

    What an entry returns says that the attempt's work is done; None, that an element's part is.
    """
    ledger: Ledger | None = None
    try:
        context = JobContext(job, identity)
        ledger = context.ledger
        with watched(context), context:
            outputs = importlib.import_module(job.entry).run(context)
        if identity.rank != 0:
            return ExitCode.DONE
        done = _exit(identity, ExitCode.DONE, outputs=dict(outputs or {}))
        if outputs is not None and identity.element is not None:
            ledger.claim_exit(job.intent, done)
        return ledger.claim_word(job.intent, done).record.code
    except BaseException as error:
        code = exit_code_of(error)
        if _is_told(error):
            print(f"headrace: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        if code is ExitCode.CRASHED and is_peer_loss(f"{type(error).__name__}: {error}"):
            time.sleep(job.peer_silence_s + PEER_LOSS_PATIENCE_S)
        if not _another_failed_first(job, identity):
            outputs = error.outputs if isinstance(error, JobExit) else {}
            word = _exit(identity, code, error=error_text(error), outputs=outputs)
            _leave_word(job, ledger, word)
        return code


def watched(context: JobContext) -> AbstractContextManager[object]:
    """Links this rank with the others of its job, so that none waits for a dead one."""
    identity, job = context.identity, context.job
    if identity.world_size == 1:
        return nullcontext()
    try:
        peers = Peers(
            identity,
            # The elements of an array are jobs of one intent, and may share a node.
            secret=f"{job.intent.nonce}-{identity.element}",
            host=_host(job, identity),
            address_of=context.address_of,
            on_silence=partial(_record_silence, context),
            silence_s=job.peer_silence_s,
        )
    except OSError as error:
        print(f"headrace: {identity.node} cannot watch its peers: {error}", flush=True)
        return nullcontext()
    context.peers, context.listens_at = peers, peers.listens_at
    return peers


def _host(job: JobDescription, identity: RankIdentity) -> str:
    """Where the other nodes reach this one. Its own name may lead to its loopback."""
    if job.launcher == "local" or len(identity.nodes) == 1:
        return "127.0.0.1"
    return address_towards(next(node for node in identity.nodes if node != identity.node))


def _record_silence(context: JobContext, loss: Loss) -> None:
    word = _exit(
        context.identity, ExitCode.PEER_LOST, error=loss.text, blamed_nodes=loss.blamed_nodes
    )
    _leave_word(context.job, context.ledger, word)
    faulthandler.dump_traceback(all_threads=True)


def _another_failed_first(job: JobDescription, identity: RankIdentity) -> bool:
    """Whether srun is ending this rank because of another; the batch step then has the word.

    A rank that is told to end often says "resume me", which would hide why.
    """
    folder = element_folder(job.folder, identity.element)
    first = first_failure(tail(srun_log(folder), size_bytes=_SRUN_BYTES))
    return first is not None and first.rank != identity.rank


def _exit(identity: RankIdentity, code: ExitCode, **words: object) -> Exit:
    return Exit(
        code=code,
        element=identity.element,
        rank=identity.rank,
        node=identity.node,
        nonce=new_nonce(),
        at=datetime.now(UTC),
        **words,  # type: ignore[arg-type]
    )


def _leave_word(job: JobDescription, ledger: Ledger | None, record: Exit) -> None:
    """Write the exit record if that can be done; the batch step writes one where it cannot."""
    try:
        (ledger or job.open_ledger()).claim_word(job.intent, record)
    except HeadraceError as error:
        print(f"headrace: exit record not written: {error}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # The warning before the time limit is for entries that listen; it must not end the others.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    job = JobDescription.read(Path(arguments[0]))
    return int(run_rank(job, RankIdentity.from_environment()))


if __name__ == "__main__":
    left_with = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch and of a broken process group can keep an interpreter from ending.
    os._exit(left_with)
