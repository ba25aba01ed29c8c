"""`headrace store`: the embedded object store of a spec, as a process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from storage.embedded import EmbeddedStore

app = typer.Typer(
    name="store",
    help="The object store that runs beside those who name none.",
    no_args_is_help=True,
)

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The pipeline's YAML file.")]


@app.command()
def status(spec: SpecFile) -> None:
    """Say whether it runs, where, and where its data lies."""
    server = _server(spec)
    told = server.status()
    state = f"runs as process {told.pid}" if told.running else "is not running"
    typer.echo(f"The embedded store {state}.")
    if told.endpoint_url is not None:
        typer.echo(f"Endpoint: {told.endpoint_url}{'' if told.running else ' (when it runs)'}")
    typer.echo(f"Data: {server.directory}")


@app.command()
def stop(spec: SpecFile) -> None:
    """End it, unless a run is using it; its data stays, and the next run starts it again."""
    if _server(spec).stop_if_unused():
        typer.echo("The embedded store is not running; its data stays.")
    else:
        typer.echo("A run is using the embedded store; it goes on.")
        raise typer.Exit(1)


def _server(path: Path) -> EmbeddedStore:
    from flows.loading import load_spec
    from storage import embedded
    from storage.errors import SpecError

    spec = load_spec(path)
    server = embedded.store_of(spec.store, workdir=spec.workdir)
    if server is None:
        raise SpecError(
            f"{path}: store: names a store of its own ({spec.store.endpoint_url or 'AWS S3'}); "
            "there is no embedded one to look after"
        )
    return server
