"""Somebody's own script as a job: what it is told, how it is followed, and what its end means."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import textwrap
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from slurm.tracebacks import root_of
from storage.errors import SpecError
from storage.job import JobContext, JobExit, RankIdentity
from storage.records import ExitCode, Heartbeat
from storage.spec import StoreSpec
from tests.ranks import ALONE
from tests.trainer.jobs import Bench
from trainer import command
from trainer.spec import CommandJob, CommandSpec

PROGRESS = r"step (?P<step>[0-9,]+) loss (?P<loss>\S+)"


@dataclass(frozen=True, kw_only=True)
class Desk:
    """One run whose attempts run a script."""

    bench: Bench
    folder: Path

    def script(self, text: str) -> list[str]:
        path = self.folder / "script.py"
        path.write_text(textwrap.dedent(text))
        return [sys.executable, str(path)]

    def context(
        self, argv: list[str], *, attempt: int = 1, identity: RankIdentity = ALONE, **asked: Any
    ) -> JobContext:
        spec = CommandSpec.model_validate({"argv": argv, "cwd": self.folder, **asked})
        checkpoints = self.folder / "checkpoints"
        job = CommandJob(command=spec, checkpoints=checkpoints, ranks_per_node=2)
        described = self.bench.job(attempt=attempt)
        described = replace(
            described, entry="trainer.command", payload=job.model_dump(mode="json"), heartbeat_s=0.1
        )
        return JobContext(described, identity)


@pytest.fixture
def desk(store_spec: StoreSpec, tmp_path: Path) -> Desk:
    run = f"c{secrets.token_hex(4)}"
    return Desk(
        bench=Bench(store=store_spec, manifest_key="", run=run, folder=tmp_path), folder=tmp_path
    )


def test_what_the_script_prints_is_its_progress(
    desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = desk.script("""
        import time
        print("step 1 loss 2.5\\nstep 1,002 loss nan\\nno step here", flush=True)
        time.sleep(0.5)
    """)
    context = desk.context(argv, progress=PROGRESS)
    seen: list[Heartbeat] = []
    with context:
        outputs = command.run(context)
        seen += context.ledger.heartbeats(context.job.intent.stage, 1)
    assert outputs == {"final_step": 1002}
    assert [beat.step for beat in seen] == [1002]
    assert "loss" not in seen[0].numbers
    assert "no step here" in capfd.readouterr().out


ENVIRON = {"PATH": "/bin", "PYTHONPATH": f"{Path.cwd()}:/mine"}


def test_under_torchrun_a_node_is_told_what_torchrun_reads(desk: Desk) -> None:
    second = replace(ALONE, rank=1, world_size=2, node="b", nodes=("a", "b"), master_addr="a")
    context = desk.context(["x"], identity=second)
    job = CommandJob.model_validate(context.job.payload)
    told = command.command_environment(ENVIRON, context=context, job=job)
    assert told["PET_NNODES"] == told["NNODES"] == "2"
    assert told["PET_NODE_RANK"] == told["NODE_RANK"] == "1"
    assert told["PET_NPROC_PER_NODE"] == "2"
    assert (told["PET_MASTER_ADDR"], told["PET_MASTER_PORT"]) == ("a", str(ALONE.master_port))
    assert "RANK" not in told
    assert told["PYTHONPATH"] == "/mine"


def test_without_torchrun_a_rank_is_told_what_torchrun_would_set(desk: Desk) -> None:
    third = replace(
        ALONE, rank=3, world_size=4, local_rank=1, node="b", nodes=("a", "b"), master_addr="a"
    )
    context = desk.context(["x"], identity=third, per="rank")
    job = CommandJob.model_validate(context.job.payload)
    told = command.command_environment(ENVIRON, context=context, job=job)
    place = {name: told[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    assert place == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert told["MASTER_ADDR"] == "a"


def test_a_script_that_is_asked_to_leave_saves_and_is_resumed(desk: Desk) -> None:
    argv = desk.script("""
        import json, os, pathlib, signal, sys, time
        saved = pathlib.Path(os.environ["HEADRACE_CHECKPOINTS"], "step.json")
        step = json.loads(saved.read_text()) if saved.exists() else 0
        def leave(*_):
            saved.write_text(json.dumps(step))
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        while step < 100_000:
            step += 1
            print(f"step {step} loss 1", flush=True)
            if "HEADRACE_ATTEMPT" in os.environ and os.environ["HEADRACE_ATTEMPT"] == "2":
                break
            time.sleep(0.01)
    """)
    context = desk.context(argv, progress=PROGRESS)
    asks = threading.Timer(1.0, os.kill, args=(os.getpid(), signal.SIGUSR2))
    asks.start()
    with pytest.raises(JobExit) as left:
        command.run(context)
    assert left.value.code is ExitCode.RESUME
    assert "asked to leave by SIGUSR2; the command left with" in str(left.value)
    saved = json.loads((desk.folder / "checkpoints" / "step.json").read_text())
    assert saved >= 1
    again = command.run(desk.context(argv, attempt=2, progress=PROGRESS))
    assert again == {"final_step": saved + 1}


def test_a_code_of_ours_is_passed_on_and_any_other_is_a_crash(desk: Desk) -> None:
    argv = [sys.executable, "-c", "import sys; print('words'); sys.exit(int(sys.argv[1]))"]
    with pytest.raises(JobExit, match="left with 80") as diverged:
        command.run(desk.context([*argv, "80"]))
    assert diverged.value.code is ExitCode.DIVERGED
    with pytest.raises(JobExit, match="left with 7\nwords") as crashed:
        command.run(desk.context([*argv, "7"], attempt=2))
    assert crashed.value.code is ExitCode.CRASHED


def test_a_hang_is_ended(desk: Desk) -> None:
    argv = [sys.executable, "-uc", "print('step 3 loss 1'); import time; time.sleep(1000)"]
    context = desk.context(argv, progress=PROGRESS, hang_after_s=0.5)
    with pytest.raises(JobExit, match="the last one was step 3") as hung:
        command.run(context)
    assert hung.value.code is ExitCode.HANG


def test_a_script_that_never_comes_to_a_first_step_hangs_too(desk: Desk) -> None:
    argv = [sys.executable, "-uc", "print('still waiting'); import time; time.sleep(1000)"]
    asked = {"progress": PROGRESS, "hang_after_s": 0.1, "start_timeout_s": 0.5}
    with pytest.raises(JobExit, match=r"no first step .* or command\.progress .* matches no line"):
        command.run(desk.context(argv, **asked))


def test_a_pattern_that_matches_nothing_is_told(
    desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = [sys.executable, "-uc", "print('Step: 3')"]
    assert command.run(desk.context(argv, progress=PROGRESS)) == {"final_step": None}
    assert "no line of the output matched command.progress" in capfd.readouterr().out


def test_a_command_that_cannot_be_started_says_what_to_correct(desk: Desk) -> None:
    with pytest.raises(SpecError, match=r"command\.argv 'no-such-program x' cannot be started"):
        command.run(desk.context(["no-such-program", "x"]))


@pytest.mark.distributed
def test_torchrun_spans_its_ranks_and_the_scripts_own_error_comes_out(desk: Desk) -> None:
    argv = desk.script("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        one = torch.ones(1)
        dist.all_reduce(one)
        print(f"step {int(one)} loss 1", flush=True)
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank == 1:
            raise KeyError("optimiser")
    """)
    launched = [sys.executable, "-m", "torch.distributed.run", *argv[1:]]
    with pytest.raises(JobExit) as left:
        command.run(desk.context(launched, progress=PROGRESS))
    assert left.value.code is ExitCode.CRASHED
    assert left.value.outputs == {"final_step": 2}
    assert root_of(str(left.value)) == "KeyError: 'optimiser'"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"argv": []}, "at least 1 item"),
        ({"argv": ["x"], "progress": "step ("}, "is no regular expression"),
        ({"argv": ["x"], "progress": "step ([0-9]+)"}, "must have a group named step"),
        ({"argv": ["x"], "hang_after_s": 5}, "needs progress"),
    ],
)
def test_a_block_that_cannot_work_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        CommandSpec.model_validate(asked)


def test_a_launchers_own_traceback_is_left_out() -> None:
    own = ["Traceback (most recent call last):", '  File "script.py", line 1', "KeyError: 'x'"]
    note = "E1130 01:46:45.725000 1 torch/distributed/elastic/api.py:1002] failed (exitcode: 1)"
    theirs = ["Traceback (most recent call last):", "  File run.py", "errors.ChildFailedError: "]
    labelled = [f"[rank1]: {line}" for line in own]
    assert command.own_words([*labelled, note, *theirs, "script.py FAILED"]) == "\n".join(own)
    assert command.own_words(own) == "\n".join(own)
