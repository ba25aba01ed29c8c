"""`headrace plan`: what a run would do, without doing any of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The pipeline's YAML file.")]


def plan(spec: SpecFile) -> None:
    """Show the stages, their scripts and what would be skipped; submits nothing."""
