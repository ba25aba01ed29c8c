"""`headrace schedule`: a spec run every night."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def schedule(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The pipeline's YAML file.")],
    cron: Annotated[str, typer.Option(help="When, as in cron.")] = "0 1 * * *",
    timezone: Annotated[str, typer.Option(help="Whose clock, such as Europe/Berlin.")] = "UTC",
) -> None:
    """Run SPEC on a schedule, each day as a run of its own, and prune it by the hour."""
    from pydantic import ValidationError

    from flows.home import Home
    from flows.loading import load_spec
    from flows.server import connect
    from storage.errors import SpecError

    loaded = load_spec(spec)
    ui_url = connect(Home.of_user(), say=typer.echo)

    from flows.deploy import NIGHTLY
    from flows.deploy import schedule as schedule_nightly

    try:
        schedule_nightly(loaded, cron=cron, timezone=timezone)
    except ValidationError as error:
        told = "; ".join(str(detail["msg"]) for detail in error.errors())
        raise SpecError(
            f"--cron {cron!r}, --timezone {timezone!r}: {told}; write five fields as in "
            "`0 1 * * *`, and a name of the time zone data base"
        ) from None
    typer.echo(f"{NIGHTLY.full_name} runs {loaded.run} at `{cron}` {timezone}; see {ui_url}")
