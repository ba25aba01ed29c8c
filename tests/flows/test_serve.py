"""`headrace serve`: one person's Prefect, behind a password, that nothing but its owner ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

import headrace
from flows.deploy import job_variables
from flows.home import SERVER, WORKER, Home, ServerRecord
from flows.server import HOST, POOL, find_server, free_port, listens
from tests.flows.waiting import wait_for

SLOW_FLOW = """
import time
from pathlib import Path
from prefect import flow

@flow
def slow(folder: str) -> str:
    Path(folder, "begun").touch()
    while not Path(folder, "go on").exists():
        time.sleep(0.1)
    return "done"
"""


class Serving:
    """A home, and the command line of its owner."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder=folder / "home")
        self.folder = folder

    def headrace(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            headrace.command(*arguments),
            cwd=self.folder,
            env=self._environ(),
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    def _environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if "PREFECT" not in name}
        return kept | {"HEADRACE_HOME": str(self.home.folder)}

    @property
    def record(self) -> ServerRecord:
        found = find_server(self.home)
        assert found is not None
        return found

    def child(self, name: str) -> psutil.Process | None:
        record = self.home.read_record()
        assert record is not None
        return next((one.process.find() for one in record.children if one.name == name), None)

    def client(self):
        settings = {
            PREFECT_API_URL: self.record.api_url,
            PREFECT_API_AUTH_STRING: self.home.auth_string(),
        }
        return temporary_settings(settings)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    serving = Serving(tmp_path_factory.mktemp("serving"))
    port = free_port(preferred=None)
    told = serving.headrace("serve", "--background", "--port", str(port))
    try:
        assert told.returncode == 0, told.stderr
        assert serving.record.port == port
        assert "It runs already" not in told.stdout
        assert f"Prefect is at {serving.record.ui_url}" in told.stdout
        assert str(serving.home.auth) in told.stdout
        assert serving.home.auth_string() not in told.stdout
        yield serving
    finally:
        serving.headrace("serve", "--stop")


def test_nobody_is_let_in_without_the_password(serving: Serving) -> None:
    url = f"{serving.record.api_url}/admin/version"
    assert serving.record.ui_url.startswith("http://127.0.0.1:")
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, auth=("headrace", "guess")).status_code == 401
    user, password = serving.home.auth_string().split(":")
    assert httpx.get(url, auth=(user, password)).status_code == 200
    assert httpx.get(serving.record.ui_url, follow_redirects=True).status_code == 200


def test_it_reports_to_nobody_and_keeps_its_state_in_its_home(serving: Serving) -> None:
    user, password = serving.home.auth_string().split(":")
    found = httpx.get(f"{serving.record.api_url}/admin/settings", auth=(user, password)).json()
    assert found["server"]["analytics_enabled"] is False
    assert found["server"]["ui"]["show_promotional_content"] is False
    assert found["home"] == str(serving.home.prefect)


def test_a_shell_is_told_how_to_reach_it_without_being_shown_the_password(
    serving: Serving,
) -> None:
    told = serving.headrace("serve", "--env").stdout
    assert serving.home.auth_string() not in told
    script = f"{told}\necho $PREFECT_API_URL $PREFECT_API_AUTH_STRING"
    shown = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == [serving.record.api_url, serving.home.auth_string()]


def test_a_second_one_is_refused_and_asking_again_finds_the_first(serving: Serving) -> None:
    told = serving.headrace("serve")
    assert told.returncode == 1
    assert "is running already" in told.stderr
    assert "Traceback" not in told.stderr
    again = serving.headrace("serve", "--background", "--port", "1024")
    assert again.returncode == 0
    assert serving.record.ui_url in again.stdout
    assert f"runs already, at port {serving.record.port} and not 1024" in again.stdout


class _Foreign(BaseHTTPRequestHandler):
    """The server of somebody else: healthy, and closed to our password."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/health" else 401)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def foreign_port() -> Iterator[int]:
    with HTTPServer((HOST, 0), _Foreign) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_a_port_that_another_server_holds_is_refused_in_one_line(
    tmp_path: Path, foreign_port: int
) -> None:
    told = Serving(tmp_path).headrace("serve", "--port", str(foreign_port))
    assert told.returncode == 1
    assert f"port {foreign_port} of 127.0.0.1 is in use" in told.stderr
    assert "another --port" in told.stderr
    assert "Traceback" not in told.stderr


def test_only_who_listens_at_the_port_is_taken_for_the_server(foreign_port: int) -> None:
    assert listens(psutil.Process(), foreign_port)
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as other:
        assert not listens(psutil.Process(other.pid), foreign_port)
        other.communicate(b"\n")


def test_a_flow_run_outlives_its_worker_and_the_worker_comes_back(
    serving: Serving, tmp_path: Path
) -> None:
    (tmp_path / "slow_flow.py").write_text(SLOW_FLOW)
    variables = job_variables()
    variables["env"]["PYTHONPATH"] = str(tmp_path)
    with serving.client(), get_client(sync_client=True) as client:
        deployment = client.create_deployment(
            flow_id=client.create_flow_from_name("slow"),
            name="slow",
            entrypoint="slow_flow.slow",
            work_pool_name=POOL,
            job_variables=variables,
            pull_steps=[],
        )
        run = client.create_flow_run_from_deployment(
            deployment, parameters={"folder": str(tmp_path)}
        )
        wait_for("the flow to begin", (tmp_path / "begun").exists)
        worker = serving.child(WORKER)
        assert worker is not None
        worker.kill()
        wait_for("another worker", lambda: serving.child(WORKER) not in (None, worker))
        (tmp_path / "go on").touch()

        def ended() -> str | None:
            state = client.read_flow_run(run.id).state
            return state.name if state is not None and state.is_final() else None

        assert wait_for("the flow run to end", ended) == "Completed"


def test_stopping_leaves_nothing_and_the_next_one_is_at_the_same_address(
    serving: Serving,
) -> None:
    before = serving.record
    supervisor = before.supervisor.find()
    server, worker = serving.child(SERVER), serving.child(WORKER)
    assert supervisor is not None
    assert server is not None
    assert worker is not None
    supervisor.kill()
    supervisor.wait(timeout=30)
    assert server.is_running()
    assert worker.is_running()
    told = serving.headrace("serve", "--background")
    assert told.returncode == 0, told.stderr
    assert serving.record.api_url == before.api_url
    assert not server.is_running()
    assert not worker.is_running()
    children = [serving.child(SERVER), serving.child(WORKER)]
    assert serving.headrace("serve", "--stop").stdout.startswith("Stopped")
    assert find_server(serving.home) is None
    deadline = time.monotonic() + 30
    while any(one is not None and one.is_running() for one in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert serving.headrace("serve", "--stop").stdout == "Nothing was running.\n"
