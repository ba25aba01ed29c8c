"""`headrace store`: the embedded object store of a spec, as a process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flows.spec import PipelineSpec
    from storage.embedded import EmbeddedStore

app = typer.Typer(
    name="store",
    help="The object store that runs beside those who name none.",
    no_args_is_help=True,
)

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The pipeline's YAML file.")]
Force = Annotated[
    bool, typer.Option("--force", help="End the store although runs or jobs may be using it.")
]


@app.command()
def status(spec: SpecFile) -> None:
    """Say whether it runs, where, and where its data lies."""
    _, server = _server(spec)
    told = server.status()
    state = f"runs as process {told.pid}" if told.running else "is not running"
    typer.echo(f"The embedded store {state}.")
    if told.endpoint_url is not None:
        typer.echo(f"Endpoint: {told.endpoint_url}{'' if told.running else ' (when it runs)'}")
    typer.echo(f"Data: {server.directory}")


@app.command()
def stop(spec: SpecFile, force: Force = False) -> None:
    """End it, unless a run or a job uses it; its data stays, and the next run starts it again."""
    end(*_server(spec), force=force)
    typer.echo("The embedded store is not running; its data stays.")


def end(spec: PipelineSpec, server: EmbeddedStore, *, force: bool) -> None:
    """Ends the spec's server; unless `force` is given, exits with what uses it if anything does."""
    from flows.names import attempt_title
    from flows.opening import attempts_at_work
    from storage.errors import StoreError

    if force:
        server.stop()
        return
    try:
        attempts = attempts_at_work(spec) if server.status().running else ()
    except StoreError as error:
        raise StoreError(
            f"{error}\nit runs and does not answer, as when its network address is gone, so nobody "
            "can tell whether a job needs it: --force ends it all the same"
        ) from error
    if attempts:
        for attempt in attempts:
            job = attempt.start.job if attempt.start else None
            typer.echo(
                f"{attempt.intent.run}: {attempt_title(attempt)} "
                f"({f'job {job.job_id}' if job else 'not started'}) was not seen to end."
            )
        typer.echo(
            "The embedded store goes on, since these jobs need it: `headrace run` takes such a run "
            "up again, and --force ends the store all the same."
        )
        raise typer.Exit(1)
    if not server.stop_if_unused():
        typer.echo("A run is using the embedded store; it goes on.")
        raise typer.Exit(1)


def _server(path: Path) -> tuple[PipelineSpec, EmbeddedStore]:
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
    return spec, server
