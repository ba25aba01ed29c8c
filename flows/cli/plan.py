"""`headrace plan`: what a run would do, without doing any of it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from flows.planning import StagePlan
    from flows.spec import PipelineSpec
    from trainer.plan.arithmetic import RunSums

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The pipeline's YAML file.")]


def plan(spec: SpecFile) -> None:
    """Show the stages, their scripts and what would be skipped; submits nothing."""
    from flows.loading import blaming, load_spec
    from flows.planning import plan_run

    loaded = load_spec(spec)
    with blaming(spec):
        planned = plan_run(loaded)
    console = Console()
    console.print(f"[bold]Run {loaded.run}[/]", highlight=False)
    for note in planned.notes:
        console.print(f"[yellow]{escape(note)}[/]", highlight=False, soft_wrap=True)
    if planned.sums:
        console.print(_sums(loaded, planned.sums))
    for stage in planned.stages:
        _show(console, stage)


def _sums(spec: PipelineSpec, sums: Sequence[RunSums]) -> Table:
    """A column for each number of nodes; what is the same for all is said once."""
    columns = [_rows(spec, one) for one in sums]
    table = Table(show_header=False)
    for name in columns[0]:
        values = [column[name] for column in columns]
        table.add_row(name, *(values if len(set(values)) > 1 else values[:1]))
    return table


def _rows(spec: PipelineSpec, sums: RunSums) -> dict[str, str]:
    train, ranks_per_node = spec.train, spec.cluster.ranks_per_node
    padding = f", of which {sums.padding:.1%} is padding" if sums.padding else ""
    return {
        "parameters": f"{sums.num_params:,}",
        "ranks": f"{sums.world_size:,} = {sums.world_size // ranks_per_node:,} nodes "
        f"× {ranks_per_node}",
        "tokens a step": f"{sums.tokens_per_step:,} = {train.global_batch:,} sequences "
        f"× {train.sequence:,}",
        "micro-batches a rank and step": f"{sums.micro_batches_per_step:,} "
        f"of {min(train.micro_batch, train.largest_share(sums.world_size))} sequences{padding}",
        "tokens in all": f"{sums.total_tokens:,} in {train.steps:,} steps",
        "training FLOPs": f"{sums.flops_per_token * sums.total_tokens:.3g}",
        "weights and optimizer a rank": _size(sums.state_bytes_per_rank),
        "a checkpoint": f"{_size(sums.checkpoint_bytes)}, {train.checkpoint}",
    }


def _show(console: Console, stage: StagePlan) -> None:
    from slurm.node_count import spell

    verdict = "[green]would be skipped[/]" if stage.skipped else "[cyan]would run[/]"
    console.print(
        f"\n[bold]{stage.stage.value}[/] {verdict}: {escape(stage.because)}",
        highlight=False,
        soft_wrap=True,
    )
    for unit in stage.units:
        on = f" on {', '.join(unit.node_list)}" if unit.node_list else ""
        nodes = spell(unit.nodes, unit.wanted_nodes)
        size = f"{nodes} × {unit.ranks_per_node} ranks{on}"
        console.print(f"  job {unit.name}: {unit.entry}, {size}", highlight=False, markup=False)
        if (command := unit.payload.get("command")) is not None:
            line = f"{shlex.join(command['argv'])}, once a {command['per']}, in {command['cwd']}"
            kept = f"checkpoints in {unit.payload['checkpoints']}"
            for text in (line, kept):
                console.print(f"    {text}", highlight=False, markup=False, soft_wrap=True)
    if stage.script and not stage.skipped:
        for line in stage.script.splitlines():
            console.print(f"    {line}", highlight=False, markup=False, soft_wrap=True)


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"
