"""`benchmarks.line_fit` under Headrace: python -m benchmarks.line_fit_run FOLDER MINUTES STEPS."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.owning import own
from slurm.spec import ClusterSpec
from trainer.spec import CommandSpec

LEAD_S = 20

if __name__ == "__main__":
    folder, limit_min, steps = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    script = Path(__file__).with_name("line_fit.py")
    argv = [sys.executable, str(script), str(folder), "$HEADRACE_ATTEMPT", steps]
    own(
        CommandSpec(
            argv=("bash", "-c", f"exec {' '.join(argv)}"),
            per="rank",
            cwd=folder,
            progress="step (?P<step>[0-9]+)",
        ),
        folder=folder,
        cluster=ClusterSpec(kind="slurm", nodes=2, time_limit_min=limit_min, signal_lead_s=LEAD_S),
    )
