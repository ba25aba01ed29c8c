"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]
SpecOption = Annotated[
    Path | None,
    typer.Option("--spec", help="Its YAML file; needed where this user never started the run."),
]
