"""From a run's name to its spec: the file that is named, or what this user started last."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from flows.home import Home
from flows.loading import load_spec
from flows.spec import PipelineSpec
from storage.errors import SpecError


def spec_of_run(run: str, file: Path | None = None) -> PipelineSpec:
    """The spec of the run, with absolute paths.

    Raises:
        SpecError: no file is named, and this user never started the run; or the file is wrong.
    """
    if file is not None:
        return load_spec(file).renamed(run)
    kept = Home.of_user().recall_run(run)
    try:
        return PipelineSpec.model_validate_json(kept)
    except ValidationError:
        raise SpecError(
            f"what was kept of run {run!r} is of another version of Headrace; name its file with "
            "--spec"
        ) from None
