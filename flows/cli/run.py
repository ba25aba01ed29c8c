"""`headrace run`, `plan` and `spec`: what starts from a YAML file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from storage.records import Stage

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The pipeline's YAML file.")]
Force = Annotated[
    list[Stage] | None,
    typer.Option("--force", help="Run this stage again although it is finished; repeatable."),
]


def run(spec: SpecFile, force: Force = None) -> None:
    """Carry a run out, or carry it on: what is finished is skipped, what runs is adopted."""
    from flows.home import Home
    from flows.loading import load_spec
    from flows.server import connect

    console = Console()
    loaded = load_spec(spec)
    ui_url = connect(Home.of_user(), say=console.print)
    # The terminal shows the run itself; Prefect's own words are in its UI.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")

    from flows.console import ConsoleEyes
    from flows.pretrain import pretrain
    from flows.watchers import looking_on

    console.print(
        f"Run {loaded.run}; its flow is shown at {ui_url}", highlight=False, soft_wrap=True
    )
    total_steps = {Stage.TRAIN: loaded.train.steps, Stage.SMOKE: loaded.smoke.steps}
    with ConsoleEyes(console, total_steps=total_steps) as eyes, looking_on(eyes):
        state = pretrain(loaded, force=tuple(force or ()), return_state=True)
    console.print(
        f"Report: {loaded.workdir / loaded.run / 'report.html'}", highlight=False, soft_wrap=True
    )
    flow_run = state.state_details.flow_run_id
    console.print(f"Flow run: {ui_url}/runs/flow-run/{flow_run}", highlight=False, soft_wrap=True)
    if not state.is_completed():
        console.print(f"[bold red]{state.name}.[/]", highlight=False, soft_wrap=True)
        raise typer.Exit(1)


def spec(spec: SpecFile) -> None:
    """Print the parameters of `prefect deployment run 'pretrain/manual' --params -`."""
    from flows.loading import load_spec

    typer.echo(json.dumps({"spec": load_spec(spec).model_dump(mode="json")}, indent=1))
