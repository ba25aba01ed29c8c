"""Who could not read a checkpoint, and when that condemns it.

One bad host must not condemn good checkpoints: it takes the word of two, or that of a verify, which
read every byte. A condemned checkpoint is passed over and kept: nothing is deleted on suspicion.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from storage.checkpoint_records import CommitRef, Quarantine
from storage.errors import StoreError
from storage.ledger import Ledger
from storage.records import encode

HOSTS_TO_CONDEMN = 2


def condemned(doubts: Iterable[Quarantine]) -> dict[CommitRef, str]:
    """The checkpoints that nobody should load, with the reason; pure."""
    by_ref: dict[CommitRef, list[Quarantine]] = {}
    for doubt in sorted(doubts, key=lambda each: (each.ref, each.host, each.attempt or 0)):
        by_ref.setdefault(doubt.ref, []).append(doubt)
    reasons = {}
    for ref, against in by_ref.items():
        verified = [doubt for doubt in against if doubt.attempt is None]
        hosts = {doubt.host: doubt for doubt in against if doubt.attempt is not None}
        if verified:
            reasons[ref] = f"a verify on {verified[0].host} found: {verified[0].fault}"
        elif len(hosts) >= HOSTS_TO_CONDEMN:
            reasons[ref] = f"{len(hosts)} hosts could not read it: " + "; ".join(
                f"{host} (attempt {doubt.attempt}): {doubt.fault}" for host, doubt in hosts.items()
            )
    return reasons


def quarantined(ledger: Ledger) -> dict[CommitRef, str]:
    """The run's condemned checkpoints, with the reason."""
    return condemned(read_doubts(ledger))


def read_doubts(ledger: Ledger) -> tuple[Quarantine, ...]:
    """All that was ever said against checkpoints, and not taken back."""
    return tuple(doubt for _, doubt in ledger.records(Quarantine, ledger.keys.quarantine))


def doubt(ledger: Ledger, ref: CommitRef, *, host: str, attempt: int, fault: str) -> None:
    """Say that this host could not load the checkpoint; another one may still try."""
    _put(ledger, ref, name=host, host=host, attempt=attempt, fault=fault)


def condemn(ledger: Ledger, ref: CommitRef, *, host: str, fault: str) -> None:
    """Say that a verify, which read all of the checkpoint, found it damaged."""
    # A name of its own, lest a job on this host says less with the same key later.
    _put(ledger, ref, name=f"{host}.verify", host=host, attempt=None, fault=fault)


def acquit(ledger: Ledger, ref: CommitRef) -> None:
    """Take back all that was said against the checkpoint: a verify found every byte in order.

    Raises:
        StoreError: the store would not delete it.
    """
    failures = ledger.store.delete(info.key for info in ledger.store.list(_folder(ledger, ref)))
    if failures:
        raise StoreError(
            f"the store would not delete {failures[0].key!r}: {failures[0].code} "
            f"{failures[0].message}; the checkpoint stays in quarantine"
        )


def _put(
    ledger: Ledger, ref: CommitRef, *, name: str, host: str, attempt: int | None, fault: str
) -> None:
    record = Quarantine(ref=ref, host=host, attempt=attempt, fault=fault, at=datetime.now(UTC))
    ledger.store.put(f"{_folder(ledger, ref)}{name}.json", encode(record))


def _folder(ledger: Ledger, ref: CommitRef) -> str:
    key = ledger.keys.doubt(ref.attempt, step=ref.step, save=ref.save, host="host")
    return key.rpartition("/")[0] + "/"
