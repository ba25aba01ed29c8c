"""How an attempt is called and how its end reads, the same in every place where people look."""

from __future__ import annotations

from collections.abc import Mapping

from storage.attempts import Attempt
from storage.records import Action, Kind, Why
from tasks.durations import spell_duration

_NODES_SHOWN = 4


def attempt_title(attempt: Attempt) -> str:
    """`train · attempt 2 · from step 1500 · without n3`."""
    intent = attempt.intent
    parts = [intent.stage.value]
    if intent.unit != intent.stage.value:
        parts.append(intent.unit)
    parts.append(f"attempt {intent.attempt}")
    source = attempt.resume.source if attempt.resume is not None else intent.floor
    if source is not None:
        parts.append(f"from step {source.step}")
    elif intent.why is Why.RETRIED:
        parts.append("again")
    if intent.excluded:
        parts.append(f"without {short_list(intent.excluded)}")
    return " · ".join(parts)


def short_list(names: tuple[str, ...]) -> str:
    """`n1, n2, n3, n4 and 12 more`."""
    shown = ", ".join(names[:_NODES_SHOWN])
    left = len(names) - _NODES_SHOWN
    return f"{shown} and {left} more" if left > 0 else shown


def is_success(attempt: Attempt) -> bool:
    return attempt.end is not None and attempt.end.diagnosis.kind is Kind.DONE


def is_stopped(attempt: Attempt) -> bool:
    """Whether a person ended it: neither a success nor a failure."""
    return attempt.end is not None and attempt.end.decision.action is Action.STOP


def end_text(attempt: Attempt) -> str:
    """The diagnosis and what follows from it, in one line."""
    if attempt.end is None:
        return "open"
    diagnosis, decision = attempt.end.diagnosis, attempt.end.decision
    if is_success(attempt):
        return "done"
    return f"{diagnosis.message} → {decision.action.value} ({decision.reason})"


def progress_text(step: int, numbers: Mapping[str, float], *, total: int | None) -> str:
    """`step 400 of 2000 · loss 2.31 · 12,040 tokens/s · 3 min to go`."""
    parts = [f"step {step}" if total is None else f"step {step} of {total}"]
    for name, value in numbers.items():
        if name == "eta_s":
            parts.append(f"{spell_duration(value)} to go")
            continue
        label = name.replace("_per_s", "/s").replace("_", " ")
        shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        parts.append(f"{shown} {label}" if label.endswith("/s") else f"{label} {shown}")
    return " · ".join(parts)
