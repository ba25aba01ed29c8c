"""`--fork NEW` begins a run of its own, from the newest weights that still mean something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.forking import fork_run
from flows.opening import open_ledger, open_run
from flows.spec import PipelineSpec
from flows.watchers import AllEyes
from storage import embedded
from storage.checkpoint_records import CommitRef, SweepJournal
from storage.checkpoints.commits import read_pins
from storage.errors import SpecError
from storage.records import RunRecord, encode
from tests.storage.retention.test_sweep import AT, Run

pytestmark = pytest.mark.s3


def a_spec(folder: Path, run: str, **blocks: Any) -> PipelineSpec:
    blocks = {"data": {"inputs": [f"{folder}/docs"]}} | blocks
    return PipelineSpec.model_validate({"run": run, "workdir": folder / "work"} | blocks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where runs of this module work; their store is up for as long as it lasts."""
    folder = tmp_path_factory.mktemp("fork")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_HOME", str(folder / "home"))
        spec = a_spec(folder, "any")
        server = embedded.store_of(spec.store, workdir=spec.workdir)
        assert server is not None
        try:
            with server.in_use():
                yield folder
        finally:
            server.stop()


class Told(AllEyes):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(message)


def begin(folder: Path, run: str, *steps: int, **blocks: Any) -> PipelineSpec:
    """A run that has been begun, with checkpoints at these steps."""
    spec = a_spec(folder, run, **blocks)
    with open_run(spec, eyes=AllEyes()) as context:
        made = Run(context.ledger.store, run)
        made.attempt(1)
        made.saved(*steps)
    return spec


def record_of(spec: PipelineSpec) -> RunRecord | None:
    with open_ledger(spec) as (_, ledger):
        return ledger.run_record()


def pins(spec: PipelineSpec) -> tuple[CommitRef, ...]:
    with open_ledger(spec) as (_, ledger):
        return read_pins(ledger)


def other_seed(spec: PipelineSpec, **train: Any) -> PipelineSpec:
    return PipelineSpec.model_validate(spec.model_dump() | {"train": {"seed": 7} | train})


def test_a_run_refuses_another_seed_and_its_fork_has_the_weights(folder: Path) -> None:
    spec = begin(folder, "parent", 10, 20)
    other = other_seed(spec)
    with pytest.raises(SpecError, match=r"train\.seed: 0 -> 7"), open_run(other, eyes=AllEyes()):
        pass
    told: list[str] = []
    child = fork_run(other, "child", say=told.append)
    record = record_of(child)
    assert record is not None
    newest = CommitRef(step=20, attempt=1, save="aa")
    assert (record.forked_from, record.fork_point) == ("parent", newest)
    assert pins(spec) == (newest,)
    assert "step 20" in told[0]
    with open_run(child, eyes=AllEyes()) as context:
        assert context.run == "child"
    assert fork_run(other, "child", say=told.append) == child


def test_what_has_changed_is_told_when_the_run_is_opened_and_not_again(folder: Path) -> None:
    spec = begin(folder, "told", 30)
    train = {"steps": 50, "log_every_steps": 1}
    other = PipelineSpec.model_validate(spec.model_dump() | {"train": train})
    eyes = Told()
    with open_run(other, eyes=eyes):
        pass
    assert [line for line in eyes.lines if line.startswith("changed")] == [
        "changed since the run began: train.steps: 1000 -> 50 (the schedule is stretched or "
        "shortened with it); it ALTERS the training, from step 30 on",
        "changed since the run began: train.log_every_steps: 10 -> 1 (an interval)",
    ]
    again = Told()
    with open_run(other, eyes=again, again=True):
        pass
    assert again.lines == []


def test_a_refused_spec_is_not_what_is_remembered_of_the_run(folder: Path) -> None:
    from flows.recalling import spec_of_run

    spec = begin(folder, "remembered")
    with pytest.raises(SpecError), open_run(other_seed(spec), eyes=AllEyes()):
        pass
    assert spec_of_run("remembered").train.seed == 0


def test_a_run_that_begins_anew_in_another_store_says_where_its_records_are(folder: Path) -> None:
    spec = begin(folder, "moved")
    other = PipelineSpec.model_validate(
        spec.model_dump() | {"workdir": folder / "elsewhere", "store": {"prefix": "p"}}
    ).anchored(folder)
    server = embedded.store_of(other.store, workdir=other.workdir)
    assert server is not None
    eyes = Told()
    try:
        with open_run(other, eyes=eyes):
            pass
    finally:
        server.stop()
    assert f"has its records in {spec.workdir}/store" in eyes.lines[0]
    assert "at step 0" in eyes.lines[0]
    back = Told()
    with open_run(spec, eyes=back):
        pass
    assert not any("records" in line for line in back.lines)


def test_another_model_starts_from_scratch_and_says_why(folder: Path) -> None:
    spec = begin(folder, "small", 10)
    told: list[str] = []
    child = fork_run(other_seed(spec, model={"dim": 256}), "large", say=told.append)
    record = record_of(child)
    assert record is not None
    assert (record.forked_from, record.fork_point) == ("small", None)
    assert told[0] == "Starts from scratch, at step 0: train.model.dim is 256 and was 128."
    assert pins(spec) == ()


def test_a_checkpoint_that_a_sweep_has_named_is_passed_over(folder: Path) -> None:
    spec = begin(folder, "swept", 10, 20)
    with open_ledger(spec) as (_, ledger):
        newest = CommitRef(step=20, attempt=1, save="aa")
        journal = SweepJournal(sweep="s", refs=(newest,), at=AT)
        ledger.store.put(ledger.keys.sweep("s"), encode(journal))
    record = record_of(fork_run(other_seed(spec), "unswept", say=lambda _: None))
    assert record is not None
    assert record.fork_point == CommitRef(step=10, attempt=1, save="aa")


def test_a_fork_takes_nobodys_name(folder: Path) -> None:
    spec = begin(folder, "origin")
    taken = begin(folder, "taken")
    fork_run(other_seed(taken), "of-another", say=lambda _: None)
    for new, message in {
        "origin": "another name than the run's own",
        "Not A Name": "lower-case letters",
        "taken": "no fork",
        "of-another": "a fork of 'taken'",
    }.items():
        with pytest.raises(SpecError, match=message):
            fork_run(other_seed(spec), new, say=lambda _: None)


def test_nothing_is_begun_where_there_is_nothing_to_fork_or_to_train(folder: Path) -> None:
    unknown = a_spec(folder, "unknown")
    with pytest.raises(SpecError, match="no run 'unknown' to fork"):
        fork_run(unknown, "unborn", say=lambda _: None)
    spec = begin(folder, "trained", 500)
    with pytest.raises(SpecError, match=r"train\.steps 500 must be above 500"):
        fork_run(other_seed(spec, steps=500), "unborn", say=lambda _: None)
    assert record_of(unknown.renamed("unborn")) is None
    assert pins(spec) == ()
