"""From text to token ids: the bytes themselves, or any Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from storage.errors import SpecError
from storage.spec import DataSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = "bytes"


class DocumentTokenizer(Protocol):
    """What the builder needs of a tokenizer. `digest` tells two of them apart, `name` shows it."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def vocab(self) -> int:
        """One more than the largest id, the end of a document included."""
        ...

    @property
    def end_of_document(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """The ids of each text, without the end of the document."""
        ...


class ByteTokenizer:
    """Each byte of the UTF-8 text is a token; 256 ends a document."""

    name = BYTES
    digest = hashlib.sha256(b"headrace bytes 257").hexdigest()
    vocab = 257
    end_of_document = 256

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]


class FileTokenizer:
    """A `tokenizer.json`, used without its special tokens, truncation and padding."""

    def __init__(self, path: Path, *, end_of_document: str) -> None:
        """Reads the file.

        Raises:
            SpecError: it cannot be read, or does not know the end-of-document token.
        """
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            raise SpecError(
                f"data.tokenizer {str(path)!r} needs the package `tokenizers`, which is not "
                "installed: pip install 'headrace[trainer]', or use `tokenizer: bytes`"
            ) from error
        try:
            content = path.read_bytes()
        except OSError as error:
            raise SpecError(
                f"data.tokenizer {str(path)!r} cannot be read: {error.strerror}; name `bytes` or a "
                "`tokenizer.json` on a file system that every node mounts"
            ) from error
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_str(content.decode())
        # `tokenizers` raises bare Exceptions.
        except Exception as error:
            raise SpecError(
                f"data.tokenizer {str(path)!r} is not a tokenizer.json: {error}; export one with "
                "`Tokenizer.save`"
            ) from error
        # A file may carry limits that would cut documents short, or fill them up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        known = self._tokenizer.get_vocab(with_added_tokens=True)
        if end_of_document not in known:
            raise SpecError(
                f"data.end_of_document {end_of_document!r} is not a token of {str(path)!r}, which "
                f"knows {len(known)}; name one of its special tokens{_special(self._tokenizer)}"
            )
        self.name = path.name
        self.digest = hashlib.sha256(content).hexdigest()
        self.vocab = max(known.values()) + 1
        self.end_of_document = known[end_of_document]

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]


def open_tokenizer(data: DataSpec) -> DocumentTokenizer:
    """The tokenizer that the spec names.

    Raises:
        SpecError: see `FileTokenizer`; or no end-of-document token is named.
    """
    if data.tokenizer == BYTES:
        if data.end_of_document is not None:
            raise SpecError(
                f"data.end_of_document {data.end_of_document!r} has no meaning with `tokenizer: "
                "bytes`, whose documents end with the id 256; leave it out"
            )
        return ByteTokenizer()
    if data.end_of_document is None:
        raise SpecError(
            f"data.end_of_document is required with data.tokenizer {data.tokenizer!r}: name the "
            "token that ends a document, such as '<|endoftext|>'"
        )
    return FileTokenizer(
        Path(data.tokenizer).expanduser().absolute(), end_of_document=data.end_of_document
    )


def _special(tokenizer: Tokenizer) -> str:
    added = tokenizer.get_added_tokens_decoder().values()
    special = sorted(token.content for token in added if token.special)
    return f": {', '.join(special[:8])}" if special else ""
