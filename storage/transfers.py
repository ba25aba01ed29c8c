"""Bodies of large objects to and from the store: no copy that can be saved, and none that stalls.

botocore's time-outs bound one wait at a socket. Here a transfer also has to move, a little in each
`patience_s`: a store that sends a byte now and then would hold up a resume for ever.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping
from typing import Any

from botocore.exceptions import (
    FlexibleChecksumError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

READ_BYTES = 256 * 2**10
# What has to move within the patience of a transfer, or else it counts as stalled.
PROGRESS_BYTES = 256 * 2**10


def pieces(answer: Mapping[str, Any], *, patience_s: float) -> Iterator[bytes]:
    """The body of a `get_object`, piece by piece, each as it comes.

    To wait for whole blocks would hide from the clock that they trickle. The last piece has been
    given out before a checksum in the answer is looked at.

    Raises:
        botocore.exceptions.BotoCoreError: the body ends early, breaks off, stalls, or is not what
            the checksum says.
    """
    import urllib3.exceptions

    size_bytes = answer.get("ContentLength")
    algorithm = answer["ResponseMetadata"].get("ChecksumAlgorithm")
    body = answer["Body"]
    got = moved = 0
    until = time.monotonic() + patience_s
    with body as raw:
        while True:
            try:
                piece = raw.read1(READ_BYTES)
            except urllib3.exceptions.ReadTimeoutError as error:
                raise ReadTimeoutError(endpoint_url="of the body", error=error) from error
            except urllib3.exceptions.HTTPError as error:
                raise ResponseStreamingError(error=error) from error
            if not piece:
                break
            if algorithm is not None:
                body.checksum.update(piece)
            got += len(piece)
            yield piece
            if got - moved >= PROGRESS_BYTES:
                moved, until = got, time.monotonic() + patience_s
            elif time.monotonic() > until:
                raise ReadTimeoutError(endpoint_url="of the body")
    if size_bytes is not None and got != size_bytes:
        raise IncompleteReadError(actual_bytes=got, expected_bytes=size_bytes)
    if algorithm is not None:
        expected = answer["ResponseMetadata"]["HTTPHeaders"][f"x-amz-checksum-{algorithm.lower()}"]
        if body.checksum.digest() != base64.b64decode(expected):
            raise FlexibleChecksumError(
                error_msg=f"{algorithm} {body.checksum.b64digest()}, expected {expected}"
            )
