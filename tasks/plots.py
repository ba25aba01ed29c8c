"""Pictures for the report. matplotlib is loaded when the first one is drawn, without pyplot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

from tasks.curves import Point, resumes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 110


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One rung of the ladder."""

    nodes: int
    tokens_per_s: float


def scaling_plot(rungs: Sequence[Measured], *, min_efficiency: float) -> bytes:
    """Tokens/s over nodes, with the ideal line and the gate's; a PNG."""
    figure, axes = _canvas()
    nodes = [rung.nodes for rung in rungs]
    base = rungs[0]
    ideal = [base.tokens_per_s * count / base.nodes for count in nodes]
    axes.plot(nodes, ideal, linestyle="--", color="0.6", label="ideal")
    axes.plot(
        nodes,
        [min_efficiency * value for value in ideal],
        linestyle=":",
        color="tab:red",
        label=f"efficiency {min_efficiency:g}",
    )
    axes.plot(
        nodes, [rung.tokens_per_s for rung in rungs], marker="o", color="tab:blue", label="measured"
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [str(count) for count in nodes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes")
    axes.set_ylabel("tokens/s")
    axes.legend()
    return _png(figure)


def loss_plot(points: Sequence[Point]) -> bytes:
    """Training and validation loss over steps, resumes marked; a PNG."""
    figure, axes = _canvas()
    trained = [point for point in points if point.loss is not None]
    axes.plot(
        [point.step for point in trained],
        [math.nan if point.loss is None else point.loss for point in trained],
        color="tab:blue",
        label="training",
    )
    held_out = [point for point in points if point.val_loss is not None]
    if held_out:
        axes.plot(
            [point.step for point in held_out],
            [math.nan if point.val_loss is None else point.val_loss for point in held_out],
            color="tab:orange",
            marker="o",
            label="validation",
        )
    for number, step in enumerate(resumes(points)):
        axes.axvline(step, color="0.6", linestyle=":", label=None if number else "resumed")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    return _png(figure)


def _canvas() -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    return figure, axes


def _png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()
