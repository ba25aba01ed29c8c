"""The boto3 client of a store: everything of the spec that the wire depends on."""

from __future__ import annotations

import ipaddress
import os
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from botocore.exceptions import NoCredentialsError

from storage.errors import StoreError
from storage.spec import StoreSpec

if TYPE_CHECKING:
    from botocore.loaders import Loader
    from mypy_boto3_s3 import S3Client

CONNECTIONS = 32


def make_client(spec: StoreSpec, *, bulk: bool = False) -> S3Client:
    """A client with the spec's deadlines, retries and credentials; it connects to nothing yet.

    `bulk` is for much data. Its bodies are not signed where each carries a CRC64 that is: SHA-256
    would cost more than all the rest of a transfer. Whoever reads checks the CRC64 of every item
    against one that came in a signed object, so what botocore checks of answers is left out, too.

    Raises StoreError, or what botocore says of profiles and credentials.
    """
    # Here, since boto3 takes a quarter of a second that planning a run does not need.
    import boto3
    import botocore.session
    from botocore.config import Config

    if spec.credentials_file is not None and not os.access(spec.credentials_file, os.R_OK):
        raise StoreError(
            f"store.credentials_file {str(spec.credentials_file)!r} cannot be read on this host; "
            "put it on a file system that every node mounts, mode 600"
        )
    core = botocore.session.Session(profile=spec.profile)
    if spec.credentials_file is not None:
        core.set_config_variable("credentials_file", str(spec.credentials_file))
    core.register_component("data_loader", _descriptions(core.get_config_variable("data_path")))
    session = boto3.Session(botocore_session=core)
    if session.get_credentials() is None:
        raise NoCredentialsError
    s3: Any = {"addressing_style": spec.addressing_style}
    if bulk and spec.checksums == "when_supported":
        s3["payload_signing_enabled"] = False
    config = Config(
        region_name=spec.region,
        retries={"mode": "standard", "total_max_attempts": spec.max_attempts},
        # What botocore calls so also bounds how long the store may not read what is sent.
        connect_timeout=max(spec.connect_timeout_s, spec.read_timeout_s if bulk else 0.0),
        read_timeout=spec.read_timeout_s,
        s3=s3,
        request_checksum_calculation=spec.checksums,
        response_checksum_validation="when_required" if bulk else spec.checksums,
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
        proxies={} if _is_private(spec.endpoint_url) else None,
    )
    return session.client("s3", endpoint_url=spec.endpoint_url, config=config)


@cache
def _descriptions(data_path: str | None) -> Loader:
    """What botocore knows of S3, read and parsed once and not for each client."""
    from botocore.loaders import create_loader

    return create_loader(data_path)


def _is_private(endpoint_url: str | None) -> bool:
    """Whether the endpoint is an address that no web proxy of the site could reach for us."""
    try:
        return ipaddress.ip_address(urlsplit(endpoint_url or "").hostname or "").is_private
    except ValueError:
        return False
