"""The run report: what a person wants to see of a run on one page, made from the ledger alone.

`gather` reads, `compose` is pure, `publish` writes. It can be made at any moment, by anybody who
can read the bucket, whether an engine lives or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.attempts import Attempt
from storage.checkpoint_records import Commit
from storage.checkpoints.commits import counting_commits, readable_commits
from storage.checkpoints.lineage import trace
from storage.ledger import Ledger
from storage.records import Action, Kind, Refusal, RunRecord, Stage, StageRecord
from tasks.curves import Point, read_metrics, resumes, stitch
from tasks.documents import Block, Heading, Paragraph, Picture, Table, to_html, to_markdown
from tasks.last_word import Standing, is_passed, last_word
from tasks.plots import Measured, loss_plot, scaling_plot

FILE = "report.md"
PAGE = "report.html"


@dataclass(frozen=True, kw_only=True)
class RunView:
    """Everything of a run that the report shows."""

    run: str
    record: RunRecord | None
    stages: Mapping[Stage, StageRecord]
    attempts: Mapping[Stage, tuple[Attempt, ...]]
    points: tuple[Point, ...]
    commits: tuple[Commit, ...]
    counting: frozenset[tuple[int, int]]
    refusals: Mapping[Stage, Refusal] = field(default_factory=dict)

    @property
    def is_of_a_command(self) -> bool:
        """Whether a script of somebody's own is run, which has not all of the stages."""
        return self.record is not None and self.record.spec.get("command") is not None

    @property
    def min_efficiency(self) -> float:
        smoke = self.record.spec.get("smoke", {}) if self.record is not None else {}
        return float(smoke.get("min_efficiency", 0.8))


def gather(ledger: Ledger) -> RunView:
    """The run as the bucket shows it now."""
    attempts = {stage: ledger.attempts(stage) for stage in Stage}
    metrics = {}
    for attempt in attempts[Stage.TRAIN]:
        body = ledger.store.get_if_exists(ledger.keys.metrics(Stage.TRAIN, attempt.number))
        if body is not None:
            metrics[attempt.number] = read_metrics(body)
    records = {stage: ledger.stage_records(stage) for stage in Stage}
    return RunView(
        run=ledger.keys.run,
        record=ledger.run_record(),
        stages={stage: found[-1] for stage, found in records.items() if found},
        attempts=attempts,
        points=stitch(metrics, trace(attempts[Stage.TRAIN])),
        commits=readable_commits(ledger),
        counting=frozenset((one.step, one.attempt) for one in counting_commits(ledger)),
        refusals={stage: found for stage in Stage if (found := ledger.refusal(stage)) is not None},
    )


def publish(ledger: Ledger, folder: Path) -> str:
    """Write the report to the object store and to `folder`; returns its markdown."""
    view = gather(ledger)
    blocks = compose(view)
    markdown = to_markdown(blocks)
    page = to_html(blocks, title=f"Headrace: {view.run}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((FILE, markdown), (PAGE, page)):
        ledger.store.put(ledger.keys.report(name), text.encode())
        temporary = folder / f".{name}"
        temporary.write_text(text)
        temporary.replace(folder / name)
    return markdown


def summary(record: StageRecord) -> str:
    """What a stage found, in one line."""
    outputs = record.outputs
    if not is_passed(record):
        return f"refused: {outputs['reason']}"
    match record.stage:
        case Stage.VALIDATE:
            healthy, unfit = outputs.get("healthy", ()), outputs.get("unfit", ())
            blamed = f"; unfit: {', '.join(unfit)}" if unfit else ""
            return f"{len(healthy)} of {len(healthy) + len(unfit)} nodes are fit{blamed}"
        case Stage.SHARD:
            return (
                f"{outputs.get('tokens', 0):,} tokens of {outputs.get('documents', 0):,} documents"
            )
        case Stage.SMOKE:
            top = outputs["rungs"][-1]
            gate = (
                "" if outputs["gated"] else "; reported only, since ranks share this host's cores"
            )
            return f"efficiency {_share(top['efficiency'])} at {top['nodes']} nodes{gate}"
        case Stage.TRAIN:
            return ", ".join(_train_figures(outputs))
        case Stage.PRUNE:
            kept, deleted = outputs.get("kept", ()), outputs.get("deleted", ())
            return f"{len(kept)} checkpoints kept, {len(deleted)} deleted"


def compose(view: RunView) -> tuple[Block, ...]:
    """The report's blocks."""
    return (
        Heading(text=f"Run {view.run}{_descent(view)}", level=1),
        overview(view),
        *_store(view.record),
        *_nodes(view.stages.get(Stage.VALIDATE)),
        *_scaling(view.stages.get(Stage.SMOKE), min_efficiency=view.min_efficiency),
        *_loss(view.points),
        *attempts_table(view),
        *checkpoints_table(view),
    )


def _descent(view: RunView) -> str:
    record = view.record
    if record is None or record.forked_from is None:
        return ""
    point = record.fork_point
    where = "from scratch" if point is None else f"from step {point.step}"
    return f", forked from {record.forked_from}, {where}"


def overview(view: RunView) -> Table:
    rows = []
    for stage in Stage:
        record, attempts = view.stages.get(stage), view.attempts.get(stage, ())
        word = last_word(attempts, record=record, refusal=view.refusals.get(stage))
        if word.standing is Standing.NOT_BEGUN and view.is_of_a_command:
            continue
        is_told = record is not None and word.standing in (Standing.FINISHED, Standing.REFUSED)
        found = summary(record) if record is not None and is_told else word.reason
        rows.append((stage.value, word.standing.value, found, str(len(attempts))))
    return Table(columns=("stage", "state", "result", "attempts"), rows=tuple(rows))


def _store(record: RunRecord | None) -> list[Block]:
    """What the store was seen to do when the run began."""
    found = record.store_probe if record is not None else {}
    if "conditional_writes" not in found:
        return []
    checks = "are enforced" if found.get("checksums_enforced") else "are not enforced"
    if found["conditional_writes"]:
        words = f"The store honours conditional writes; checksums of uploads {checks} by it."
    else:
        words = (
            f"Warning: the store has no conditional writes. Claims are made in {found['claims']}, "
            "which must be one folder for all hosts of this run, and one engine at a time is to "
            f"carry it out. Checksums of uploads {checks} by the store."
        )
    return [Paragraph(text=words)]


def _nodes(record: StageRecord | None) -> list[Block]:
    nodes = record.outputs.get("nodes", ()) if record is not None else ()
    if record is None or not nodes:
        return []
    measured = sorted({name for node in nodes for name in node.get("measures", {})})
    rows = tuple(
        (
            str(node["node"]),
            str(node["verdict"]),
            *(_figure(node.get("measures", {}).get(name)) for name in measured),
            "; ".join(node.get("findings", ())) or "–",
        )
        for node in nodes
    )
    blocks: list[Block] = [
        Heading(text="Nodes"),
        Table(
            columns=("node", "verdict", *(name.replace("_", " ") for name in measured), "findings"),
            rows=rows,
        ),
    ]
    together = record.outputs.get("allreduce_gb_per_s")
    if together is not None:
        blocks.append(
            Paragraph(
                text=f"All-reduce over the fit nodes: {_figure(together)} GB/s bus bandwidth."
            )
        )
    return blocks


def _scaling(record: StageRecord | None, *, min_efficiency: float) -> list[Block]:
    rungs = record.outputs.get("rungs", ()) if record is not None else ()
    if record is None or not rungs:
        return []
    rows = tuple(
        (
            str(rung["nodes"]),
            str(rung["world_size"]),
            _figure(rung["tokens_per_s"]),
            _share(rung["efficiency"]),
            _share(rung["ratio"]),
            str(rung.get("slowest_node") or "–"),
        )
        for rung in rungs
    )
    measured = [
        Measured(nodes=int(rung["nodes"]), tokens_per_s=float(rung["tokens_per_s"]))
        for rung in rungs
    ]
    return [
        Heading(text="Scaling"),
        Paragraph(text=str(record.outputs["reason"])),
        Table(
            columns=("nodes", "ranks", "tokens/s", "efficiency", "gain", "slowest node"), rows=rows
        ),
        Picture(title="Scaling", png=scaling_plot(measured, min_efficiency=min_efficiency)),
    ]


def _loss(points: tuple[Point, ...]) -> list[Block]:
    if not points:
        return []
    joints = resumes(points)
    told = f" It was resumed before step {', '.join(map(str, joints))}." if joints else ""
    return [
        Heading(text="Loss"),
        Paragraph(text=f"Steps {points[0].step} to {points[-1].step}, each once.{told}"),
        Picture(title="Loss", png=loss_plot(points)),
    ]


def attempts_table(view: RunView) -> tuple[Heading | Table, ...]:
    rows = tuple(
        _attempt_row(attempt) for stage in Stage for attempt in view.attempts.get(stage, ())
    )
    if not rows:
        return ()
    columns = ("stage", "unit", "attempt", "job", "nodes", "from", "without", "end", "decision")
    return Heading(text="Attempts"), Table(columns=columns, rows=rows)


def _attempt_row(attempt: Attempt) -> tuple[str, ...]:
    intent, start, end = attempt.intent, attempt.start, attempt.end
    source = attempt.resume.source if attempt.resume is not None else None
    job = start.job if start is not None else None
    if end is None:
        outcome, decision = "open", "–"
    elif end.diagnosis.kind is Kind.DONE:
        outcome, decision = "done", Action.DONE.value
    else:
        outcome = end.diagnosis.message
        decision = f"{end.decision.action.value}: {end.decision.reason}"
    return (
        intent.stage.value,
        intent.unit,
        str(intent.attempt),
        job.job_id if job is not None else "–",
        ", ".join(attempt.nodes) or "–",
        f"step {source.step}" if source is not None else "–",
        ", ".join(intent.excluded) or "–",
        outcome,
        decision,
    )


def checkpoints_table(view: RunView) -> tuple[Heading | Table, ...]:
    prune = view.stages.get(Stage.PRUNE)
    kept = prune.outputs.get("kept", ()) if prune is not None else ()
    deleted = prune.outputs.get("deleted", ()) if prune is not None else ()
    reasons = {(one["step"], one["attempt"]): str(one.get("reason", "")) for one in kept}
    rows = [
        (
            str(commit.step),
            str(commit.attempt),
            f"{commit.size_bytes / 1e6:,.1f} MB",
            _figure(commit.metrics.get("loss")),
            "there"
            if (commit.step, commit.attempt) in view.counting
            else "there, but no longer in the lineage",
            reasons.get((commit.step, commit.attempt), "newer than the last pruning"),
        )
        for commit in view.commits
    ]
    rows += [
        (str(one["step"]), str(one["attempt"]), "–", "–", "deleted", str(one.get("reason", "")))
        for one in deleted
    ]
    if not rows:
        return ()
    columns = ("step", "attempt", "size", "loss", "state", "why")
    return Heading(text="Checkpoints"), Table(columns=columns, rows=tuple(rows))


def _train_figures(outputs: Mapping[str, Any]) -> list[str]:
    step = outputs.get("final_step")
    figures = ["the command is done" if step is None else f"step {step}"]
    for name, key in (("loss", "train_loss"), ("validation loss", "val_loss")):
        if outputs.get(key) is not None:
            figures.append(f"{name} {_figure(outputs[key])}")
    if outputs.get("tokens_per_s") is not None:
        figures.append(f"{_figure(outputs['tokens_per_s'])} tokens/s")
    return figures


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _figure(value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
