"""`headrace status`: what the bucket knows of a run, whether an engine lives or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable


def status(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")],
    spec: Annotated[
        Path | None,
        typer.Option(
            "--spec", help="Its YAML file; needed where the run was not started by this user."
        ),
    ] = None,
) -> None:
    """Show a run's stages, attempts and checkpoints."""
    from flows.home import Home
    from flows.loading import load_spec
    from flows.opening import open_ledger
    from flows.spec import PipelineSpec
    from storage.errors import HeadraceError
    from tasks.documents import Heading
    from tasks.report import FILE, attempts_table, checkpoints_table, gather, overview

    if spec is None:
        found = PipelineSpec.model_validate_json(Home.of_user().recall_run(run))
    else:
        found = load_spec(spec).renamed(run)
    with open_ledger(found) as (store, ledger):
        view = gather(ledger)
    if view.record is None:
        raise HeadraceError(
            f"run {run!r} has no record at {ledger.store.endpoint}, bucket {store.bucket}, prefix "
            f"{store.prefix!r}; check the name, or start it with `headrace run`"
        )
    console = Console()
    for block in (overview(view), *attempts_table(view), *checkpoints_table(view)):
        if isinstance(block, Heading):
            console.print(f"\n[bold]{block.text}[/]")
            continue
        table = RichTable(*block.columns)
        for row in block.rows:
            table.add_row(*map(escape, row))
        console.print(table)
    console.print(f"\nReport: {found.workdir / run / FILE}", highlight=False)
