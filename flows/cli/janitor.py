"""`headrace janitor`: jobs that nobody waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def janitor(
    spec: Annotated[
        Path | None,
        typer.Option("--spec", help="Only this run. [default: all that this user has started]"),
    ] = None,
) -> None:
    """Cancel jobs of attempts that are closed, void or cancelled; all others are left alone."""
    from flows.home import Home
    from flows.janitor import remembered_specs, tidy
    from flows.loading import load_spec

    specs = remembered_specs(Home.of_user()) if spec is None else [load_spec(spec)]
    for line in tidy(specs):
        typer.echo(line)
