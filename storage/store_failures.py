"""What a failed request means to a user: cause and remedy for the errors that people really meet.

Apart from `object_store`, because it is a pure mapping from what botocore raises to what is said.
"""

from __future__ import annotations

from dataclasses import dataclass

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError

from storage.errors import ObjectMissing, StoreError


@dataclass(frozen=True)
class Request:
    """The request that failed, in the words that go into the error."""

    operation: str
    bucket: str
    endpoint: str
    key: str | None = None

    def __str__(self) -> str:
        what = f"s3://{self.bucket}" if self.key is None else f"s3://{self.bucket}/{self.key}"
        return f"{self.operation} {what} at {self.endpoint}"


_REMEDIES_BY_CODE: dict[str, str] = {
    "NoSuchBucket": "create the bucket, or correct `store.bucket`",
    "InvalidBucketName": "correct `store.bucket`: 3 to 63 lower-case letters, digits and hyphens",
    "AccessDenied": "give these credentials read, write, list and delete rights on the bucket and "
    "prefix, or choose others with AWS_PROFILE or `store.profile`",
    "InvalidAccessKeyId": "this store does not know the access key; check AWS_ACCESS_KEY_ID, "
    "AWS_PROFILE, or `store.credentials_file` and `store.profile`",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key, or a proxy changes "
    "the requests; check the credentials and `store.region`",
    "ExpiredToken": "renew the temporary credentials",
    "RequestTimeTooSkewed": "this host's clock differs too much from the store's; synchronise it "
    "(chrony or ntpd) on every node",
    "PermanentRedirect": "the bucket lives elsewhere; correct `store.region` or "
    "`store.endpoint_url`",
    "AuthorizationHeaderMalformed": "correct `store.region`",
    "SlowDown": "the store is throttling; lower the number of parallel transfers or try later",
    "ServiceUnavailable": "the store is overloaded or restarting; try again later",
    "InternalError": "the store failed inside: look at its own log, and whether its disks are full",
    "NotImplemented": "this store lacks a part of the S3 API that Headrace needs; "
    "`store.checksums: when_required` helps with some",
    "MissingContentMD5": "this store wants another checksum; set `store.checksums: when_required`",
    "QuotaExceeded": "the store is full; prune checkpoints or raise the quota",
    "InsufficientStorage": "the store is full; prune checkpoints or give it more space",
}
# A HEAD has no body, so its error code is the bare HTTP status.
_SAME_AS = {
    "403": "AccessDenied",
    "301": "PermanentRedirect",
    "503": "ServiceUnavailable",
    "500": "InternalError",
    "507": "InsufficientStorage",
    "501": "NotImplemented",
    "InvalidToken": "ExpiredToken",
    "TokenRefreshRequired": "ExpiredToken",
    "XMinioStorageFull": "InsufficientStorage",
}
_MISSING_CODES = frozenset({"NoSuchKey", "404", "NotFound"})

_REMEDIES_BY_TYPE: dict[type[BotoCoreError], str] = {
    boto.NoCredentialsError: "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or "
    "name a shared file in `store.credentials_file`; every node must find them",
    boto.PartialCredentialsError: "give both the access key and the secret key",
    boto.ProfileNotFound: "correct `store.profile` or AWS_PROFILE, or add that profile",
    boto.SSLError: "check the certificate, AWS_CA_BUNDLE, and http or https in the endpoint",
    boto.ProxyConnectionError: "check HTTP_PROXY and HTTPS_PROXY, or add the host to NO_PROXY",
    boto.ConnectTimeoutError: "no answer from that address: check `store.endpoint_url`, routes and "
    "firewalls from this host; `store.connect_timeout_s` sets the patience",
    boto.ReadTimeoutError: "the store fell silent: look at its load and its log; "
    "`store.read_timeout_s` sets the patience",
    boto.EndpointConnectionError: "connection refused or host unknown: is the store running, and "
    "does this host reach `store.endpoint_url`?",
    boto.IncompleteReadError: "the answer broke off: look at the network and at the store's log",
    boto.FlexibleChecksumError: "the bytes that came are not the bytes that were stored: try "
    "again, then suspect the network or the store's disks",
    boto.ConnectionClosedError: "the store closed the connection: look at its log",
    boto.HTTPClientError: "look at the network and at the store's log",
}


def error_code(error: ClientError) -> str:
    """The S3 error code, or the HTTP status as text where the store sent no body."""
    return str(error.response.get("Error", {}).get("Code", "unknown"))


def is_missing(error: ClientError) -> bool:
    """Whether the error says that the object (not the bucket) is not there."""
    return error_code(error) in _MISSING_CODES


def explain(error: BotoCoreError | ClientError, request: Request) -> StoreError:
    """The error for the user: which request, at which endpoint, what happened, what to do."""
    if isinstance(error, ClientError):
        code = error_code(error)
        if request.key is not None and is_missing(error):
            return ObjectMissing(request.key)
        message = error.response.get("Error", {}).get("Message", "")
        cause = f"{code}: {message}" if message and message != code else code
        remedy = _REMEDIES_BY_CODE.get(_SAME_AS.get(code, code))
    else:
        cause = f"{type(error).__name__}: {error}"
        if _stopped_reading(error):
            cause = f"{type(error).__name__}: the store stopped reading what was sent"
            error = boto.ReadTimeoutError(endpoint_url=request.endpoint)
        kinds = (kind for kind in type(error).__mro__ if kind in _REMEDIES_BY_TYPE)
        remedy = next((_REMEDIES_BY_TYPE[kind] for kind in kinds), None)
    told = f"{request} failed: {cause.rstrip('.')}"
    return StoreError(told if remedy is None else f"{told}; {remedy}")


def _stopped_reading(error: BotoCoreError) -> bool:
    """botocore calls it a closed connection when a socket took no more bytes until its time-out."""
    inner = error.kwargs.get("error") if isinstance(error, boto.ConnectionClosedError) else None
    return any(isinstance(reason, TimeoutError) for reason in getattr(inner, "args", ()))
