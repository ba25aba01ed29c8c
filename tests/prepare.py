"""Installs what the tests need from Debian, where that can be done: Slurm and a browser.

Run by `make test`. Without root nothing is installed, and the tests that need it say why they skip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "mariadbd": "mariadb-server",
    "ip": "iproute2",
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
}


def main() -> int:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = sorted(
        package for tool, package in PACKAGES.items() if shutil.which(tool, path=path) is None
    )
    if not missing:
        return 0
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"Not root on Debian, so not installed: {', '.join(missing)}.")
        print("Tests marked slurm or ui will be skipped.")
        return 0
    print(f"Installing from Debian: {', '.join(missing)}", flush=True)
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing],
    ):
        subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
