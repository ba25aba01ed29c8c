"""What pydantic found wrong with a spec, in a user's words: field, value, bound, remedy."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from flows.yaml_lines import Document, Mistake, Path, dotted

_SHOWN_CHARACTERS = 60

_BOUNDS = {
    "greater_than": ("must be above {gt}", "raise it"),
    "greater_than_equal": ("must be at least {ge}", "raise it"),
    "less_than": ("must be below {lt}", "lower it"),
    "less_than_equal": ("must be at most {le}", "lower it"),
    "finite_number": ("must be a finite number", "write a number"),
    "int_parsing": ("must be a whole number", "write digits only"),
    "int_type": ("must be a whole number", "write digits only"),
    "int_from_float": ("must be a whole number", "drop the fraction"),
    "float_parsing": ("must be a number", "write a number"),
    "float_type": ("must be a number", "write a number"),
    "bool_parsing": ("must be true or false", "write one of them"),
    "bool_type": ("must be true or false", "write one of them"),
    "string_type": ("must be text", "put it in quotes"),
    "path_type": ("must be a path", "write it as text"),
    "tuple_type": ("must be a list", "write it as in [a, b]"),
    "list_type": ("must be a list", "write it as in [a, b]"),
    "dict_type": ("must be a block of keys", "write `name: value` lines below it"),
    "too_short": ("must have at least {min_length} item(s)", "add one"),
    "string_too_short": ("must have at least {min_length} characters", "lengthen it"),
    "string_too_long": ("must have at most {max_length} characters", "shorten it"),
    "string_pattern_mismatch": ("must match {pattern}", "change it"),
}


def mistakes_in(
    error: ValidationError, *, model: type[BaseModel], document: Document
) -> Iterator[Mistake]:
    """One mistake for each error, with the line that it is about."""
    for detail in error.errors(include_url=False):
        path = tuple(part for part in detail["loc"] if part != "[key]")
        if detail["type"] == "value_error":
            message = str(detail["ctx"]["error"])
            path = (
                named(message, below=path, places=document.lines)
                or named(message, below=path, places=_places(model))
                or path
            )
        yield Mistake(
            line=document.line_of(path),
            field=dotted(path) or "spec",
            message=_message(detail, path, model),
        )


@dataclass(frozen=True)
class TruthValue:
    """A boolean where a number belongs: `nodes: yes`, which pydantic would take for 1."""

    value: bool


def with_truth_values(data: Any, *, model: type[BaseModel], path: Path = ()) -> Any:
    """The data with each `TruthValue` marked, so that pydantic refuses it, and nothing else does.

    A rule that compares fields is not asked about a block with such a value, so one mistake stays
    one message.
    """
    if isinstance(data, dict):
        return {
            key: with_truth_values(value, model=model, path=(*path, key))
            for key, value in data.items()
        }
    if isinstance(data, list):
        return [
            with_truth_values(value, model=model, path=(*path, index))
            for index, value in enumerate(data)
        ]
    if not isinstance(data, bool):
        return data
    field = field_at(model, path)
    if field is None or _mentions(field.annotation, bool):
        return data
    is_number = _mentions(field.annotation, int) or _mentions(field.annotation, float)
    return TruthValue(data) if is_number else data


def field_at(model: type[BaseModel], path: Path) -> FieldInfo | None:
    """The field that `path` names below `model`, or that holds the item which it names."""
    field: FieldInfo | None = None
    block: type[BaseModel] | None = model
    for part in path:
        if block is None:
            return field
        field = block.model_fields.get(part) if isinstance(part, str) else None
        if field is None:
            return None
        block = _block(field.annotation)
    return field


def block_at(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """The block of the spec that `path` names."""
    if not path:
        return model
    field = field_at(model, path)
    return None if field is None else _block(field.annotation)


def _message(detail: ErrorDetails, path: Path, model: type[BaseModel]) -> str:
    kind = detail["type"]
    context = detail.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "extra_forbidden":
        return _unknown_key(path, model)
    field = field_at(model, path)
    purpose = f" ({field.description.rstrip('.')})" if field and field.description else ""
    if kind == "missing":
        return f"is missing and has no default{purpose}; add it"
    value = f"value {_shown(detail['input'])}"
    if kind == "literal_error":
        expected = str(context["expected"])
        choices = re.findall(r"'([^']*)'", expected)
        nearest = _nearest(str(detail["input"]), choices)
        return f"{value}; must be {expected}; " + (
            f"did you mean `{nearest}`?" if nearest else "write one of them"
        )
    if kind in ("model_type", "model_attributes_type"):
        return f"{value}; must be a block of keys; write `name: value` lines below it"
    bound, remedy = _BOUNDS.get(kind, (detail["msg"], "change it"))
    if isinstance(detail["input"], TruthValue) and kind in ("int_type", "float_type"):
        remedy = "YAML reads that word as a truth value, so write a number"
    return f"{value}; {bound.format(**context)}{purpose}; {remedy}"


def _unknown_key(path: Path, model: type[BaseModel]) -> str:
    block = block_at(model, path[:-1])
    valid = sorted(block.model_fields) if block else []
    elsewhere = [f"`{dotted(place)}`" for place in _places(model) if place[-1] == path[-1]]
    if elsewhere:
        return f"unknown key here; it belongs at {' or '.join(elsewhere)}; move it"
    nearest = _nearest(str(path[-1]), valid)
    if nearest:
        return f"unknown key; did you mean `{nearest}`?"
    return f"unknown key; the keys here are {', '.join(valid)}; remove it or use one of these"


def _places(model: type[BaseModel], base: Path = ()) -> Iterator[Path]:
    for name, field in model.model_fields.items():
        yield (*base, name)
        block = _block(field.annotation)
        if block is not None:
            yield from _places(block, (*base, name))


def named(message: str, *, below: Path, places: Iterable[Path]) -> Path | None:
    """The first of `places` below a path that the message names."""
    inside = [place for place in places if place[: len(below)] == below and place != below]
    for word in re.findall(r"[a-z_][a-z0-9_.]*", message):
        for place in inside:
            same_key = place[-1] == word.rpartition(".")[2]
            if same_key and dotted(place[len(below) :]).endswith(word):
                return place
    return None


def _nearest(word: str, valid: list[str]) -> str | None:
    found = difflib.get_close_matches(word, valid, n=1, cutoff=0.6)
    return found[0] if found else None


def _value_at(data: Any, path: Path) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _block(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _mentions(annotation: Any, kind: type) -> bool:
    """Whether a value of this kind is meant, be it any or, as in `Literal[1, 2]`, one of a few."""
    return kind in (annotation, type(annotation)) or any(
        _mentions(part, kind) for part in get_args(annotation)
    )


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    text = json.dumps(value, default=_plain)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _plain(value: object) -> object:
    return value.value if isinstance(value, TruthValue) else str(value)
