"""A served Headrace: Prefect server, worker and deployments, as `headrace serve` starts them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from flows.home import Home
from flows.server import client_settings, find_server
from slurm.devcluster import DevCluster
from tests.e2e.browser import Browser

ROOT = Path(__file__).parents[2]
CORPUS = Path(os.__file__).parent


@dataclass(frozen=True)
class Site:
    """A user's account: a folder to work in, a served home, and the environment of its shell."""

    folder: Path
    environ: dict[str, str]
    ui_url: str
    api_url: str
    auth: str

    def headrace(self, *arguments: str | Path) -> list[str | Path]:
        return [sys.executable, "-P", "-m", "headrace", *arguments]

    def run(self, *command: str | Path, timeout_s: float = 280, **more: Any) -> str:
        """Standard output of a command of this user's shell that has to succeed."""
        result = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            **more,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def start(self, *command: str | Path, log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environ, stdout=file, stderr=file
            )

    def api(self, method: str, path: str, **body: Any) -> Any:
        """One call of Prefect's own API, with the user's password."""
        user, password = self.auth.split(":", 1)
        response = httpx.request(
            method,
            f"{self.api_url}{path}",
            auth=(user, password),
            json=body or None,
            timeout=30,
        )
        response.raise_for_status()
        return response.json()

    def flow_run(self, name: str) -> dict[str, Any] | None:
        """The newest flow run of that name, as Prefect's API tells it."""
        runs = self.api("POST", "/flow_runs/filter", sort="START_TIME_DESC", limit=50)
        return next((run for run in runs if run["name"] == name), None)

    def said(self, flow_run: dict[str, Any]) -> str:
        """What a flow run logged, for the message of a test that it fails."""
        logs = self.api(
            "POST",
            "/logs/filter",
            logs={"flow_run_id": {"any_": [flow_run["id"]]}},
            sort="TIMESTAMP_ASC",
            limit=200,
        )
        return "\n".join(log["message"] for log in logs)

    def spec(self, name: str, base: str = "slurm-dev.yaml", **changes: Any) -> Path:
        """A shipped pipeline under another run name, with blocks changed."""
        pipeline = yaml.safe_load((ROOT / "pipelines" / base).read_text())
        pipeline["run"] = name
        for block, values in changes.items():
            pipeline[block] = {**pipeline.get(block, {}), **values}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(pipeline, sort_keys=False))
        return path


@pytest.fixture(scope="session")
def site(dev_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A user of the dev cluster who has given `headrace serve --background`."""
    folder = tmp_path_factory.mktemp("site")
    home = Home(folder=folder / "home")
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "SLURM_", "SBATCH_", "AWS_"))
    }
    environ |= dev_cluster.env() | {
        "HEADRACE_HOME": str(home.folder),
        "HEADRACE_CORPUS": str(CORPUS),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = [sys.executable, "-P", "-m", "headrace"]
    try:
        subprocess.run(
            [*command, "serve", "--background"], cwd=folder, env=environ, check=True, timeout=150
        )
        record = find_server(home)
        assert record is not None
        environ |= client_settings(home, api_url=record.api_url)
        yield Site(
            folder=folder,
            environ=environ,
            ui_url=record.ui_url,
            api_url=record.api_url,
            auth=home.auth_string(),
        )
    finally:
        shipped = ROOT / "pipelines" / "slurm-dev.yaml"
        subprocess.run([*command, "down", shipped], cwd=folder, env=environ, check=True, timeout=60)


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures of the UI go: into the docs when `make screenshots` asks for them."""
    wanted = os.environ.get("HEADRACE_SCREENSHOTS")
    return Path(wanted).absolute() if wanted else tmp_path_factory.mktemp("screenshots")


@pytest.fixture(scope="session")
def browser(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromium-driver are not installed")
    opened = Browser(
        chromium=chromium,
        driver=driver,
        ui_url=site.ui_url,
        auth=site.auth,
        profile=tmp_path_factory.mktemp("chromium"),
    )
    yield opened
    opened.close()
