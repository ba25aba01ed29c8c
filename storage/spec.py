"""The storage part of the spec: where bytes live, what is read, what is kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)


class Model(BaseModel):
    """Base of every spec block: frozen, and a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _not_blank(value: Any) -> Any:
    """Refuses blank text: taken as a path it would silently mean the working directory."""
    if isinstance(value, str) and not value.strip():
        raise ValueError(
            f"value {value!r}; must hold at least one character that is no white space; "
            "write '.' for the working directory, or remove it"
        )
    return value


PathText = Annotated[str, BeforeValidator(_not_blank)]
FolderOrFile = Annotated[Path, BeforeValidator(_not_blank)]


class EmbeddedSpec(Model):
    """The SeaweedFS child process that serves those who name no endpoint."""

    host: str = Field(
        "127.0.0.1",
        description="Address to bind. Loopback serves `kind: local`; the dev cluster's nodes reach "
        "its bridge address only.",
    )
    directory: FolderOrFile | None = Field(
        None, description="Where its data lives; by default `<workdir>/store`."
    )


class StoreSpec(Model):
    """An S3-compatible bucket. Credentials come from the usual AWS chain, never from here."""

    bucket: str = Field(
        "headrace",
        min_length=3,
        max_length=63,
        description="Lower-case letters, digits, '-' and '.'.",
    )
    prefix: str = Field("", description="Key prefix, without slashes at its ends.")
    endpoint_url: str | None = Field(
        None, description="None starts the embedded server, unless `aws` is true."
    )
    aws: bool = Field(False, description="True uses AWS S3 itself, with no endpoint to name.")
    region: str = "us-east-1"
    addressing_style: Literal["path", "virtual", "auto"] = "path"
    checksums: Literal["when_supported", "when_required"] = "when_supported"
    credentials_file: FolderOrFile | None = Field(
        None, description="A shared AWS credentials file that every node can read."
    )
    profile: str | None = None
    claims: FolderOrFile | None = Field(
        None,
        description="Folder on a file system that all nodes share, used only where the store has "
        "no conditional writes; by default `<workdir>/claims`.",
    )
    connect_timeout_s: float = Field(5.0, gt=0)
    read_timeout_s: float = Field(30.0, gt=0)
    max_attempts: int = Field(8, ge=1, le=50)
    embedded: EmbeddedSpec = EmbeddedSpec()

    @field_validator("bucket")
    @classmethod
    def _bucket_is_a_name(cls, bucket: str) -> str:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*[a-z0-9]", bucket) or ".." in bucket:
            raise ValueError(
                f"bucket {bucket!r} must be 3 to 63 lower-case letters, digits, '-' and single "
                "'.', and begin and end with a letter or a digit; rename it"
            )
        return bucket

    @field_validator("endpoint_url")
    @classmethod
    def _endpoint_is_an_address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if "@" in url:
            # Not shown: what stands before the '@' is likely a secret.
            raise ValueError(
                "endpoint_url must hold no credentials, and has an '@'; put them into "
                "store.credentials_file, or the environment of AWS"
            )
        if not _is_address(url):
            raise ValueError(
                f"endpoint_url {url!r} must be http:// or https:// and a host, with a port up to "
                "65535 if any; write it as in 'https://s3.example:9000', or leave it out for the "
                "embedded store"
            )
        return url

    @model_validator(mode="after")
    def _prefix_is_clean(self) -> StoreSpec:
        if self.prefix != self.prefix.strip("/") or "//" in self.prefix:
            raise ValueError(
                f"prefix {self.prefix!r} must not begin or end with '/' nor hold '//'; "
                f"write {'/'.join(part for part in self.prefix.split('/') if part)!r}"
            )
        if {".", ".."} & set(self.prefix.split("/")):
            raise ValueError(
                f"prefix {self.prefix!r} must hold no part '.' or '..', which some stores and "
                "proxies resolve as in a path; remove it"
            )
        if self.aws and self.endpoint_url is not None:
            raise ValueError("aws: true and endpoint_url exclude each other; keep one of them")
        return self

    @property
    def is_embedded(self) -> bool:
        """Whether this store is the child process that Headrace itself has to start."""
        return self.endpoint_url is None and not self.aws


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # A port that is none is told on access only.
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not re.search(r"\s", url)
        )
    except ValueError:
        return False


class DataSpec(Model):
    """From raw documents to token shards."""

    inputs: Annotated[tuple[PathText, ...], Field(min_length=1)] = Field(
        description="Globs of files, or directories read recursively; `**` is understood. What "
        "lies in `exclude`, in the workdir or in the embedded store's folder is left out."
    )
    exclude: tuple[PathText, ...] = Field(
        (),
        description="Folders, or files, that `inputs` never takes. A spec file adds the workdir "
        "and the embedded store's folder by itself.",
    )
    format: Literal["auto", "text", "jsonl"] = Field(
        "auto", description="`auto` goes by suffix: .jsonl and .ndjson are JSON lines, else text."
    )
    text_field: str = Field("text", description="The key of a JSON line that holds the document.")
    tokenizer: PathText = Field("bytes", description="`bytes`, or the path of a `tokenizer.json`.")
    end_of_document: str | None = Field(
        None, description="Token that ends a document; required with a `tokenizer.json`."
    )
    shard_tokens: int = Field(1_000_000, ge=1_000, description="Tokens a shard, at most.")
    validation_fraction: float = Field(0.01, ge=0.0, lt=1.0)
    max_bad_documents: int = Field(0, ge=0, description="More unreadable documents fail the stage.")
    max_documents: int | None = Field(None, ge=1)
    jobs: int = Field(
        8,
        ge=1,
        le=1000,
        description="The most jobs that make shards at once, as elements of one job array, each "
        "of 256 MiB of inputs or more. One with `max_documents`, and with `kind: local`.",
    )


class KeepSpec(Model):
    """Which checkpoints retention keeps; the union of the rules stays."""

    last: int = Field(3, ge=2, description="The newest n; fewer than two is never allowed.")


class RetentionSpec(Model):
    keep: KeepSpec = KeepSpec()
    grace_s: float = Field(3600.0, ge=0, description="Anything younger is kept.")


class LogsSpec(Model):
    """How long the workdir keeps the logs of jobs that are over, and code that no job needs."""

    keep_days: float | None = Field(
        30.0, ge=0, description="Older ones are removed; 0 or null keeps them for ever."
    )
    max_gb: float | None = Field(
        20.0, ge=0, description="Of one run; the oldest beyond are removed. 0 or null: no bound."
    )
