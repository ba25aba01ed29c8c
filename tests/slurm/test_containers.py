"""The container of a job's ranks: what is asked of pyxis and of apptainer, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from slurm.cluster import Resources
from slurm.containers import ContainerSpec, variables_of, wrap
from slurm.launchers import srun_command
from slurm.local import LocalCluster
from slurm.spec import ClusterSpec
from slurm.submit import SlurmCluster
from storage.errors import SpecError
from storage.job import JobDescription
from storage.spec import StoreSpec
from tests.slurm.jobs import Workplace

KEYS = Path("/shared/keys")


@pytest.fixture
def job(tmp_path: Path) -> JobDescription:
    cluster = LocalCluster(ClusterSpec(), workdir=tmp_path)
    store = StoreSpec(credentials_file=KEYS)
    return Workplace(cluster=cluster, store=store, workdir=tmp_path, name="r").job(nodes=2)


def pyxis(**fields: Any) -> ContainerSpec:
    return ContainerSpec(kind="pyxis", image="nvcr.io#nvidia/pytorch:25.10-py3", **fields)


def apptainer(**fields: Any) -> ContainerSpec:
    return ContainerSpec(kind="apptainer", image="/shared/images/train.sif", **fields)


def srun(
    job: JobDescription, container: ContainerSpec, *, gpus: int = 0, **variables: str
) -> list[str]:
    wrapping = wrap(container, job, gpus_per_node=gpus, variables=variables)
    return srun_command(
        replace(
            job,
            srun_options=wrapping.srun_options,
            rank_prefix=wrapping.rank_prefix,
            rank_python=wrapping.rank_python,
        ),
        num_nodes=job.intent.nodes,
    )


def test_pyxis_gets_image_mounts_folder_and_variables_as_options_of_srun(
    job: JobDescription,
) -> None:
    container = pyxis(mounts=("/data:/corpus:ro", "/scratch"), flags=("--container-mount-home",))
    command = srun(job, container, AWS_CONFIG_FILE="/etc/aws", NCCL_DEBUG="INFO")
    options, rank = command[: command.index("python3")], command[command.index("python3") :]
    assert "--container-image=nvcr.io#nvidia/pytorch:25.10-py3" in options
    (mounts,) = (o.partition("=")[2] for o in options if o.startswith("--container-mounts="))
    assert mounts.split(",") == [
        f"{job.folder}:{job.folder}",
        f"{job.code}:{job.code}:ro",
        f"{KEYS}:{KEYS}:ro",
        "/etc/aws:/etc/aws:ro",
        "/data:/corpus:ro",
        "/scratch:/scratch",
    ]
    assert f"--container-workdir={job.folder}" in options
    (names,) = (o.partition("=")[2] for o in options if o.startswith("--container-env="))
    told = {"HEADRACE_NODES", "HEADRACE_MASTER_ADDR", "HEADRACE_MASTER_PORT", "PYTHONPATH"}
    assert set(names.split(",")) == {"AWS_CONFIG_FILE", "NCCL_DEBUG", *told}
    assert options[-1] == "--container-mount-home"
    assert rank == ["python3", "-P", "-m", "slurm.rank", str(job.folder / "job.json")]


def test_apptainer_stands_before_each_ranks_command(job: JobDescription) -> None:
    container = apptainer(
        mounts=("/data:/corpus:ro",), python="/opt/bin/python", flags=("--no-home",)
    )
    command = srun(job, container, gpus=8)
    assert command[command.index("apptainer") :] == [
        "apptainer",
        "exec",
        f"--bind={job.folder}:{job.folder}",
        f"--bind={job.code}:{job.code}:ro",
        f"--bind={KEYS}:{KEYS}:ro",
        "--bind=/data:/corpus:ro",
        f"--pwd={job.folder}",
        "--nv",
        "--no-home",
        "/shared/images/train.sif",
        "/opt/bin/python",
        "-P",
        "-m",
        "slurm.rank",
        str(job.folder / "job.json"),
    ]
    assert "--nv" not in srun(job, apptainer(flags=("--rocm",)), gpus=8)
    assert "--nv" not in srun(job, container)


def test_the_script_runs_the_hosts_python_and_shows_the_containers_command(
    job: JobDescription,
) -> None:
    spec = ClusterSpec(kind="slurm", container=apptainer(), env={"NCCL_DEBUG": "INFO"})
    script = SlurmCluster(spec).script(job, Resources(nodes=2, ranks_per_node=2))
    lines = script.splitlines()
    assert lines[-1].startswith(f"exec {job.python} ")
    (shown,) = (line for line in lines if line.startswith("# its ranks: srun "))
    assert "/shared/images/train.sif python3 -P -m slurm.rank" in shown
    for name in ("NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONPATH"):
        assert f'export APPTAINERENV_{name}="${name}"' in lines


def test_only_what_the_job_needs_is_forced_on_an_image() -> None:
    seen = variables_of(
        {"NCCL_DEBUG": "INFO", "TZ": "UTC"},
        environ={"PATH": "/bin", "HOME": "/h", "TZ": "CET", "AWS_CONFIG_FILE": "/etc/aws"},
    )
    assert seen == {"NCCL_DEBUG": "INFO", "TZ": "UTC", "AWS_CONFIG_FILE": "/etc/aws"}


def test_folders_that_outlive_an_attempt_are_mounted_to_be_written(job: JobDescription) -> None:
    shared = Path("/shared/run/checkpoints")
    command = srun(replace(job, folders=(shared,)), apptainer())
    assert f"--bind={shared}:{shared}" in command


@pytest.mark.parametrize("folder", ["a:b", "a,b"])
def test_a_path_that_cannot_be_mounted_is_told_before_anything_is_queued(
    job: JobDescription, folder: str
) -> None:
    odd = replace(job, folder=job.folder / folder)
    with pytest.raises(SpecError, match=r"has to be mounted.*choose another workdir"):
        SlurmCluster(ClusterSpec(kind="slurm", container=pyxis())).script(
            odd, Resources(nodes=1, ranks_per_node=1)
        )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image": "images/train.sif"}, "absolute path on the nodes"),
        ({"image": "train"}, "absolute path on the nodes"),
        ({"image": "-x"}, "not begin with '-'"),
        ({"image": "/a\n/b"}, "one line"),
        ({"mounts": ["data:/corpus"]}, "must be absolute paths"),
        ({"mounts": ["/a,/b"]}, "must be absolute paths"),
        ({"flags": ["--cleanenv"]}, "set by Headrace itself"),
        ({"flags": ["--bind=/a"]}, "container.mounts"),
        ({"flags": ["--env", "A=b"]}, "as one item"),
        ({"kind": "pyxis", "image": "x", "flags": ["--exclusive"]}, "begin with --container-"),
        ({"kind": "pyxis", "image": "./x.sqsh"}, "absolute path on the nodes"),
        (
            {"kind": "pyxis", "image": "x", "flags": ["--container-mounts=/a:/a"]},
            "container.mounts",
        ),
    ],
)
def test_a_container_that_cannot_work_is_refused(fields: dict[str, Any], words: str) -> None:
    base = {"kind": "apptainer", "image": "/i.sif"}
    with pytest.raises(ValidationError) as caught:
        ContainerSpec.model_validate({**base, **fields})
    (error,) = caught.value.errors()
    assert words in error["msg"]


def test_a_local_cluster_has_no_containers() -> None:
    with pytest.raises(ValidationError, match="container needs srun"):
        ClusterSpec(kind="local", container=apptainer())
