"""`headrace demo` and `down`: a whole run on this machine, and the end of what it left running."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.run import run
from flows.cli.store import Force, end
from headrace import application_folder

CORPUS = "HEADRACE_CORPUS"
PIPELINE = Path("pipelines", "tiny.yaml")


def demo() -> None:
    """Train a small model on the Python standard library's sources, through all five stages."""
    run(_demo_spec())
    typer.echo("Prefect and the object store stay up to look around; `headrace down` ends them.")


def down(
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="[SPEC]", help="Whose object store to end. [default: the demo's]"),
    ] = None,
    force: Force = False,
) -> None:
    """End the Prefect server and the embedded object store; what they hold stays."""
    from flows.home import Home
    from flows.loading import load_spec
    from flows.server import stop_server
    from storage import embedded

    loaded = load_spec(spec or _demo_spec())
    store = embedded.store_of(loaded.store, workdir=loaded.workdir)
    was_running = store is not None and store.status().running
    if store is not None:
        # First, as a run that uses it needs Prefect, too.
        end(loaded, store, force=force)
    ended = stop_server(Home.of_user())
    typer.echo("The Prefect server is down." if ended else "No Prefect server was running.")
    if store is None:
        return
    if was_running:
        typer.echo(f"The embedded store is down; its data stays in {store.directory}.")
    else:
        typer.echo(
            f"No embedded store was running in {store.directory}; "
            "`headrace down SPEC` ends that of another spec."
        )


def _demo_spec() -> Path:
    os.environ.setdefault(CORPUS, sysconfig.get_path("stdlib"))
    return application_folder() / PIPELINE
