"""Our object store client beside boto3's own transfer manager, on one embedded server.

python -m benchmarks.object_store [--size-mib 256] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from boto3.s3.transfer import TransferConfig

from benchmarks.comparing import Row, Timing, alternate, compare, show, write_json
from storage import embedded
from storage.object_store import ObjectStore
from storage.spec import StoreSpec

OURS = "headrace"
PEER = "boto3 transfer manager"
THREADS = 4
MIB = 1024 * 1024
BUCKET = "headrace"


def main(
    size_mib: Annotated[int, typer.Option(min=1)] = 256,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    json: Annotated[Path | None, typer.Option(help="Write the rows here, too.")] = None,
) -> None:
    """Upload and read back one object of `size_mib`, with 4 threads on each side."""
    with tempfile.TemporaryDirectory() as folder:
        server = embedded.EmbeddedStore(directory=Path(folder), host="127.0.0.1", bucket=BUCKET)
        try:
            with server.in_use() as endpoint:
                store = ObjectStore(embedded.resolved(StoreSpec(), endpoint))
                rows, timings = _measure(store, size_bytes=size_mib * MIB, rounds=rounds)
        finally:
            server.stop()
    show(rows, timings, ours=OURS)
    if json is not None:
        write_json(rows, json)


def _measure(
    store: ObjectStore, *, size_bytes: int, rounds: int
) -> tuple[list[Row], dict[str, dict[str, Timing]]]:
    data = os.urandom(size_bytes)
    config = TransferConfig(
        multipart_threshold=32 * MIB, multipart_chunksize=32 * MIB, max_concurrency=THREADS
    )

    def upload_theirs() -> None:
        store.client.upload_fileobj(io.BytesIO(data), BUCKET, "theirs", Config=config)

    def read_theirs() -> None:
        store.client.download_fileobj(BUCKET, "theirs", io.BytesIO(), Config=config)

    contests: dict[str, dict[str, Callable[[], object]]] = {
        f"upload {size_bytes // MIB} MiB": {
            OURS: lambda: store.upload("ours", data, part_bytes=32 * MIB, threads=THREADS),
            PEER: upload_theirs,
        },
        f"read {size_bytes // MIB} MiB": {
            OURS: lambda: store.get("ours"),
            PEER: read_theirs,
        },
    }
    timings = {name: alternate(contest, rounds=rounds) for name, contest in contests.items()}
    rows = [row for name in contests for row in compare(name, timings[name], ours=OURS, goal=1.1)]
    return rows, timings


if __name__ == "__main__":
    typer.run(main)
