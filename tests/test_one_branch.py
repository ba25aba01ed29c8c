"""`kind: local` and `kind: slurm` run the same code: only `slurm/` knows which one it is."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = {"local", "slurm"}


def _comparisons_with_a_kind(path: Path) -> list[str]:
    """Places where the file compares something with the name of a kind, or reads `.kind` of a
    cluster's spec."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = (
            [node.subject, *(case.pattern for case in node.cases)]
            if isinstance(node, ast.Match)
            else [node.left, *node.comparators]
            if isinstance(node, ast.Compare)
            else []
        )
        values = {
            part.value
            for name in names
            for part in ast.walk(name)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }
        reads_kind = (
            isinstance(node, ast.Attribute)
            and node.attr == "kind"
            and isinstance(node.value, ast.Attribute | ast.Name)
            and "cluster" in ast.unparse(node.value)
        )
        if values & KINDS or reads_kind:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_code_outside_slurm_asks_for_the_kind_of_the_cluster() -> None:
    outside = [
        path
        for package in ("flows", "tasks", "trainer", "storage")
        for path in (ROOT / package).rglob("*.py")
    ]
    assert outside
    assert [place for path in outside for place in _comparisons_with_a_kind(path)] == []


def test_the_search_finds_the_one_branch_there_is() -> None:
    assert _comparisons_with_a_kind(ROOT / "slurm" / "cluster.py")
