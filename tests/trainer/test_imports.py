import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["trainer.spec", "trainer.plan.arithmetic", "trainer.schedule"])
def test_what_a_login_node_imports_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_job_does_not_load_prefect_nor_the_packages_above() -> None:
    code = (
        "import sys, trainer.main; "
        "sys.exit(bool({'prefect', 'submitit', 'flows', 'tasks', 'slurm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
