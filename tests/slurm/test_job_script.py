"""What a job's script does before its command, as a real shell carries it out."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurm.cluster import Resources
from slurm.job_script import preamble
from slurm.local import LocalCluster
from slurm.spec import ClusterSpec
from storage.records import ExitCode
from storage.spec import StoreSpec
from tests.slurm.jobs import Workplace

STAND_INS = Path(__file__).resolve().parent / "stand_ins"
MODULES = """
module() {
    [ "$1" = load ] || return 1
    case "$2" in
        bad*) echo "Unable to locate a modulefile for '$2'" >&2; return 1 ;;
        python*) export PYTHONPATH=/of/the/module ;;
        conda*) export PATH="$STAND_INS:$PATH" ;;
    esac
    export LOADED="${LOADED:+$LOADED }$2"
}
"""


@pytest.fixture
def here(tmp_path: Path) -> Workplace:
    cluster = LocalCluster(ClusterSpec(), workdir=tmp_path)
    return Workplace(cluster=cluster, store=StoreSpec(), workdir=tmp_path, name="r")


@pytest.fixture
def modules_home(tmp_path: Path) -> Path:
    """Where a site keeps what defines `module`, for shells that are no login shells."""
    init = tmp_path / "modules" / "init" / "bash"
    init.parent.mkdir(parents=True)
    init.write_text(MODULES)
    return tmp_path / "modules"


def run(here: Workplace, *, home: Path | None = None, **fields: Any) -> tuple[int, list[str], str]:
    """How the script of a cluster with these fields ends, and what its command sees."""
    job = here.job(part="meet")
    spec = ClusterSpec(kind="slurm", **fields)
    lines = preamble(spec, job, Resources(nodes=1, ranks_per_node=1, cpus_per_rank=3))
    show = 'printf "%s\\n" "$OMP_NUM_THREADS" "$LOADED" "$CONDA_PREFIX" "$PYTHONPATH"'
    environ = {"PATH": "/usr/bin:/bin", "STAND_INS": str(STAND_INS)}
    if home is not None:
        environ["MODULESHOME"] = str(home)
    done = subprocess.run(
        ["/bin/bash", "-c", "\n".join([*lines, show])],
        capture_output=True,
        check=False,
        env=environ,
        text=True,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_modules_are_loaded_in_order_where_a_batch_shell_has_no_such_command_yet(
    here: Workplace, modules_home: Path
) -> None:
    code, seen, _ = run(here, home=modules_home, modules=("cuda/12.8", "nccl/2.27"))
    assert (code, seen[1]) == (0, "cuda/12.8 nccl/2.27")


def test_a_module_that_fails_ends_the_job_and_is_named(here: Workplace, modules_home: Path) -> None:
    code, seen, said = run(here, home=modules_home, modules=("good", "bad/1", "never"))
    assert (code, seen) == (ExitCode.BAD_CONFIG, [])
    assert "headrace: cluster.modules: bad/1 cannot be loaded on this node" in said
    assert "Unable to locate a modulefile" in said


def test_a_node_without_modules_says_so(here: Workplace, tmp_path: Path) -> None:
    code, _, said = run(here, home=tmp_path / "none", modules=("cuda",))
    assert code == ExitCode.BAD_CONFIG
    assert "no `module` command" in said


def test_conda_is_activated_after_the_modules_which_may_bring_it(
    here: Workplace, modules_home: Path, tmp_path: Path
) -> None:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    environment = str(tmp_path / "env")
    code, seen, _ = run(here, home=modules_home, modules=("conda/24",), conda=environment)
    assert (code, seen[1], seen[2]) == (0, "conda/24", environment)


def test_a_conda_environment_that_is_not_there_ends_the_job(
    here: Workplace, modules_home: Path
) -> None:
    code, _, said = run(here, home=modules_home, modules=("conda",), conda="/no/such/env")
    assert code == ExitCode.BAD_CONFIG
    assert "cluster.conda: /no/such/env cannot be activated" in said
    code, _, said = run(here, conda="other")
    assert code == ExitCode.BAD_CONFIG
    assert "no `conda` on PATH" in said


def test_headraces_code_comes_first_whatever_modules_and_setup_do(
    here: Workplace, modules_home: Path
) -> None:
    code, seen, _ = run(
        here,
        home=modules_home,
        modules=("python/3.12",),
        setup=("export PYTHONPATH=$PYTHONPATH:/mine",),
    )
    assert (code, seen[3]) == (0, f"{here.job().code}:/of/the/module:/mine")


def test_a_setup_line_that_fails_ends_the_job_and_is_named(here: Workplace) -> None:
    code, seen, said = run(here, setup=("true", "ls '/no such'", "true"))
    assert (code, seen) == (ExitCode.BAD_CONFIG, [])
    assert "cluster.setup line 2 failed: ls '/no such'" in said
