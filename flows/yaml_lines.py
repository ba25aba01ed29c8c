"""YAML as plain data, with the line of every key: pydantic knows paths, people know lines.

Only what a spec needs is understood: mappings, lists, scalars, aliases, and variables of the
environment written `${NAME}` or `${NAME:-default}` (`$${` is a plain `${`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

Path = tuple[str | int, ...]

# YAML 1.1 also has octal (`010` is 8), hexadecimal, binary and base 60 (`1:00:00` is 3600).
_PLAIN_NUMBER = re.compile(
    r"[-+]?(0|[1-9][0-9_]*|[0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|\.(inf|nan))", re.I
)
_VARIABLE = re.compile(
    r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|\$\{"
)


@dataclass(frozen=True, kw_only=True, order=True)
class Mistake:
    """One thing that is wrong with a file. `line` counts from 1; 0 is the file as a whole."""

    line: int
    field: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Document:
    """What a file holds: its data, the line of each path in it, and what is wrong so far."""

    data: Any
    lines: Mapping[Path, int]
    mistakes: tuple[Mistake, ...]

    def line_of(self, path: Path) -> int:
        """The line of `path`, or of the nearest thing around it that the file does have."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 1)


def read_yaml(text: str, *, environ: Mapping[str, str]) -> Document:
    """The document in `text`. It never raises: what is wrong is in `mistakes`."""
    reader = _Reader(environ)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = None if node is None else reader.read(node, ())
    except yaml.YAMLError as error:
        return Document(data=None, lines={}, mistakes=(_syntax_mistake(error, text),))
    except RecursionError:
        deep = Mistake(line=0, field="YAML", message="nested too deeply; is this the right file?")
        return Document(data=None, lines={}, mistakes=(deep,))
    return Document(data=data, lines=reader.lines, mistakes=tuple(reader.mistakes))


def dotted(path: Path) -> str:
    """`("a", "b", 0)` as `a.b[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _syntax_mistake(error: yaml.YAMLError, text: str) -> Mistake:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    context = getattr(error, "context", None)
    where = f", {context}" if context else ""
    line = "" if mark is None else "".join(text.splitlines()[mark.line : mark.line + 1])
    remedy = (
        'inside { } and [ ] put a variable in quotes, as in "${NAME}"'
        if "${" in line
        else "correct the syntax (indent with spaces, quote odd text)"
    )
    return Mistake(
        line=0 if mark is None else mark.line + 1,
        field="YAML",
        message=f"{problem}{where}; {remedy}",
    )


class _Reader:
    """Walks composed nodes, since only these still know their lines."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.lines: dict[Path, int] = {}
        self.mistakes: list[Mistake] = []
        self._environ = environ
        self._open: set[int] = set()
        self._loader = yaml.SafeLoader("")

    def read(self, node: yaml.Node, path: Path) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            self._blame(path, "refers to itself; write the value out")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":merge"):
                message = "only plain keys are understood (no `<<`); write the keys out"
                self._blame(path, message, line=line)
                continue
            key = key_node.value
            if key in found:
                message = f"given twice, first in line {first_lines[key]}; keep one"
                self._blame((*path, key), message, line=line)
                continue
            self.lines[(*path, key)] = first_lines[key] = line
            found[key] = self.read(value_node, (*path, key))
        return found

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        value = self._with_variables(node, path)
        tag = node.tag
        if value != node.value and node.style is None:
            # types-PyYAML leaves this one out.
            resolve: Callable[..., str] = self._loader.resolve
            tag = resolve(yaml.ScalarNode, value, (True, False))
        scalar = yaml.ScalarNode(tag, value, node.start_mark, node.end_mark)
        try:
            read = self._loader.construct_object(scalar, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            problem = getattr(error, "problem", None) or error
            self._blame(path, f"value {value!r} cannot be read: {problem}; quote it")
            return None
        if tag.endswith((":int", ":float")) and not _PLAIN_NUMBER.fullmatch(value):
            self._blame(
                path,
                f"value {value} is {read} to YAML; write plain digits, or quote it as text",
            )
            return None
        return read

    def _with_variables(self, node: yaml.ScalarNode, path: Path) -> str:
        def replace(match: re.Match[str]) -> str:
            name, default = match["name"], match["default"]
            if name is None:
                if match[0] == "${":
                    self._blame(
                        path,
                        f"value {node.value!r} holds a `${{` that names no variable; write "
                        "`${NAME}` or `${NAME:-default}`, or `$${` for the characters themselves",
                    )
                return "${"
            if default is not None:
                return self._environ.get(name) or default
            if name not in self._environ:
                self._blame(
                    path,
                    f"the environment has no variable {name}; set it, or give a default as in "
                    f"`${{{name}:-value}}`",
                )
            return self._environ.get(name, "")

        return _VARIABLE.sub(replace, node.value)

    def _blame(self, path: Path, message: str, *, line: int | None = None) -> None:
        self.mistakes.append(
            Mistake(line=line or self.lines[path], field=dotted(path) or "spec", message=message)
        )
