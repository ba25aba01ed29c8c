"""What a site asks for, and what surrounds an engine, as a real Slurm and its jobs see it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm.commands import SystemCommands, run_checked
from slurm.containers import ContainerSpec
from slurm.devcluster import DevCluster
from slurm.spec import ClusterSpec
from slurm.submit import SlurmCluster
from storage.records import ExitCode, new_nonce
from storage.spec import StoreSpec
from tests.slurm.jobs import ENTRIES, Sent, Workplace, wait_for

pytestmark = pytest.mark.slurm

STAND_INS = Path(__file__).resolve().parent / "stand_ins"
ROOT = ENTRIES.parent.parent
SECRET = "hunter2hunter2"
COMMENT = """it's "5 $HOME; #2 \\ of `all`"""
ODD = {
    "PMI_RANK": "3",
    "PREFECT_API_KEY": SECRET,
    "SBATCH_EXPORT": "NONE",
    "SBATCH_PARTITION": "nonsense",
    "SBATCH_WCKEY": "nonsense",
    "SLURM_CPUS_PER_TASK": "3",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_MEM_PER_CPU": "4000",
    "SLURM_NTASKS": "77",
    "SOME_TOKEN": SECRET,
    "SRUN_CPUS_PER_TASK": "5",
}
MODULES = 'module() { [ "$1" = load ] && [ "$2" != bad ] && export LOADED="$LOADED:$2"; }'
IMAGE_VARIABLES = ("PYTHONPATH=/of/the/image", "FLAVOUR=of the image", "OF_IMAGE=yes")


@pytest.fixture(scope="module")
def commands(dev_cluster: DevCluster) -> SystemCommands:
    return SystemCommands(slurm_conf=dev_cluster.slurm_conf)


@pytest.fixture(scope="module")
def reservation(commands: SystemCommands) -> Iterator[str]:
    name = f"r{new_nonce()}"
    # The job of the test before may still be leaving the node.
    fields = f"ReservationName={name} StartTime=now Duration=60 Users=root Nodes=n4"
    flags = "Flags=OVERLAP,IGNORE_JOBS"
    run_checked(commands, ["scontrol", "create", "reservation", *fields.split(), flags])
    yield name
    run_checked(commands, ["scontrol", "delete", f"ReservationName={name}"])


@pytest.fixture(scope="module")
def sent(
    slurm_spec: ClusterSpec,
    bridge_store: StoreSpec,
    shared_folder: Path,
    reservation: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Sent]:
    """Jobs on n1 to n4, submitted together; `inside` by a job that is an allocation itself."""
    own = tmp_path_factory.mktemp("site")
    environment = own / "conda-env"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    init = own / "modules" / "init" / "bash"
    init.parent.mkdir(parents=True)
    init.write_text(MODULES)
    image = own / "image.sif"
    folders = {
        "/usr",
        "/bin",
        "/lib",
        "/lib64",
        "/etc",
        "/dev",
        "/proc",
        sys.prefix,
        sys.base_prefix,
    }
    image.write_text("\n".join([*sorted(folders), *IMAGE_VARIABLES, ""]))

    path = f"{STAND_INS}:{os.environ['PATH']}"
    plain = slurm_spec.model_copy(update={"setup": ()})
    site = plain.model_copy(
        update={
            "partition": ("urgent", "dev"),
            "reservation": reservation,
            "mpi": "pmi2",
            "extra": {"comment": COMMENT, "exclusive": True, "mail-type": "NONE"},
        }
    )
    modules = {**plain.env, "MODULESHOME": str(init.parent.parent), "PATH": path}
    software = plain.model_copy(
        update={"modules": ("a", "b/2"), "conda": str(environment), "env": modules}
    )
    no_module = software.model_copy(update={"modules": ("a", "bad")})
    container = ContainerSpec(
        kind="apptainer",
        image=str(image),
        mounts=(f"{ENTRIES}:/entries:ro",),
        python=sys.executable,
    )
    variables = {"PYTHONPATH": "/entries", "FLAVOUR": "of the spec", "PATH": path}
    contained = plain.model_copy(update={"container": container, "env": variables})

    name, found = f"run-{new_nonce()}", dict[str, Sent]()
    place = Workplace(
        cluster=SlurmCluster(plain), store=bridge_store, workdir=shared_folder, name=name
    )

    def send(what: str, spec: ClusterSpec, *, nodes: int, part: str = "meet") -> None:
        here = replace(place, cluster=SlurmCluster(spec))
        job = here.job(attempt=len(found) + 1, nodes=nodes, part=part)
        job = replace(job, python=spec.interpreter or job.python)
        found[what] = Sent(here, job, here.submit(job, memory_per_node="300M"))

    send("site", site, nodes=1)
    send("software", software, nodes=1)
    send("no module", no_module, nodes=1)
    send("contained", contained, nodes=2)
    found["inside"] = _send_from_inside(place, plain, attempt=len(found) + 1, folder=own)
    return found


def _send_from_inside(place: Workplace, spec: ClusterSpec, *, attempt: int, folder: Path) -> Sent:
    """A job whose own script, in a step of its own, submits the job that is looked at."""
    job = place.job(attempt=attempt, nodes=2, part="meet")
    description, answer = folder / "described.json", folder / "answer"
    job.write(description)
    (folder / "spec.json").write_text(spec.model_dump_json())
    files = (ENTRIES / "submitter.py", folder / "spec.json", description, answer)
    submitter = shlex.join([sys.executable, "-P", *map(str, files)])
    exports = shlex.join(f"{name}={value}" for name, value in ODD.items())
    script = folder / "outer.sh"
    script.write_text(
        "#!/bin/bash\n"
        f"export PYTHONPATH={shlex.quote(str(ROOT))}\n"
        f"srun --ntasks=1 --cpus-per-task=1 env {exports} {submitter}\n"
    )
    done = subprocess.run(
        ["sbatch", "--ntasks=3", "--mem=600M", "--time=2", f"--output={folder}/outer.log", script],
        capture_output=True,
        check=False,
        env={**os.environ, "SLURM_CONF": str(spec.slurm_conf)},
        text=True,
    )
    assert done.returncode == 0, done.stderr
    log = folder / "outer.log"
    wait_for(answer.exists, what=f"the job inside: {log.read_text() if log.exists() else ''}")
    return Sent(place, job, wait_for(answer.read_text, what="its id"))


def test_a_pipeline_inside_an_allocation_gets_jobs_as_asked(sent: dict[str, Sent]) -> None:
    one = sent["inside"]
    assert one.word.code == ExitCode.DONE, one.logs
    assert len(one.word.outputs["places"]) == 4
    seen = one.word.outputs["environment"]
    assert (seen["SLURM_NTASKS"], seen["SLURM_CPUS_PER_TASK"]) == ("4", "1")
    assert seen["SLURM_JOB_ID"] == one.job_id
    assert seen["SLURM_JOB_PARTITION"] == "dev"
    assert seen["SLURM_MEM_PER_NODE"] == "300"
    ours = {"SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK"}
    assert not {name for name in ODD if seen.get(name) == ODD[name]}
    assert not {name for name in seen if name.startswith("SBATCH_")}
    assert not (ODD.keys() - ours - {"SLURM_EXPORT_ENV"}) & seen.keys()


def test_slurm_stores_no_secret_of_an_engines_surroundings(
    sent: dict[str, Sent], commands: SystemCommands
) -> None:
    one = sent["inside"]
    assert SECRET not in str(one.word.outputs["environment"])
    shown = run_checked(commands, ["scontrol", "show", "job", "--details", one.job_id])
    stored = run_checked(commands, ["sacct", "--env-vars", f"--jobs={one.job_id}"])
    assert one.job.intent.token in shown
    assert "SLURM_SUBMIT_DIR" in stored, "accounting keeps what sbatch was given"
    assert SECRET not in shown + stored


def test_options_of_the_site_arrive_as_they_were_written(
    sent: dict[str, Sent], commands: SystemCommands
) -> None:
    one = sent["site"]
    assert one.word.code == ExitCode.DONE, one.logs
    seen = one.word.outputs["environment"]
    assert seen["SLURM_JOB_RESERVATION"] == str(one.place.cluster._spec.reservation)  # type: ignore[attr-defined]
    assert "PMI_RANK" in seen, "srun --mpi=pmi2 sets it"
    shown = run_checked(commands, ["scontrol", "show", "job", one.job_id])
    assert f"Comment={COMMENT}" in shown
    assert re.search(r"OverSubscribe=NO\b", shown), "exclusive"
    assert re.search(r"Partition=(urgent|dev)\b(?!,)", shown)


def test_modules_and_conda_serve_the_ranks_too(sent: dict[str, Sent]) -> None:
    one = sent["software"]
    assert one.word.code == ExitCode.DONE, one.logs
    seen = one.word.outputs["environment"]
    assert seen["LOADED"] == ":a:b/2"
    assert one.job.python == Path("python")
    assert seen["PATH"].startswith(f"{seen['CONDA_PREFIX']}/bin:")


def test_a_module_that_fails_ends_the_job_before_its_start(sent: dict[str, Sent]) -> None:
    one = sent["no module"]
    assert one.seen.exit_code == f"{ExitCode.BAD_CONFIG.value}:0"
    assert "cluster.modules: bad cannot be loaded" in one.logs
    assert one.attempt.start is None


def test_ranks_run_inside_the_image_with_what_headrace_put_there(sent: dict[str, Sent]) -> None:
    one = sent["contained"]
    assert one.word.code == ExitCode.DONE, one.logs
    outputs = one.word.outputs
    assert len(outputs["places"]) == 4
    assert outputs["folder"] == str(one.job.folder)
    seen = outputs["environment"]
    assert seen["OF_IMAGE"] == "yes"
    assert seen["FLAVOUR"] == "of the spec"
    assert seen["PYTHONPATH"] == f"{one.job.code}:/entries"
    assert outputs["path"][0] == str(one.job.code)
    start = one.attempt.start
    assert start is not None
    assert start.job is not None
    assert start.job.host in start.nodes, "the batch step is on the host"
