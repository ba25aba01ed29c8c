"""Records that tell by themselves whether a byte of them has changed.

What lies in a checkpoint is guarded by the checksums in its records, and these by a seal: the last
field of the JSON object is the CRC64-NVME of every byte before it. It is taken over the bytes as
they stand, not over a re-encoding, so a later version that knows more fields still reads them.
"""

from __future__ import annotations

import re
from typing import TypeVar

from awscrt.checksums import crc64nvme

from storage.checkpoints.layout import crc_text
from storage.errors import CheckpointError, LedgerError
from storage.records import decode, encode

T = TypeVar("T")

_SEALED = re.compile(rb'(\{.+),"seal":"([A-Za-z0-9+/]{11}=)"\}', re.DOTALL)


class DamagedRecordError(CheckpointError):
    """A sealed record is not as it was written, or not where it belongs."""


def encode_sealed(record: object) -> bytes:
    """The record's JSON, without white space, and its seal."""
    told = encode(record, indent=None).removesuffix(b"}")
    return told + b',"seal":"' + crc_text(crc64nvme(told)).encode() + b'"}'


def decode_sealed(kind: type[T], body: bytes) -> T:
    """The record in `body`.

    Raises:
        DamagedRecordError: a byte of it was changed, it was cut short, or it was never sealed.
    """
    sealed = _SEALED.fullmatch(body)
    if sealed is None:
        raise DamagedRecordError(f"a {kind.__name__} of {len(body)} bytes has no seal at its end")
    told, seal = sealed[1], sealed[2].decode()
    if crc_text(crc64nvme(told)) != seal:
        raise DamagedRecordError(
            f"a {kind.__name__} of {len(body)} bytes has seal {seal}, and its bytes have "
            f"{crc_text(crc64nvme(told))}"
        )
    try:
        return decode(kind, told + b"}")
    except LedgerError as error:
        raise DamagedRecordError(str(error)) from None
