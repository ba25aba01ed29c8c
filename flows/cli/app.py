"""The command `headrace`: its groups, and how an error reaches a person.

Modules of commands import Prefect and the stages inside their functions, so that `--help` is quick.
"""

from __future__ import annotations

import sys

import typer

from flows.cli import (
    cancel,
    checkpoints,
    demo,
    dev,
    inspect,
    janitor,
    plan,
    run,
    schedule,
    serve,
    store,
    tick,
    why,
)
from storage.errors import HeadraceError, SpecError

app = typer.Typer(
    name="headrace",
    help="A YAML spec becomes a training pipeline on Slurm.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan.plan)
app.command("run")(run.run)
app.command("tick")(tick.tick)
app.command("cancel")(cancel.cancel)
app.command("janitor")(janitor.janitor)
app.command("spec")(run.spec)
app.command("schedule")(schedule.schedule)
app.command("status")(inspect.status)
app.command("why")(why.why)
app.command("serve")(serve.serve)
app.command("demo")(demo.demo)
app.command("down")(demo.down)
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(store.app, name="store")
app.add_typer(dev.app, name="dev")


def main() -> None:
    """Run the command line. What Headrace raises on purpose is a message, never a traceback."""
    try:
        app()
    except SpecError as error:
        _complain(error, code=2)
    except HeadraceError as error:
        _complain(error, code=1)


def _complain(error: HeadraceError, *, code: int) -> None:
    print(error, file=sys.stderr)
    raise SystemExit(code)
