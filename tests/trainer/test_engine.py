"""A data set that is small for its training is told, or refused, before any rank waits."""

from __future__ import annotations

import pytest

from storage.errors import SpecError
from storage.job import JobContext, RankIdentity
from tests.ranks import ALONE
from tests.trainer.jobs import TINY, Bench
from trainer import engine
from trainer.engine import require_samples
from trainer.main import run
from trainer.spec import TrainSpec


def changed(**fields: int) -> TrainSpec:
    return TrainSpec.model_validate(TINY.model_dump() | fields)


class ReachedError(Exception):
    """The checks of the data set are passed."""


def test_epochs_are_counted_and_a_batch_never_holds_a_sample_twice() -> None:
    batch = TINY.global_batch
    assert require_samples(batch, train=TINY, dataset_id="d") == TINY.steps
    with pytest.raises(SpecError, match=rf"train\.global_batch {batch} .* {batch - 1} samples"):
        require_samples(batch - 1, train=TINY, dataset_id="d")


@pytest.mark.s3
def test_a_run_says_how_often_it_takes_its_samples_and_refuses_too_few(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reached(identity: RankIdentity) -> None:
        raise ReachedError

    monkeypatch.setattr(engine, "pick_device", reached)
    with pytest.raises(ReachedError):
        run(JobContext(bench.job(), ALONE))
    assert capsys.readouterr().out == ""
    with pytest.raises(ReachedError):
        run(JobContext(bench.job(changed(steps=100_000), attempt=2), ALONE))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("train.steps 100000 × train.global_batch 8 takes each of the ")
    with pytest.raises(SpecError, match=r"train\.global_batch 65536 must be at most the \d+ samp"):
        run(JobContext(bench.job(changed(global_batch=2**16), attempt=3), ALONE))
