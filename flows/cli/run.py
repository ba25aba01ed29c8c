"""`headrace run`, `plan` and `spec`: what starts from a YAML file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from storage.errors import SpecError
from storage.records import Stage

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from flows.interrupts import Wishes
    from flows.spec import PipelineSpec

LEFT = 75
"""EX_TEMPFAIL: it goes on without this engine."""

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


InJob = Annotated[
    bool,
    typer.Option(
        "--in-job",
        help="Without Prefect, inside this allocation; on a login node, send that as a job.",
    ),
]
EngineTime = Annotated[
    int | None,
    typer.Option("--time", min=2, help="With --in-job: minutes until the engine is requeued."),
]


def run(
    spec: SpecFile,
    force: Force = None,
    fork: Fork = None,
    in_job: InJob = False,
    time: EngineTime = None,
) -> None:
    """Carry a run out, or carry it on: what is finished is skipped, what runs is adopted.

    Exit codes: 0 complete, 1 failed or cancelled, 2 a wrong spec, 75 an engine in a job left before
    the end, 130 interrupted, 143 terminated. What it submitted goes on in the last three.
    """
    from flows.forking import fork_run
    from flows.home import Home
    from flows.loading import blaming, load_spec
    from flows.opening import require_unchanged
    from flows.server import connect
    from flows.steps import require_files

    console = Console()
    say = partial(console.print, highlight=False, soft_wrap=True)
    loaded = load_spec(spec)
    with blaming(spec):
        require_files(loaded)
    if fork is not None:
        loaded = fork_run(loaded, fork, say=say)
    require_unchanged(loaded)
    if in_job:
        _in_job(loaded, console, forced=tuple(force or ()), time_limit_min=time)
        return
    if time is not None:
        raise SpecError("--time: is for the engine's own job; add --in-job")
    ui_url = connect(Home.of_user(), say=say)
    # The terminal shows the run itself; Prefect's own words are in its UI.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")

    from flows.interrupts import Wishes
    from tasks.report import PAGE

    say(f"Run {loaded.run}; its flow is shown at {ui_url}")
    wishes = Wishes()
    state = _in_prefect(loaded, console, wishes, forced=tuple(force or ()))
    report = loaded.workdir / loaded.run / PAGE
    if report.exists():
        say(f"Report: {report}")
    say(f"Flow run: {ui_url}/runs/flow-run/{state.state_details.flow_run_id}")
    if state.is_completed():
        return
    if wishes.left_by is not None:
        raise typer.Exit(128 + wishes.left_by)
    say(f"[bold red]{state.name}.[/]")
    raise typer.Exit(1)


def _in_prefect(
    spec: PipelineSpec, console: Console, wishes: Wishes, *, forced: tuple[Stage, ...]
) -> State[Any]:
    """The flow's end, while the terminal shows the run and a person may interrupt it."""
    from flows.console import ConsoleEyes
    from flows.interrupts import Answer, ask_at_terminal, attend
    from flows.pretrain import pretrain
    from flows.watchers import looking_on

    show = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    with ConsoleEyes(console, total_steps=spec.total_steps) as eyes, looking_on(eyes, wishes):

        def ask(until: Callable[[], bool]) -> Answer | None:
            with eyes.paused():
                return ask_at_terminal(until, show=partial(show, end=""))

        return attend(
            lambda: pretrain(spec, force=forced, return_state=True),
            wishes,
            say=show,
            ask=ask if sys.stdin.isatty() and console.is_terminal else None,
            tidy=eyes.stop,
        )


def _in_job(
    spec: PipelineSpec, console: Console, *, forced: tuple[Stage, ...], time_limit_min: int | None
) -> None:
    from flows.console import ConsoleEyes
    from flows.in_job import is_inside, run_inside, send_engine

    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    if not is_inside():
        limit = time_limit_min or spec.cluster.time_limit_min
        sent = send_engine(spec, time_limit_min=limit, forced=forced)
        say(
            f"Job {sent.job_id} carries run {spec.run} out, and goes on in a new one every {limit} "
            f"minutes; its words are in {sent.log}"
        )
        return
    with ConsoleEyes(console, total_steps=spec.total_steps) as eyes:
        is_complete = run_inside(spec, eyes=eyes, say=say, forced=forced)
    if not is_complete:
        raise typer.Exit(LEFT)
    say(f"Run {spec.run} is complete.")


def spec(spec: SpecFile) -> None:
    """Print the parameters of `prefect deployment run 'pretrain/manual' --params -`."""
    from flows.loading import load_spec

    typer.echo(json.dumps({"spec": load_spec(spec).model_dump(mode="json")}, indent=1))
