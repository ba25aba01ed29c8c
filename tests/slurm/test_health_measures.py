"""The probe and the all-reduce, measured for real on this host."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from slurm.health import host, probe
from slurm.health.allreduce import bus_gb_per_s
from slurm.health.probe import measure
from slurm.health.registry import AllreduceJob, Measure, ProbeJob, Status
from slurm.health.verdict import Probed, judge
from slurm.spec import ClusterSpec, ValidateSpec
from storage.errors import StoreError
from storage.job import JobContext, JobDescription
from storage.object_store import ObjectStore
from storage.records import Intent, Stage, Why
from storage.spec import StoreSpec
from tests.ranks import ALONE

ROOT = Path(__file__).parents[2]


def description(store: StoreSpec, folder: Path, *, entry: str, payload: Any) -> JobDescription:
    intent = Intent(
        run="check",
        stage=Stage.VALIDATE,
        unit="unit",
        attempt=1,
        token="check-validate-0001",
        nonce="0",
        cluster="here",
        user="me",
        why=Why.FIRST,
        after=None,
        nodes=1,
        ranks_per_node=1,
        fingerprint="f",
        created_at=datetime.now(UTC),
    )
    return JobDescription(
        intent=intent,
        store=store,
        entry=entry,
        payload=payload.model_dump(mode="json"),
        folder=folder,
        code=ROOT,
        python=Path(sys.executable),
    )


@pytest.mark.s3
def test_a_probe_measures_all_that_is_judged_and_this_host_is_fit(
    host_store: StoreSpec, tmp_path: Path
) -> None:
    job = ProbeJob(scratch=tmp_path, copy_mib=2, matmul_size=128, disk_mib=1, seconds_each=0.02)
    context = JobContext(
        description(host_store, tmp_path, entry="slurm.health.probe", payload=job), ALONE
    )
    outputs = json.loads(json.dumps(probe.run(context)))
    assert outputs["node"] == "n1"
    measures = {name: Measure(**fields) for name, fields in outputs["measures"].items()}
    lenient = ValidateSpec(
        min_memory_copy_gb_per_s=1e-6, min_matmul_gflop_per_s=1e-6, min_disk_write_mb_per_s=1e-6
    )
    judgement = judge([Probed(node="n1", measures=measures)], spec=lenient, cluster=ClusterSpec())
    findings = {finding.check: finding for finding in judgement.verdicts[0].findings}
    assert judgement.healthy == ("n1",)
    unknown = {name for name, one in findings.items() if one.status is Status.UNKNOWN}
    assert unknown <= {"gpus"}
    assert not list(tmp_path.glob("headrace-probe-*"))
    ledger_keys = context.job.keys
    assert list(ObjectStore(host_store).list(ledger_keys.probes)) == []


@pytest.mark.s3
def test_a_store_that_returns_other_bytes_is_found(
    host_store: StoreSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(ObjectStore):
        def get(self, key: str) -> bytes:
            return super().get(key)[:-1] + b"?"

    store = Forgetful(host_store)
    with pytest.raises(StoreError, match="came back with other bytes"):
        host.store_round_trip_ms(store, "probe/other", size_bytes=1000)
    assert store.head("probe/other") is None


def test_a_scratch_folder_that_cannot_be_written_is_a_failure_not_a_crash(
    tmp_path: Path,
) -> None:
    found = measure(lambda: host.disk_mb_per_s(tmp_path / "gone", size_bytes=host.MIB)[0])
    assert found.value is None
    assert found.failure.startswith("FileNotFoundError")


def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.matmul_error(size=128) < probe.MATMUL_ERROR_LIMIT / 10
    assert measure(lambda: probe._require_correct(12.0)).failure.startswith("WrongResultError")
    assert measure(lambda: probe._require_correct(float("nan"))).failure


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("printf 'GPU-1\\nGPU-2\\n'", Measure(value=2)),
        ("echo 'No devices were found' && exit 6", "No devices were found"),
    ],
)
def test_gpus_are_counted_by_the_drivers_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: Measure | str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = measure(host.gpus)
    if isinstance(expected, Measure):
        assert found == expected
    else:
        assert expected in found.failure


def test_a_host_without_the_tool_says_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert measure(host.gpus) == Measure(unknown="nvidia-smi is not installed")


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert bus_gb_per_s(size_bytes=10**9, seconds=1.0, world_size=2) == pytest.approx(1.0)
    assert bus_gb_per_s(size_bytes=10**9, seconds=0.5, world_size=4) == pytest.approx(3.0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


RANKS = """
import json, os, sys
from pathlib import Path
import torch.distributed
from slurm.health.allreduce import AllreduceError, measure
from slurm.health.registry import AllreduceJob
from storage.job import RankIdentity

folder, places = Path(sys.argv[1]), json.loads(sys.argv[2])
for job, place in places:
    if os.fork() == 0:
        place["nodes"] = tuple(place["nodes"])
        try:
            seconds, size_bytes = measure(AllreduceJob(**job), RankIdentity(**place))
            told = f"{seconds > 0} {size_bytes}"
        except AllreduceError as error:
            told = str(error)
        (folder / place["node"]).write_text(told)
        os._exit(0)
for _ in places:
    os.wait()
"""


@pytest.mark.distributed
def test_ranks_reduce_together_and_one_without_peers_says_whom_it_waited_for(
    tmp_path: Path,
) -> None:
    ports = {"pair": free_port(), "alone": free_port()}
    places = [
        replace(ALONE, rank=rank, world_size=2, node=f"{group}{rank}", master_port=ports[group])
        for group, rank in (("pair", 0), ("pair", 1), ("alone", 0))
    ]
    patience_s = {"pair": 60.0, "alone": 3.0}
    arguments = json.dumps(
        [
            (
                AllreduceJob(
                    size_mib=0.25, rounds=2, timeout_s=patience_s[place.node[:-1]]
                ).model_dump(),
                asdict(place),
            )
            for place in places
        ]
    )
    subprocess.run(
        [sys.executable, "-c", RANKS, tmp_path, arguments],
        check=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    told = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert told.keys() == {"alone0", "pair0", "pair1"}
    assert told["pair0"] == told["pair1"] == f"True {2**18}"
    assert told["alone0"].startswith(
        f"alone0 did not meet the other 1 ranks at 127.0.0.1:{ports['alone']} within 3 s"
    )
