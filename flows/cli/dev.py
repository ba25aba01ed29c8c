"""``headrace dev``: a real Slurm cluster of several nodes on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from slurm.devcluster import machine
from slurm.devcluster.cluster import DevCluster, Say, remove
from slurm.devcluster.config import DEFAULT_BASE, HEAD, ClusterShape
from slurm.devcluster.status import ClusterStatus
from storage.errors import HeadraceError, SpecError

app = typer.Typer(
    name="dev",
    help="A real Slurm cluster of several nodes on this machine, to try pipelines on.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Option("--name", help="Which dev cluster.")]
Base = Annotated[Path, typer.Option("--dir", help="Folder that holds the state of dev clusters.")]
Node = Annotated[str, typer.Argument(help="A node's name, such as n2.")]
Daemon = Annotated[str, typer.Argument(help="slurmctld, slurmdbd, munged, mariadbd or slurmd.")]
Host = Annotated[str, typer.Option("--host", help="Where it runs: `head`, or a node for slurmd.")]
Folder = Annotated[Path, typer.Argument(help="A folder, as this machine sees it.")]

_DEFAULT_SHAPE = ClusterShape()
_OUTCOMES = {"created": "is up", "repaired": "is up again", "already up": "is up already"}


@app.command()
def up(
    *,
    nodes: Annotated[int | None, typer.Option(help="How many nodes. [default: 4]")] = None,
    name: Name = _DEFAULT_SHAPE.name,
    subnet: Annotated[
        str | None, typer.Option(help=f"Addresses to use. [default: {_DEFAULT_SHAPE.subnet}]")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option(help="CPUs that each node claims. [default: 4]")
    ] = None,
    memory_mb: Annotated[
        int | None, typer.Option(help="Memory that each node claims, in MB. [default: 4096]")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs that each node claims; none is real. [default: 8]")
    ] = None,
    cpu_quota: Annotated[
        float | None, typer.Option(help="Cores that a node may really use. [default: no limit]")
    ] = None,
    slurmd_timeout: Annotated[
        int | None, typer.Option(help="Seconds of silence that make a node dead. [default: 6]")
    ] = None,
    accounting: Annotated[
        str | None,
        typer.Option(help="on, off, or limits (partition `few` takes few jobs). [default: on]"),
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="First install from Debian what is missing.")
    ] = False,
    base: Base = DEFAULT_BASE,
) -> None:
    """Bring the cluster up, or repair one that lost a part; harmless when it runs.

    What is not named stays as it is in a cluster that exists already.
    """
    asked: dict[str, Any] = {
        "num_nodes": nodes,
        "subnet": subnet,
        "cpus_per_node": cpus,
        "memory_mb": memory_mb,
        "gpus_per_node": gpus,
        "cpu_quota": cpu_quota,
        "slurmd_timeout_s": slurmd_timeout,
        "accounting": accounting,
    }
    with _progress(f"dev cluster {name}") as say:
        if install:
            machine.check_privileges()
            machine.install(say)
        shape = dataclasses.replace(
            DevCluster.stored_shape(name, base=base) or ClusterShape(name=name),
            **{field: value for field, value in asked.items() if value is not None},
        )
        cluster = DevCluster(shape, base=base)
        outcome = cluster.up(say)
    quota = "" if shape.cpu_quota is None else f", {shape.cpu_quota:g} cores each"
    _out().print(
        f"dev cluster [bold]{name}[/bold] {_OUTCOMES[outcome]}: "
        f"{', '.join(shape.nodes)}{quota}; to use it:"
    )
    _print_env(cluster)


@app.command()
def down(name: Name = _DEFAULT_SHAPE.name, base: Base = DEFAULT_BASE) -> None:
    """Take the cluster away: processes, jobs, network, cgroups and files."""
    with _progress(f"dev cluster {name}") as say:
        remove(name, base=base, say=say)
    _out().print(f"dev cluster [bold]{name}[/bold] is gone")


@app.command()
def status(name: Name = _DEFAULT_SHAPE.name, base: Base = DEFAULT_BASE) -> None:
    """Show daemons and nodes; exit code 1 when a part is missing."""
    with _progress(f"dev cluster {name}"):
        seen = DevCluster.load(name, base=base).status()
    _print_status(seen)
    if not seen.is_up:
        raise typer.Exit(1)


@app.command()
def env(name: Name = _DEFAULT_SHAPE.name, base: Base = DEFAULT_BASE) -> None:
    """Print the line for your shell: ``eval "$(headrace dev env)"``."""
    with _errors():
        _print_env(DevCluster.load(name, base=base))


@app.command()
def cut(node: Node, name: Name = _DEFAULT_SHAPE.name, base: Base = DEFAULT_BASE) -> None:
    """Unplug a node's network, as if the machine had died."""
    with _errors():
        DevCluster.load(name, base=base).cut(node)
    _out().print(f"{node} is unplugged; `headrace dev heal {node}` plugs it in again")


@app.command()
def heal(node: Node, name: Name = _DEFAULT_SHAPE.name, base: Base = DEFAULT_BASE) -> None:
    """Plug a node in again; Slurm takes it back by itself."""
    with _errors():
        DevCluster.load(name, base=base).heal(node)
    _out().print(f"{node} is plugged in")


@app.command()
def slow(
    node: Node,
    rate: Annotated[str, typer.Argument(help="Such as 10mbit; `full` takes the limit away.")],
    name: Name = _DEFAULT_SHAPE.name,
    base: Base = DEFAULT_BASE,
) -> None:
    """Limit what a node can send and receive."""
    with _errors():
        DevCluster.load(name, base=base).slow(node, None if rate == "full" else rate)
    _out().print(f"{node} sends and receives at {rate} rate")


@app.command()
def stop(
    daemon: Daemon,
    host: Host = HEAD,
    kill: Annotated[bool, typer.Option("--kill", help="As by a crash: no state is saved.")] = False,
    name: Name = _DEFAULT_SHAPE.name,
    base: Base = DEFAULT_BASE,
) -> None:
    """Stop a daemon, as a site does when it works on its Slurm; jobs go on."""
    with _errors():
        DevCluster.load(name, base=base).stop(daemon, host=host, kill=kill)
    again = daemon if host == HEAD else f"{daemon} --host {host}"
    _out().print(f"{daemon} on {host} is stopped; `headrace dev start {again}` starts it again")


@app.command()
def start(
    daemon: Daemon,
    host: Host = HEAD,
    name: Name = _DEFAULT_SHAPE.name,
    base: Base = DEFAULT_BASE,
) -> None:
    """Start a daemon that was stopped; harmless where it runs."""
    with _errors():
        DevCluster.load(name, base=base).start(daemon, host=host)
    _out().print(f"{daemon} on {host} runs")


@app.command()
def tiny(
    node: Node,
    folder: Folder,
    size_mb: Annotated[int, typer.Option(min=1, help="Room that is left, in MB.")] = 1,
    name: Name = _DEFAULT_SHAPE.name,
    base: Base = DEFAULT_BASE,
) -> None:
    """Make a folder small for the jobs of one node, so that its disk is soon full."""
    with _errors():
        DevCluster.load(name, base=base).make_tiny(node, folder.resolve(), size_mb=size_mb)
    _out().print(f"{folder} holds {size_mb} MB on {node}; `headrace dev restore` undoes it")


@app.command()
def readonly(
    node: Node, folder: Folder, name: Name = _DEFAULT_SHAPE.name, base: Base = DEFAULT_BASE
) -> None:
    """Let the jobs of one node read a folder, but not write it."""
    with _errors():
        DevCluster.load(name, base=base).make_readonly(node, folder.resolve())
    _out().print(f"{folder} cannot be written on {node}; `headrace dev restore` undoes it")


@app.command()
def restore(
    node: Node, folder: Folder, name: Name = _DEFAULT_SHAPE.name, base: Base = DEFAULT_BASE
) -> None:
    """Undo `tiny` or `readonly`."""
    with _errors():
        DevCluster.load(name, base=base).restore(node, folder.resolve())
    _out().print(f"{folder} is on {node} what it is here")


def _out() -> Console:
    return Console(highlight=False, soft_wrap=True)


def _print_env(cluster: DevCluster) -> None:
    pairs = " ".join(f"{key}={shlex.quote(value)}" for key, value in cluster.env().items())
    typer.echo(f"export {pairs}")


def _print_status(seen: ClusterStatus) -> None:
    processes = Table(title=f"dev cluster {seen.shape.name}: daemons")
    for column in ("host", "daemon", "process", "log"):
        processes.add_column(column)
    for daemon in seen.daemons:
        process = "[red]not running[/red]" if daemon.pid is None else str(daemon.pid)
        processes.add_row(daemon.host, daemon.name, process, str(daemon.log))
    nodes = Table(title="nodes")
    for column in ("node", "address", "state", "network"):
        nodes.add_column(column)
    for node in seen.nodes:
        colour = "green" if node.is_present else "red"
        plug = "plugged in" if node.is_plugged_in else "[red]unplugged[/red]"
        nodes.add_row(node.name, node.address, f"[{colour}]{node.state}[/{colour}]", plug)
    console = _out()
    console.print(processes)
    console.print(nodes)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except HeadraceError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"error: {error}", markup=False, style="red"
        )
        raise typer.Exit(2 if isinstance(error, SpecError) else 1) from error


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Say]:
    """A live line on a terminal, one line a step elsewhere."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with _errors():
        if not console.is_terminal:
            yield lambda step: console.print(f"{title}: {step}", markup=False)
            return
        with console.status(title) as live:
            yield lambda step: live.update(f"{title}: {step}")
