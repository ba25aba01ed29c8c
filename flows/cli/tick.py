"""`headrace tick`: one pass for cron or scrontab, without a Prefect server."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.options import RunName, SpecOption

GOING_ON = 75
"""EX_TEMPFAIL: nothing is wrong, come again."""


def tick(
    run: RunName,
    spec: SpecOption = None,
    *,
    again: Annotated[
        bool, typer.Option("--again", help="Carry on after it was complete, failed or cancelled.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Say something only when something has changed.")
    ] = False,
    stay: Annotated[
        float, typer.Option(min=0.0, help="Seconds to stay for what is about to happen.")
    ] = 5.0,
) -> None:
    """Do what can be done now for a run, and leave: for cron, where nothing may stay.

    Exit codes: 0 the run is complete, 75 it goes on, 1 it failed or was cancelled, 2 a wrong spec.
    """
    from flows.console import Lines
    from flows.recalling import spec_of_run
    from flows.ticking import Standing, tick

    lines = Lines()
    ticked = tick(spec_of_run(run, spec), eyes=lines, again=again, stay_s=stay)
    if ticked.is_news or lines.has_news or not quiet:
        typer.echo("\n".join([*lines.said, ticked.message]))
    if ticked.standing is Standing.GOING_ON:
        raise typer.Exit(GOING_ON)
    if ticked.standing is not Standing.COMPLETE:
        raise typer.Exit(1)
