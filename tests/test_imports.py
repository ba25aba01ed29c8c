"""What a login node loads: never torch, and inside a job never Prefect."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _modules_after(statement: str) -> set[str]:
    result = subprocess.run(
        [sys.executable, "-P", "-c", f"{statement}; import sys; print(*sys.modules, sep='\\n')"],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return set(result.stdout.split())


def _all_modules(package: str) -> list[str]:
    return sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / package).rglob("*.py")
        if path.name not in ("__main__.py", "__init__.py")
    )


@pytest.mark.parametrize("package", ["flows", "tasks", "slurm"])
def test_importing_any_module_of_a_login_node_package_does_not_import_torch(package: str) -> None:
    modules = _all_modules(package)
    assert modules
    loaded = _modules_after("import " + ", ".join(modules))
    assert set(modules) <= loaded
    assert "torch" not in loaded


@pytest.mark.parametrize(
    "entry",
    ["slurm.batch", "slurm.rank", "slurm.health.probe", "storage.shards.build", "trainer.main"],
)
def test_what_runs_inside_a_job_imports_neither_prefect_nor_the_login_side(entry: str) -> None:
    loaded = _modules_after(f"import {entry}")
    assert not loaded & {"prefect", "tasks", "flows", "submitit"}


def test_the_batch_step_does_not_import_torch() -> None:
    assert "torch" not in _modules_after("import slurm.batch, slurm.rank")
