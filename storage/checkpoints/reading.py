"""Reading checkpoints outside a job, beside a sweeper that may be at work.

A job's marker ends with its attempt. Nobody records the end of a command that a person runs, so its
marker holds for a few minutes and is put again as long as the command lives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from storage.checkpoint_records import CommitRef, Reading
from storage.checkpoints.commits import read_journals
from storage.checkpoints.lineage import journaled
from storage.errors import CheckpointError, StoreError
from storage.ledger import Ledger
from storage.records import encode, new_nonce

VALID_S = 300.0
RENEWALS = 5


@contextmanager
def reading(
    ledger: Ledger, refs: Iterable[CommitRef], *, who: str, valid_s: float = VALID_S
) -> Iterator[frozenset[CommitRef]]:
    """Keeps sweepers off the checkpoints while the block lasts; gives those that may be read.

    What a sweep has named already is not among them. `who` is told to whoever sweeps, such as
    `verify by ann on login1`.

    Raises:
        CheckpointError: at the block's end, when the marker could not be renewed in time, so that
            what was read may have been deleted meanwhile.
        StoreError: the store failed.
    """
    marker = _Marker(ledger, tuple(refs), who=who, valid_s=valid_s)
    marker.put()
    # The marker goes first: of a reader and a sweeper at least one sees the other.
    standing = frozenset(marker.refs) - journaled(read_journals(ledger))
    renewer = threading.Thread(target=marker.renew, daemon=True)
    renewer.start()
    try:
        yield standing
    finally:
        marker.stop.set()
        renewer.join()
        # Should the store refuse, the marker expires all the same.
        ledger.store.delete([marker.key])
    marker.require_unbroken()


class _Marker:
    def __init__(
        self, ledger: Ledger, refs: tuple[CommitRef, ...], *, who: str, valid_s: float
    ) -> None:
        self.key = f"{ledger.keys.readers}{new_nonce()}.json"
        self.refs = refs
        self.stop = threading.Event()
        self._store = ledger.store
        self._who = who
        self._valid_s = valid_s
        self._put_at_s = time.monotonic()
        self._longest_gap_s = 0.0
        self._trouble = ""

    def put(self) -> None:
        # From before the request: the store's clock starts no earlier.
        at_s = time.monotonic()
        record = Reading(refs=self.refs, who=self._who, valid_s=self._valid_s, at=datetime.now(UTC))
        self._store.put(self.key, encode(record))
        self._longest_gap_s = max(self._longest_gap_s, time.monotonic() - self._put_at_s)
        self._put_at_s = at_s

    def renew(self) -> None:
        while not self.stop.wait(self._valid_s / RENEWALS):
            try:
                self.put()
            except StoreError as error:
                self._trouble = f": {error}"

    def require_unbroken(self) -> None:
        gap_s = max(self._longest_gap_s, time.monotonic() - self._put_at_s)
        if gap_s > self._valid_s:
            raise CheckpointError(
                f"the marker that keeps sweepers off holds for {self._valid_s:g} s and was renewed "
                f"only after {gap_s:.0f} s, so what was read may have been deleted meanwhile; read "
                f"it again{self._trouble}"
            )
