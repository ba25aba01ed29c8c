from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from storage.job import RankIdentity
from tests.trainer.distributed import run_distributed_test
from tests.trainer.test_model import build
from trainer.loss import IGNORED, partial_loss
from trainer.parallel.agree import any_rank, sum_over_ranks
from trainer.parallel.clip import scale_to_norm, sum_of_squares
from trainer.parallel.clock import CollectiveClock
from trainer.parallel.mesh import start_process_group
from trainer.parallel.parallelize import parallelize

CPU = torch.device("cpu")
BATCH, SEQUENCE = 8, 11


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Eight samples; the first ones have targets that do not count, so parts differ in size."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 100, (BATCH, SEQUENCE + 1)))
    targets = tokens[:, 1:].clone()
    targets[:3, 4:] = IGNORED
    return tokens[:, :-1], targets


def step(
    identity: RankIdentity, micro_batch: int, param_dtype: Any = "float32"
) -> Mapping[str, Any]:
    """Loss and gradient of `batch()`, spread over the ranks and cut into micro-batches."""
    mesh = start_process_group(identity, device=CPU, timeout_s=60)
    model, clock = build(), CollectiveClock()
    parallelize(model, mesh, param_dtype=param_dtype, clock=clock)
    inputs, targets = batch()
    valid = int((targets != IGNORED).sum())
    mine = slice(identity.rank, None, identity.world_size)
    loss = torch.zeros(())
    for tokens, wanted in zip(
        inputs[mine].split(micro_batch), targets[mine].split(micro_batch), strict=True
    ):
        logits = model(tokens)
        part = partial_loss(logits, wanted, valid_tokens=valid)
        part.backward()
        loss += part.detach()
    parameters = list(model.parameters())
    whole_loss, squares = sum_over_ranks(
        [loss, sum_of_squares(parameters)], device=CPU, clock=clock
    )
    scale_to_norm(parameters, norm=squares**0.5, max_norm=0.5)
    clipped = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        clipped[name] = parameter.grad.full_tensor().clone()
    return {
        "loss": whole_loss,
        "norm": squares**0.5,
        "clipped": clipped,
        "comm_s": clock.seconds,
        "dtype": logits.dtype,
    }


def alone() -> Mapping[str, Any]:
    """The same by one process, in one go, with torch's own mean and clipping."""
    model = build()
    inputs, targets = batch()
    loss = torch.nn.functional.cross_entropy(
        model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED
    )
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    clipped = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.item(), "norm": norm.item(), "clipped": clipped}


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 2), (2, 1), (4, 2)])
def test_ranks_and_micro_batches_change_neither_loss_nor_gradient_nor_its_norm(
    world_size: int, micro_batch: int
) -> None:
    expected = alone()
    assert expected["norm"] > 0.5, "clipping has to have something to do"
    for got in run_distributed_test(step, world_size, micro_batch):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert got["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        for name, gradient in expected["clipped"].items():
            torch.testing.assert_close(got["clipped"][name], gradient, rtol=1e-4, atol=1e-6)
        assert got["comm_s"] > 0


@pytest.mark.distributed
def test_bfloat16_computes_in_it_and_keeps_weights_and_gradients_in_float32() -> None:
    expected = alone()
    for got in run_distributed_test(step, 2, 4, "bfloat16"):
        assert got["dtype"] == torch.bfloat16
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-2)
        assert got["norm"] == pytest.approx(expected["norm"], rel=5e-2)


def mixed_norm(identity: RankIdentity) -> float:
    """The norm of a sharded, a replicated and a plain gradient of 10, 10 and 10 ones."""
    mesh = start_process_group(identity, device=CPU, timeout_s=60)
    sharded, replicated, plain = (torch.nn.Parameter(torch.zeros(10)) for _ in range(3))
    sharded = torch.nn.Parameter(distribute_tensor(sharded.data, mesh))
    replicated = torch.nn.Parameter(distribute_tensor(replicated.data, mesh, [Replicate()]))
    sharded.grad = distribute_tensor(torch.ones(10), mesh)
    replicated.grad = distribute_tensor(torch.ones(10), mesh, [Replicate()])
    plain.grad = torch.ones(10)
    share = sum_of_squares([sharded, replicated, plain])
    (squares,) = sum_over_ranks([share], device=CPU, clock=CollectiveClock())
    return squares


@pytest.mark.distributed
def test_sharded_replicated_and_plain_gradients_count_once_each() -> None:
    assert run_distributed_test(mixed_norm, 2) == [pytest.approx(30.0)] * 2


def flag_of_one(identity: RankIdentity) -> tuple[bool, bool]:
    start_process_group(identity, device=CPU, timeout_s=60)
    clock = CollectiveClock()
    raised = any_rank(identity.rank == 1, device=CPU, clock=clock)
    silent = any_rank(False, device=CPU, clock=clock)
    dist.destroy_process_group()
    return raised, silent


@pytest.mark.distributed
def test_a_flag_on_one_rank_is_known_to_all() -> None:
    assert run_distributed_test(flag_of_one, 2) == [(True, False)] * 2
