"""`headrace why`: for each attempt what happened, the evidence, the culprit, and the decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from flows.cli.options import RunName, SpecOption
from storage.attempts import Attempt
from storage.errors import HeadraceError, SlurmError
from storage.records import Stage

if TYPE_CHECKING:
    from flows.spec import PipelineSpec
    from slurm.cluster import JobObservation
    from tasks.why import Line, Story

WIDTH = 80


def why(
    run: RunName,
    stage: Annotated[
        Stage | None, typer.Option(help="Only this stage; with --attempt, train by default.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Only this attempt, with all its evidence.")
    ] = None,
    spec: SpecOption = None,
) -> None:
    """Tell why a run stands where it stands, attempt for attempt."""
    from flows.opening import open_begun
    from flows.recalling import spec_of_run
    from tasks.why import explain, gather

    found = spec_of_run(run, spec)
    with open_begun(found) as (_, ledger, _):
        story = gather(ledger, folder=found.workdir / run)
    if attempt is not None:
        stage = stage or Stage.TRAIN
        require_attempt(story, stage, attempt)
    now = datetime.now().astimezone()
    assert now.tzinfo is not None
    seen = _watched(story, found)
    show(explain(seen, now=now, zone=now.tzinfo, stage=stage, attempt=attempt), Console())


def require_attempt(story: Story, stage: Stage, number: int) -> None:
    """Refuse a number that no attempt has.

    Raises:
        HeadraceError: it is beyond the last one.
    """
    last = len(story.attempts.get(stage, ()))
    if number > last:
        numbers = f"its attempts are 1 to {last}" if last else "no attempt of it was made"
        raise HeadraceError(
            f"--attempt {number} of stage {stage} is none of run {story.run!r}: {numbers}; "
            "name another, or another --stage"
        )


def show(lines: Sequence[Line], console: Console) -> None:
    """Print the lines. They are shown as they are: no markup in a log line colours anything."""
    from tasks.why import Tone

    styles: Mapping[Tone, str] = {
        Tone.TITLE: "bold",
        Tone.GOOD: "green",
        Tone.BAD: "red",
        Tone.UNDECIDED: "yellow",
        Tone.FAINT: "dim",
    }
    for line in lines:
        for row in line.wrapped(min(WIDTH, console.width)):
            console.print(Text(row, style=styles.get(line.tone, "")), soft_wrap=True)


def _watched(story: Story, spec: PipelineSpec) -> Story:
    """The story with what the cluster says of open attempts, where it answers."""
    from dataclasses import replace

    if not story.open_attempts:
        return story
    return replace(story, observations=_observe(story.open_attempts, spec))


def _observe(attempts: Sequence[Attempt], spec: PipelineSpec) -> Mapping[str, JobObservation]:
    from slurm.cluster import open_cluster

    try:
        cluster = open_cluster(spec.cluster, workdir=spec.workdir)
        return cluster.observe([one.intent.token for one in attempts])
    except SlurmError as error:
        typer.echo(f"The cluster says nothing of open attempts: {error}", err=True)
        return {}
