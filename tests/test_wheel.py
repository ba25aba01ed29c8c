"""A wheel puts only `headrace` into site-packages, and a user's own folders do no harm."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("flows", "tasks", "slurm", "trainer", "storage")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    (built,) = folder.glob("headrace-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of its own that has the wheel, and this one's packages behind it."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel],
        check=True,
        timeout=120,
    )
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    # The dependencies come from here; this checkout's own .pth file must not, so the folder is
    # added by its path alone, which reads no .pth.
    borrowed = sysconfig.get_path("purelib")
    (site / "borrowed.pth").write_text(f"import sys; sys.path.append({borrowed!r})\n")
    return folder


def test_the_wheel_has_one_top_level_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"headrace"}
    for package in PACKAGES:
        assert f"headrace/_app/{package}/__init__.py" in names
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]


def test_a_folder_named_trainer_in_the_working_directory_does_no_harm(
    installed: Path, tmp_path: Path
) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    spec = tmp_path / "spec.yaml"
    spec.write_text("run: mine\ncluster: {nodes: 0}\ndata: {inputs: ['*.txt']}\n")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [installed / "bin" / "headrace", "plan", spec],
        check=False,
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert "cluster.nodes" in result.stderr
    assert "wrong package" not in result.stdout + result.stderr
