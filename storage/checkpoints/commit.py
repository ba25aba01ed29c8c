"""Making a save real: all ranks' parts are awaited, then one small object is written, once.

No collective takes part, for one late rank would break a process group for good. Whoever finds all
`done` records can do it, at any time: so a flusher finishes what a killed one began. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from awscrt.checksums import crc64nvme

from storage.checkpoint_records import Commit, FileRecord, SaveFacts
from storage.checkpoints.layout import METADATA_NAME, RankPart, compact, crc_text, merge
from storage.checkpoints.sealing import decode_sealed, encode_sealed
from storage.errors import CheckpointError
from storage.job import JobExit
from storage.ledger import Ledger
from storage.records import ExitCode, Intent, new_nonce

POLL_THREADS = 16
POLL_S = 0.02
POLL_MAX_S = 1.0


def await_parts(
    ledger: Ledger,
    *,
    attempt: int,
    facts: SaveFacts,
    deadline_s: float,
    patience_s: Callable[[], float] = lambda: float("inf"),
) -> tuple[RankPart, ...]:
    """All ranks' parts of a save, in the order of the ranks.

    `patience_s` bounds how long none may come; it is asked at every look.

    Raises:
        CheckpointError: some are missing at the deadline, or one is damaged.
        StoreError: the store failed.
    """
    keys = {
        rank: ledger.keys.done(attempt, step=facts.step, save=facts.save, rank=rank)
        for rank in range(facts.world_size)
    }
    parts: dict[int, RankPart] = {}
    begin = last = time.monotonic()
    pause_s = POLL_S
    with ThreadPoolExecutor(POLL_THREADS) as pool:
        while True:
            missing = [rank for rank in keys if rank not in parts]
            bodies = pool.map(ledger.store.get_if_exists, [keys[rank] for rank in missing])
            for rank, body in zip(missing, bodies, strict=True):
                if body is not None:
                    parts[rank] = decode_sealed(RankPart, body)
                    last = time.monotonic()
            if len(parts) == len(keys):
                return tuple(parts[rank] for rank in keys)
            now = time.monotonic()
            if now - begin >= deadline_s or now - last >= patience_s():
                absent = ", ".join(str(rank) for rank in keys if rank not in parts)
                raise CheckpointError(
                    f"no commit at step {facts.step}: the parts of ranks {absent} were not in the "
                    f"store {now - begin:.0f} s after rank 0 had written its own"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_MAX_S)


def commit_parts(
    ledger: Ledger, intent: Intent, facts: SaveFacts, parts: Iterable[RankPart]
) -> Commit:
    """Makes the save real, unless the attempt was closed or another job holds it.

    Doing it again, after a kill in between, finds the commit and returns it.

    Raises:
        CheckpointError: the parts do not make a whole.
        StoreError: the store failed; whether there is a commit is unknown.
        JobExit: with FENCED.
    """
    parts = tuple(parts)
    folder = ledger.keys.save(intent.attempt, step=facts.step, save=facts.save)
    body = compact(merge(part.layout for part in parts))
    metadata = FileRecord(
        key=folder + METADATA_NAME, size_bytes=len(body), crc64nvme=crc_text(crc64nvme(body))
    )
    ledger.store.put(metadata.key, body)
    commit = Commit(
        **vars(facts),
        run=intent.run,
        attempt=intent.attempt,
        metadata=metadata,
        files=tuple(file for part in parts for file in part.files),
        nonce=new_nonce(),
        at=datetime.now(UTC),
    )
    if ledger.is_superseded(intent):
        raise JobExit(
            ExitCode.FENCED,
            f"attempt {intent.attempt} was closed or replaced; no commit at step {facts.step}",
        )
    created = ledger.store.create(
        ledger.keys.commit(intent.attempt, step=facts.step), encode_sealed(commit)
    )
    if created.won:
        return commit
    standing = decode_sealed(Commit, created.body)
    if standing.save != facts.save:
        raise JobExit(
            ExitCode.FENCED,
            f"step {facts.step} of attempt {intent.attempt} is committed already, as save "
            f"{standing.save}: another job runs this attempt",
        )
    return standing
