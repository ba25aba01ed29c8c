"""`headrace run`, `plan` and `spec`: what starts from a YAML file."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from storage.records import Stage

INTERRUPTED = 130

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The pipeline's YAML file.")]
Force = Annotated[
    list[Stage] | None,
    typer.Option("--force", help="Run this stage again although it is finished; repeatable."),
]


Fork = Annotated[
    str | None,
    typer.Option(
        "--fork",
        metavar="NEW",
        help="Begin the run NEW from this file, with the weights of the run that it names.",
    ),
]


def run(spec: SpecFile, force: Force = None, fork: Fork = None) -> None:
    """Carry a run out, or carry it on: what is finished is skipped, what runs is adopted."""
    from flows.forking import fork_run
    from flows.home import Home
    from flows.loading import blaming, load_spec
    from flows.server import connect
    from flows.steps import require_files

    console = Console()
    say = partial(console.print, highlight=False, soft_wrap=True)
    loaded = load_spec(spec)
    with blaming(spec):
        require_files(loaded)
    if fork is not None:
        loaded = fork_run(loaded, fork, say=say)
    ui_url = connect(Home.of_user(), say=say)
    # The terminal shows the run itself; Prefect's own words are in its UI.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")

    from flows.console import ConsoleEyes
    from flows.pretrain import pretrain
    from flows.watchers import looking_on
    from tasks.report import PAGE

    say(f"Run {loaded.run}; its flow is shown at {ui_url}")
    try:
        with ConsoleEyes(console, total_steps=loaded.total_steps) as eyes, looking_on(eyes):
            state = pretrain(loaded, force=tuple(force or ()), return_state=True)
    except KeyboardInterrupt:
        say("Interrupted. A job that was submitted goes on, and the same command adopts it.")
        raise typer.Exit(INTERRUPTED) from None
    report = loaded.workdir / loaded.run / PAGE
    if report.exists():
        say(f"Report: {report}")
    say(f"Flow run: {ui_url}/runs/flow-run/{state.state_details.flow_run_id}")
    if not state.is_completed():
        say(f"[bold red]{state.name}.[/]")
        raise typer.Exit(1)


def spec(spec: SpecFile) -> None:
    """Print the parameters of `prefect deployment run 'pretrain/manual' --params -`."""
    from flows.loading import load_spec

    typer.echo(json.dumps({"spec": load_spec(spec).model_dump(mode="json")}, indent=1))
