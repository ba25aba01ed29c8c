"""`headrace cancel`: the end of what runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from flows.cli.options import RunName, SpecOption
from storage.errors import SpecError
from storage.records import Stage


def cancel(
    run: RunName,
    spec: SpecOption = None,
    *,
    stage: Annotated[Stage | None, typer.Option("--stage", help="This stage alone.")] = None,
    why: Annotated[str, typer.Option("--why", help="The reason, for those who ask later.")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Cancel the jobs of a run, whether or not an engine lives; one that lives ends as cancelled.

    Exit codes: 0 nothing runs any more, 1 something may, 2 a wrong name or spec.
    """
    from flows.cancelling import Wish, cancel, described, find_open, open_existing
    from flows.recalling import spec_of_run
    from tasks.cancelling import ask_for_the_end

    stages = tuple(Stage) if stage is None else (stage,)
    reason = why or f"`headrace cancel {run}`"
    with open_existing(spec_of_run(run, spec), eyes=Wish(typer.echo)) as context:
        found = find_open(context, stages)
        for attempt in found.foreign:
            typer.echo(
                f"left alone: {described(attempt)}, as it belongs to cluster "
                f"{attempt.intent.cluster!r}; cancel it there"
            )
        if not found.ours:
            typer.echo(f"Nothing of run {run} is open here, so there is no job to cancel.")
            if stage is None:
                ask_for_the_end(context.ledger, why=reason)
                typer.echo("An engine that is about to submit one ends within seconds.")
            return
        for attempt in found.ours:
            typer.echo(described(attempt))
        if not yes and not _agreed(len(found.ours)):
            typer.echo("Nothing was cancelled.")
            return
        if stage is None:
            ask_for_the_end(context.ledger, why=reason)
        left = cancel(context, found.ours, why=reason, stages=stages)
    for attempt in left:
        typer.echo(f"may still run: {described(attempt)}; give the same command again")
    if left:
        raise typer.Exit(1)
    typer.echo("Nothing of it runs any more. The same `headrace run` carries on from here.")


def _agreed(count: int) -> bool:
    if not sys.stdin.isatty():
        raise SpecError("--yes: is missing, and there is no terminal to ask at; add it")
    return typer.confirm(f"Cancel {'it' if count == 1 else f'these {count}'}?")
