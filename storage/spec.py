"""The storage part of the spec: where bytes live, what is read, what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Model(BaseModel):
    """Base of every spec block: frozen, and a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class EmbeddedSpec(Model):
    """The SeaweedFS child process that serves those who name no endpoint."""

    host: str = Field(
        "127.0.0.1",
        description="Address to bind. Loopback serves `kind: local`; the dev cluster's nodes reach "
        "its bridge address only.",
    )
    directory: Path | None = Field(
        None, description="Where its data lives; by default `<workdir>/store`."
    )


class StoreSpec(Model):
    """An S3-compatible bucket. Credentials come from the usual AWS chain, never from here."""

    bucket: str = Field("headrace", min_length=3, max_length=63)
    prefix: str = Field("", description="Key prefix, without slashes at its ends.")
    endpoint_url: str | None = Field(
        None, description="None starts the embedded server, unless `aws` is true."
    )
    aws: bool = Field(False, description="True uses AWS S3 itself, with no endpoint to name.")
    region: str = "us-east-1"
    addressing_style: Literal["path", "virtual", "auto"] = "path"
    checksums: Literal["when_supported", "when_required"] = "when_supported"
    credentials_file: Path | None = Field(
        None, description="A shared AWS credentials file that every node can read."
    )
    profile: str | None = None
    connect_timeout_s: float = Field(5.0, gt=0)
    read_timeout_s: float = Field(30.0, gt=0)
    max_attempts: int = Field(8, ge=1, le=50)
    embedded: EmbeddedSpec = EmbeddedSpec()

    @model_validator(mode="after")
    def _prefix_is_clean(self) -> StoreSpec:
        if self.prefix != self.prefix.strip("/") or "//" in self.prefix:
            raise ValueError(
                f"prefix {self.prefix!r} must not begin or end with '/' nor hold '//'; "
                f"write {'/'.join(part for part in self.prefix.split('/') if part)!r}"
            )
        if self.aws and self.endpoint_url is not None:
            raise ValueError("aws: true and endpoint_url exclude each other; keep one of them")
        return self

    @property
    def is_embedded(self) -> bool:
        """Whether this store is the child process that Headrace itself has to start."""
        return self.endpoint_url is None and not self.aws


class DataSpec(Model):
    """From raw documents to token shards."""

    inputs: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="Globs of files, or directories read recursively; `**` is understood."
    )
    format: Literal["auto", "text", "jsonl"] = Field(
        "auto", description="`auto` goes by suffix: .jsonl and .ndjson are JSON lines, else text."
    )
    text_field: str = Field("text", description="The key of a JSON line that holds the document.")
    tokenizer: str = Field("bytes", description="`bytes`, or the path of a `tokenizer.json`.")
    end_of_document: str | None = Field(
        None, description="Token that ends a document; required with a `tokenizer.json`."
    )
    shard_tokens: int = Field(1_000_000, ge=1_000, description="Tokens a shard, at most.")
    validation_fraction: float = Field(0.01, ge=0.0, lt=1.0)
    max_bad_documents: int = Field(0, ge=0, description="More unreadable documents fail the stage.")
    max_documents: int | None = Field(None, ge=1)


class KeepSpec(Model):
    """Which checkpoints retention keeps; the union of the rules stays."""

    last: int = Field(3, ge=2, description="The newest n; fewer than two is never allowed.")


class RetentionSpec(Model):
    keep: KeepSpec = KeepSpec()
    grace_s: float = Field(3600.0, ge=0, description="Anything younger is kept.")
