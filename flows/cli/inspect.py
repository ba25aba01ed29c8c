"""`headrace status`: what the bucket knows of a run, whether an engine lives or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from flows.cli.options import RunName, SpecOption

if TYPE_CHECKING:
    from storage.attempts import Attempt
    from tasks.documents import Table


def status(
    run: RunName,
    spec: SpecOption = None,
) -> None:
    """Show a run's stages, attempts and checkpoints."""
    from flows.opening import open_begun
    from flows.recalling import spec_of_run
    from tasks.documents import Table
    from tasks.report import PAGE, checkpoints_table, gather, overview

    found = spec_of_run(run, spec)
    with open_begun(found) as (_, ledger, _):
        view = gather(ledger)
    console = Console()
    console.print(_table(overview(view)))
    for attempts in view.attempts.values():
        for attempt in attempts:
            console.print(_line(attempt), highlight=False, soft_wrap=True)
    for block in checkpoints_table(view):
        if isinstance(block, Table):
            console.print(_table(block))
    console.print(f"Why: headrace why {run}", highlight=False, soft_wrap=True)
    folder = found.workdir / run
    console.print(f"Logs: {folder}/<stage>/<attempt>/", highlight=False, soft_wrap=True)
    console.print(f"Report: {folder / PAGE}", highlight=False, soft_wrap=True)


def _line(attempt: Attempt) -> str:
    from flows.names import attempt_title, end_text, is_stopped, is_success

    if attempt.end is None:
        color = "cyan"
    else:
        color = "green" if is_success(attempt) else "yellow" if is_stopped(attempt) else "red"
    start = attempt.start
    job = f" (job {start.job.job_id} on {', '.join(attempt.nodes)})" if start and start.job else ""
    text = f"{attempt_title(attempt)}{job}: {end_text(attempt)}"
    return f"[{color}]●[/] {escape(text)}"


def _table(block: Table) -> RichTable:
    table = RichTable(*block.columns)
    for row in block.rows:
        table.add_row(*map(escape, row))
    return table
