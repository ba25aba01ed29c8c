"""From a YAML file to a spec, or to one message for each mistake in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from flows.mistakes import mistakes_in, named, with_truth_values
from flows.spec import PipelineSpec
from flows.yaml_lines import Mistake, dotted, read_yaml
from storage.errors import SpecError

MAX_BYTES = 1_000_000


class SpecFileError(SpecError):
    """A spec file is wrong; `mistakes` holds each reason, its text all of them."""

    def __init__(self, path: Path, mistakes: Sequence[Mistake]) -> None:
        self.path = path
        self.mistakes = tuple(sorted(mistakes))
        super().__init__("\n".join(self._line(mistake) for mistake in self.mistakes))

    def _line(self, mistake: Mistake) -> str:
        place = f"{self.path}:{mistake.line}" if mistake.line else f"{self.path}"
        return f"{place}: {mistake.field}: {mistake.message}"


def load_spec(
    path: Path, *, environ: Mapping[str, str] = os.environ, base: Path | None = None
) -> PipelineSpec:
    """The spec in the file at `path`, its relative paths taken from `base`, by default the cwd.

    Raises:
        SpecFileError: it cannot be read, is no YAML, or says what a spec must not.
    """
    document = read_yaml(_text(path), environ=environ)
    mistakes = list(document.mistakes)
    if not document.lines:
        empty = Mistake(line=0, field="spec", message="the file is empty; write at least run, data")
        raise SpecFileError(path, mistakes or [empty])
    if not isinstance(document.data, dict):
        kind = "a list" if isinstance(document.data, list) else "a single value"
        raise SpecFileError(
            path,
            mistakes
            or [
                Mistake(
                    line=document.line_of(()),
                    field="spec",
                    message=f"the file holds {kind}; must be a block of keys; "
                    "begin it with `run: <name>`",
                )
            ],
        )
    said = {(mistake.line, mistake.field) for mistake in mistakes}
    try:
        spec = PipelineSpec.model_validate(with_truth_values(document.data, model=PipelineSpec))
    except ValidationError as error:
        found = mistakes_in(error, model=PipelineSpec, document=document)
        mistakes += [mistake for mistake in found if (mistake.line, mistake.field) not in said]
        raise SpecFileError(path, mistakes) from None
    if mistakes:
        raise SpecFileError(path, mistakes)
    return spec.anchored(base or Path.cwd())


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Gives what is found wrong with the spec of a file only later its place in that file.

    Raises:
        SpecFileError: in place of a SpecError.
    """
    try:
        yield
    except SpecFileError:
        raise
    except SpecError as error:
        document = read_yaml(_text(path), environ=os.environ)
        place = named(str(error), below=(), places=document.lines)
        mistake = Mistake(
            line=0 if place is None else document.line_of(place),
            field="spec" if place is None else dotted(place),
            message=str(error),
        )
        raise SpecFileError(path, [mistake]) from None


def _text(path: Path) -> str:
    def refuse(message: str, *, line: int = 0) -> SpecFileError:
        return SpecFileError(path, [Mistake(line=line, field="file", message=message)])

    try:
        if path.is_dir():
            raise refuse("is a directory; name the YAML file in it")
        if not path.exists():
            raise refuse("there is no such file; check the path")
        with path.open("rb") as file:
            body = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}; check its permissions") from None
    if len(body) > MAX_BYTES:
        raise refuse(f"is above {MAX_BYTES:,} bytes; a spec is a page or two; check the path")
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise refuse(
            f"byte 0x{body[error.start]:02x} is not UTF-8; save the file as UTF-8", line=line
        ) from None
