"""`headrace checkpoints`: what is stored of a run, whether it is whole, and how to take it away."""

from __future__ import annotations

import getpass
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, tzinfo
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flows.cli.options import RunName, SpecOption

if TYPE_CHECKING:
    from flows.spec import PipelineSpec
    from storage.checkpoint_records import CommitRef
    from storage.checkpoints.catalog import Catalog, Entry
    from storage.ledger import Ledger
    from storage.records import RunRecord

app = typer.Typer(
    name="checkpoints",
    help="What is stored of a run's checkpoints: list, check, keep and export them.",
    no_args_is_help=True,
)

Step = Annotated[
    str, typer.Argument(metavar="STEP", help="Its step, or step.attempt, as `ls` shows it.")
]
OptionalStep = Annotated[
    str | None, typer.Argument(metavar="STEP", help="Its step, or step.attempt.")
]
Json = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]


class DType(StrEnum):
    """What the exported numbers are."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.command()
def ls(
    run: RunName,
    spec: SpecOption = None,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Those, too, of which nothing is left.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List every checkpoint, whole or not, and what it is worth."""
    from flows.cli import checkpoint_tables as tables
    from storage.checkpoints.catalog import State

    with _begun(run, spec) as (_, ledger, _):
        catalog = _gather(ledger)
    shown = [one for one in catalog.entries if everything or one.state is not State.GONE]
    if as_json:
        _print_json([tables.as_json(entry) for entry in shown])
        return
    console = Console()
    if shown:
        console.print(tables.overview(shown, now=datetime.now(UTC), zone=_zone()))
    for line in tables.remarks(shown):
        typer.echo(line)
    console.print(
        tables.totals(catalog) if catalog.entries else f"Run {run} has no checkpoint yet.",
        highlight=False,
    )


@app.command()
def show(run: RunName, step: Step, spec: SpecOption = None, *, as_json: Json = False) -> None:
    """Tell everything of one checkpoint."""
    from flows.cli import checkpoint_tables as tables
    from storage.checkpoints.catalog import find

    with _begun(run, spec) as (_, ledger, _):
        catalog = _gather(ledger)
    entry = find(catalog, step, run=run)
    assert entry.commit is not None
    if as_json:
        files = [
            {"key": file.key, "size_bytes": file.size_bytes, "crc64nvme": file.crc64nvme}
            for file in (entry.commit.metadata, *entry.commit.files)
        ]
        _print_json({**tables.as_json(entry), "files": files})
        return
    console = Console()
    rows = tables.details(entry, catalog.attempts, now=datetime.now(UTC), zone=_zone())
    console.print(tables.details_table(rows))
    console.print()
    console.print(tables.files_table(entry))


@app.command()
def verify(run: RunName, step: OptionalStep = None, spec: SpecOption = None) -> None:
    """Read every byte and check it; by default of all that could be resumed from, newest first.

    What is damaged is put in quarantine, so that no job loads it; what is whole is taken out of it.

    Exit codes: 0 all are whole, 1 one is damaged or the store failed, 2 a wrong name.
    """
    from storage.checkpoints.catalog import State, find, matching
    from storage.checkpoints.reading import reading
    from storage.errors import CheckpointError

    with _begun(run, spec) as (_, ledger, _):
        catalog = _gather(ledger)
        named = catalog.entries if step is None else matching(catalog, step)
        unreadable = [one for one in named if one.state is State.DAMAGED]
        if step is None:
            wanted = [one for one in named if one.state in (State.COUNTS, State.DOUBTED)]
        else:
            wanted = [] if unreadable else [find(catalog, step, run=run)]
        for entry in unreadable:
            typer.echo(f"DAMAGED  {entry.name}: {entry.against}")
        if not wanted and not unreadable:
            typer.echo(f"Run {run} has no checkpoint that counts, so there is nothing to check.")
            return
        refs = [entry.ref for entry in wanted]
        with reading(ledger, refs, who=f"verify by {_who()}") as standing:
            whole = _verify_each(ledger, wanted, standing)
        damaged = len(wanted) - whole + len(unreadable)
        if damaged:
            raise CheckpointError(
                f"{damaged} of {len(wanted) + len(unreadable)} are damaged; "
                + _outlook(_gather(ledger))
            )


@app.command()
def pin(
    run: RunName,
    step: Step,
    spec: SpecOption = None,
    *,
    why: Annotated[str, typer.Option("--why", help="The reason, for those who ask later.")] = "",
) -> None:
    """Keep a checkpoint for good, whatever the spec's retention says."""
    from storage.checkpoints import pins
    from storage.checkpoints.catalog import State, find

    with _begun(run, spec) as (_, ledger, _):
        entry = find(_gather(ledger), step, run=run)
        now = datetime.now(UTC)
        stands = pins.pin(ledger, entry.ref, who=getpass.getuser(), why=why, at=now)
    if stands.pin.at == now:
        typer.echo(f"Checkpoint {entry.name} of run {run} is pinned: no pruning takes it.")
    else:
        typer.echo(f"Checkpoint {entry.name} of run {run} was pinned already ({stands.told}).")
    if entry.state is not State.COUNTS:
        typer.echo(f"It is {entry.state}, though, so no job resumes from it: {entry.notes[0]}.")


@app.command()
def unpin(
    run: RunName,
    step: Step,
    spec: SpecOption = None,
    *,
    forks: Annotated[
        bool, typer.Option("--forks", help="The pins of runs forked from it, too.")
    ] = False,
) -> None:
    """Take a pin back, and say what becomes of the checkpoint."""
    from storage.checkpoints import pins
    from storage.checkpoints.catalog import find
    from storage.errors import SpecError

    with _begun(run, spec) as (known, ledger, _):
        entry = find(_gather(ledger), step, run=run, or_pinned=True)
        ours = tuple(named for named in entry.pins if forks or named.is_of_a_person)
        left = tuple(named.name for named in entry.pins if named not in ours)
        if not ours:
            raise SpecError(
                f"checkpoint {entry.name} of run {run!r} "
                + (
                    f"is pinned by {', '.join(left)} alone, from which that run may still begin; "
                    "--forks takes such pins back, too"
                    if left
                    else "is not pinned; `headrace checkpoints ls` shows what is"
                )
            )
        pins.unpin(ledger, ours)
        fate = _fate(ledger, known, entry)
    pinned = f"still pinned by {', '.join(left)}" if left else "pinned no longer"
    typer.echo(f"Checkpoint {entry.name} of run {run} is {pinned}; {fate}.")


@app.command()
def export(
    run: RunName,
    step: OptionalStep = None,
    spec: SpecOption = None,
    *,
    folder: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="A new or an empty folder.")
    ],
    dtype: Annotated[
        DType, typer.Option(help="Of the weights; they are trained in float32.")
    ] = DType.float32,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Where the run's tokenizer.json is now, if it was moved.")
    ] = None,
) -> None:
    """Write a checkpoint's model, the newest by default, as Hugging Face's transformers load it."""
    from flows.cli.bar import Bar
    from flows.cli.checkpoint_tables import spell_bytes
    from flows.exporting import export as write
    from storage.checkpoints.catalog import State, find

    with _begun(run, spec) as (_, ledger, record):
        entry = find(_gather(ledger), step, run=run)
        assert entry.commit is not None
        with Bar(f"export {entry.name}") as bar:
            done = write(
                ledger,
                record,
                entry.commit,
                folder,
                dtype=dtype.value,
                tokenizer=tokenizer,
                began=bar.begin,
                told=bar.advance,
            )
    typer.echo(
        f"Step {entry.ref.step} of run {run} as {dtype.value}, {spell_bytes(done.tensor_bytes)} "
        f"of weights:"
    )
    for name in done.files:
        typer.echo(f"  {done.folder / name}")
    if entry.state is State.DOUBTED:
        typer.echo(
            f"Note: the checkpoint is in quarantine: {entry.against}. Every byte that was exported "
            "was checked all the same."
        )
    for warning in done.warnings:
        typer.echo(f"Note: {warning}.")
    typer.echo("Load it:")
    typer.echo("  from transformers import AutoModelForCausalLM, AutoTokenizer")
    for what, loader in (("model", "AutoModelForCausalLM"), ("tokenizer", "AutoTokenizer")):
        typer.echo(f"  {what} = {loader}.from_pretrained({str(done.folder)!r})")


def _verify_each(ledger: Ledger, wanted: list[Entry], standing: frozenset[CommitRef]) -> int:
    """How many are not damaged; each is told of, and put into quarantine or taken out."""
    from flows.cli.bar import Bar
    from flows.cli.checkpoint_tables import spell_bytes, told_faults
    from storage.checkpoints.choosing import why_swept
    from storage.checkpoints.quarantine import acquit, condemn
    from storage.checkpoints.verify import verify as check

    whole = 0
    for entry in wanted:
        commit = entry.commit
        assert commit is not None
        if commit.ref not in standing:
            typer.echo(f"swept    {entry.name}: a sweep takes it now, so it was not read")
            whole += 1
            continue
        start = time.monotonic()
        with Bar(f"verify {entry.name}") as bar:
            bar.begin(commit.size_bytes)
            verdict = check(ledger.store, commit, told=bar.advance)
        took = time.monotonic() - start
        for key in verdict.unsteady:
            typer.echo(
                f"unsteady {entry.name}: {key!r} was read wrong once and right again: look at "
                "this host, its network, or the store"
            )
        lost = why_swept(ledger, commit.ref) if verdict.faults else None
        if lost is not None:
            typer.echo(f"swept    {entry.name}: {lost}")
            whole += 1
            continue
        if verdict.faults:
            condemn(ledger, commit.ref, host=socket.gethostname(), fault=str(verdict.faults[0]))
            typer.echo(f"DAMAGED  {entry.name}")
            for line in told_faults(verdict.faults):
                typer.echo(f"  {line}")
            continue
        whole += 1
        acquitted = "; out of quarantine" if entry.doubts else ""
        if entry.doubts:
            acquit(ledger, commit.ref)
        typer.echo(
            f"whole    {entry.name}: {spell_bytes(commit.size_bytes)} in {took:.1f} s{acquitted}"
        )
    return whole


def _outlook(catalog: Catalog) -> str:
    """What a run does after a verify that found damage."""
    from storage.checkpoints.catalog import State

    states = {entry.state for entry in catalog.entries}
    if State.COUNTS in states:
        return "jobs pass them over and take the newest whole one"
    if State.STEPPED_BACK in states:
        return (
            "no whole one is left up to the step to which the next attempt was told to go back; "
            "`headrace checkpoints ls` shows what is there"
        )
    return (
        "no whole one is left, so a run that goes on would stop with an error rather than begin at "
        "step 0; put the objects named above back from a copy of the bucket and verify again, or "
        "start a run under a new name"
    )


def _fate(ledger: Ledger, spec: PipelineSpec, entry: Entry) -> str:
    """What the next pruning would do with a checkpoint."""
    from storage.checkpoints.catalog import State
    from storage.retention.inventory import take
    from storage.retention.sweep import judge

    now = ledger.store.now()
    verdicts = judge(take(ledger, now=now), spec.retention, now=now)
    verdict = next((one for one in verdicts if one.ref == entry.ref), None)
    if verdict is None:
        return "it has no data" if entry.state is State.DAMAGED else "it is gone"
    if verdict.keep:
        return f"the next pruning would keep it: {verdict.reason}"
    return f"the next pruning takes it: {verdict.reason}"


@contextmanager
def _begun(run: str, file: Path | None) -> Iterator[tuple[PipelineSpec, Ledger, RunRecord]]:
    """The run's spec, its ledger and its record."""
    from flows.opening import open_begun
    from flows.recalling import spec_of_run

    spec = spec_of_run(run, file)
    with open_begun(spec) as (_, ledger, record):
        yield spec, ledger, record


def _gather(ledger: Ledger) -> Catalog:
    from storage.checkpoints.catalog import gather

    with Console(stderr=True).status("Reading what is stored"):
        return gather(ledger)


def _who() -> str:
    return f"{getpass.getuser()} on {socket.gethostname()}"


def _zone() -> tzinfo:
    zone = datetime.now().astimezone().tzinfo
    assert zone is not None
    return zone


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
