"""`headrace serve`: Prefect's server, worker and deployments in one command."""

from __future__ import annotations

from typing import Annotated

import typer

from storage.errors import SpecError


def serve(
    stop: Annotated[bool, typer.Option("--stop", help="End the one that runs.")] = False,
    background: Annotated[
        bool, typer.Option("--background", help="Return when it is up, and leave it running.")
    ] = False,
    env: Annotated[
        bool, typer.Option("--env", help='Print what a shell needs: eval "$(headrace serve --env)"')
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=1024, max=65535, help="Port; by default a free one.")
    ] = None,
) -> None:
    """Run a Prefect server, with its worker and deployments, for this user alone."""
    from flows.home import Home
    from flows.server import (
        ServerUnavailableError,
        ensure_server,
        find_server,
        shell_lines,
        stop_server,
    )
    from flows.supervisor import Supervisor

    if stop + background + env > 1:
        raise SpecError("--stop, --background and --env exclude each other; give one of them")
    home = Home.of_user()
    if env:
        found = find_server(home)
        if found is None:
            raise ServerUnavailableError("nothing is served; give `headrace serve --background`")
        typer.echo("\n".join(shell_lines(home, api_url=found.api_url)))
    elif stop:
        ended = stop_server(home)
        typer.echo("Stopped; flow runs and their jobs go on." if ended else "Nothing was running.")
    elif background:
        record = ensure_server(home, say=typer.echo, port=port)
        if port not in (None, record.port):
            typer.echo(
                f"It runs already, at port {record.port} and not {port}; to move it, give "
                f"`headrace serve --stop`, then `headrace serve --background --port {port}`."
            )
        typer.echo(f"Prefect is at {record.ui_url}; log in with the line in {home.auth}")
    else:
        Supervisor(home, say=typer.echo, port=port).serve()
