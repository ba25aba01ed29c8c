"""`headrace checkpoints export`: a checkpoint as a folder that Hugging Face's `transformers` loads.

The folder appears whole or not at all: everything is written to one beside it, which is renamed
when all that was read has proved to be what was saved.
"""

from __future__ import annotations

import getpass
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from storage.checkpoint_records import Commit
from storage.checkpoints.contents import folder_of, read_layout
from storage.checkpoints.export import FILE_BYTES, FloatType, Wanted, output_bytes, write_tensors
from storage.checkpoints.layout import Layout
from storage.checkpoints.reading import reading
from storage.errors import CheckpointError, DataError, HeadraceError, SpecError
from storage.ledger import Ledger
from storage.records import RunRecord, Stage, new_nonce
from storage.shards.manifest import TokenizerRecord, load_manifest
from storage.shards.tokenizers import BYTES
from trainer.hugging_face import (
    adds_tokens,
    bytes_tokenizer,
    file_tokenizer,
    generation_config,
    model_config,
    parameter_names,
    parameter_shapes,
    to_json,
    tokenizer_config,
)
from trainer.plan.arithmetic import ModelShape
from trainer.spec import TrainSpec

PREFIX = "model."
"""Of the parameters' names in a checkpoint (`trainer.state`)."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written: names of files in `folder`, and bytes of tensors."""

    folder: Path
    files: tuple[str, ...]
    tensor_bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A checkpoint of the built-in trainer, with what its weights mean."""

    commit: Commit
    train: TrainSpec
    shape: ModelShape
    tokenizer: TokenizerRecord
    tokenizer_text: str


def export(
    ledger: Ledger,
    record: RunRecord,
    commit: Commit,
    folder: Path,
    *,
    dtype: FloatType,
    tokenizer: Path | None,
    began: Callable[[int], None],
    told: Callable[[int], None],
    file_bytes: int = FILE_BYTES,
) -> Exported:
    """Writes the model of a checkpoint; `began` hears how many bytes are to be read.

    `told` hears of those that were; `tokenizer` is where the run's tokenizer.json is now, by
    default where it was.

    Raises:
        SpecError: the folder is in use, or the run has no model of ours.
        HeadraceError: the checkpoint is damaged or was swept, the tokenizer is another one, or the
            folder cannot be written.
    """
    folder = folder.expanduser().absolute()
    _require_free(folder)
    source = _source(ledger, record, commit, tokenizer)
    who = f"export by {getpass.getuser()} on {socket.gethostname()}"
    with _made_whole(folder) as partial, reading(ledger, [commit.ref], who=who) as standing:
        if commit.ref not in standing:
            raise CheckpointError(
                f"the checkpoint {commit.step}.{commit.attempt} was swept meanwhile; export another"
            )
        wanted = _wanted(read_layout(ledger.store, commit), source)
        total = sum(output_bytes(tensor.layout, dtype) for tensor in wanted)
        _require_room(folder, total)
        began(sum(chunk.size_bytes for tensor in wanted for chunk in tensor.layout.chunks))
        written = write_tensors(
            ledger.store,
            folder_of(commit),
            wanted,
            partial,
            dtype=dtype,
            about=_about(record, commit),
            told=told,
            file_bytes=file_bytes,
        )
        _write_settings(partial, source, dtype=dtype)
        files = tuple(sorted(path.name for path in partial.iterdir()))
    return Exported(
        folder=folder,
        files=files,
        tensor_bytes=written.tensor_bytes,
        warnings=_warnings(source),
    )


def _require_free(folder: Path) -> None:
    if folder.is_dir():
        if held := sum(1 for _ in folder.iterdir()):
            raise SpecError(
                f"-o {folder}: must be a new or an empty folder, and holds {held} "
                f"{'entry' if held == 1 else 'entries'}; name another one"
            )
    elif folder.exists():
        raise SpecError(f"-o {folder}: is a file; name a folder")
    elif not folder.parent.is_dir():
        raise SpecError(
            f"-o {folder}: there is no folder {folder.parent}; make it, or name another"
        )


def _source(ledger: Ledger, record: RunRecord, commit: Commit, tokenizer: Path | None) -> _Source:
    if record.spec.get("command") is not None:
        raise SpecError(
            f"run {record.run!r} trains with a script of its own (command.argv), whose model "
            "Headrace does not know; only models of the built-in trainer can be exported"
        )
    try:
        train = TrainSpec.model_validate(record.spec["train"])
    except (KeyError, ValidationError) as error:
        raise SpecError(
            f"the spec that run {record.run!r} began with is of another version of Headrace "
            f"({error}); export with the version that began it"
        ) from None
    made_by = _tokenizer(ledger, commit)
    if made_by.name == BYTES:
        if tokenizer is not None:
            raise SpecError(
                f"--tokenizer {tokenizer}: has no meaning for run {record.run!r}, whose tokenizer "
                "is `bytes`; leave it out"
            )
        text = bytes_tokenizer()
    else:
        named = tokenizer or Path(str((record.spec.get("data") or {}).get("tokenizer")))
        text = file_tokenizer(named.expanduser(), made_by)
    return _Source(
        commit=commit,
        train=train,
        shape=ModelShape.resolve(train.model, tokenizer_vocab=made_by.vocab),
        tokenizer=made_by,
        tokenizer_text=text,
    )


def _tokenizer(ledger: Ledger, commit: Commit) -> TokenizerRecord:
    """The tokenizer of the data set that the checkpoint was trained on."""
    for record in reversed(ledger.stage_records(Stage.SHARD)):
        if record.outputs.get("dataset_id") == commit.dataset_id:
            return load_manifest(ledger.store, str(record.outputs["manifest_key"])).tokenizer
    raise DataError(
        f"run {commit.run!r} has no record of the data set {commit.dataset_id}, with which the "
        f"checkpoint {commit.step}.{commit.attempt} was made, so its tokenizer is not known; was "
        "its shard stage's record deleted from the bucket?"
    )


def _wanted(layout: Layout, source: _Source) -> list[Wanted]:
    """The tensors to write, in the order of the files.

    Raises:
        CheckpointError: one is missing, or has another shape than the spec gives.
    """
    shapes = parameter_shapes(source.shape)
    wanted = []
    for theirs, ours in parameter_names(source.shape).items():
        tensor = layout.tensors.get(PREFIX + ours)
        if tensor is None or tensor.shape != shapes[ours]:
            held = "no such tensor" if tensor is None else f"{list(tensor.shape)}"
            raise CheckpointError(
                f"{PREFIX + ours!r} must be {list(shapes[ours])} by train.model of the run, and "
                f"the checkpoint has {held}; it is not of this model"
            )
        wanted.append(Wanted(name=theirs, source=PREFIX + ours, layout=tensor))
    return wanted


def _require_room(folder: Path, size_bytes: int) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < size_bytes:
        raise HeadraceError(
            f"-o {folder}: needs {size_bytes / 1e9:,.3f} GB, and {free / 1e9:,.3f} GB are free "
            f"there; name a folder on another file system, or a smaller --dtype"
        )


@contextmanager
def _made_whole(folder: Path) -> Iterator[Path]:
    """A folder beside `folder`, which takes its place if the block ends well, and else is gone."""
    partial = folder.parent / f".{folder.name}.{new_nonce()}.partial"
    try:
        partial.mkdir()
        yield partial
        partial.replace(folder)
    except OSError as error:
        raise HeadraceError(
            f"-o {folder}: cannot be written: {error.strerror or error}; name a folder where you "
            "may write and where there is room"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_settings(folder: Path, source: _Source, *, dtype: FloatType) -> None:
    end, text = source.tokenizer.end_of_document, source.tokenizer_text
    sequence = source.train.sequence
    settings = {
        "config.json": model_config(source.shape, source.train, end_of_document=end, dtype=dtype),
        "generation_config.json": generation_config(end_of_document=end),
        "tokenizer_config.json": tokenizer_config(text, source.tokenizer, sequence=sequence),
    }
    for name, setting in settings.items():
        (folder / name).write_text(to_json(setting))
    (folder / "tokenizer.json").write_text(text)


def _about(record: RunRecord, commit: Commit) -> dict[str, str]:
    """What the files themselves say of where they come from."""
    return {
        "headrace_run": record.run,
        "headrace_checkpoint": f"{commit.step}.{commit.attempt}.{commit.save}",
        "headrace_dataset": commit.dataset_id,
    }


def _warnings(source: _Source) -> tuple[str, ...]:
    if not adds_tokens(source.tokenizer_text):
        return ()
    return (
        "this tokenizer.json puts tokens around a text that the model has not seen in training: "
        "call it with add_special_tokens=False",
    )
