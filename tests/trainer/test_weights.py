import pytest
import torch
from torch.distributed.tensor import DTensor

from storage.job import RankIdentity
from tests.trainer.distributed import run_distributed_test
from tests.trainer.test_model import TINY, build
from trainer.model import Decoder
from trainer.parallel.mesh import start_process_group
from trainer.parallel.parallelize import parallelize
from trainer.plan.arithmetic import ModelShape
from trainer.weights import initialise


def whole_weights(identity: RankIdentity) -> dict[str, torch.Tensor]:
    mesh = start_process_group(identity, device=torch.device("cpu"), timeout_s=60)
    shape = ModelShape.resolve(TINY, tokenizer_vocab=100)
    with torch.device("meta"):
        model = Decoder(shape, sequence=12, rope_theta=10_000.0, norm_eps=1e-5)
    parallelize(model, mesh, param_dtype="float32", clock=None)
    model.to_empty(device="cpu")
    initialise(model, seed=3)
    whole = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole[name] = parameter.full_tensor().detach().clone()
    return whole


@pytest.mark.distributed
def test_three_ranks_begin_with_the_weights_of_one() -> None:
    """Three divides neither the vocabulary nor the heads, so shards are uneven, some empty."""
    alone = build(seed=3).state_dict()
    for whole in run_distributed_test(whole_weights, 3):
        assert whole.keys() == alone.keys()
        for name, weight in whole.items():
            assert torch.equal(weight, alone[name]), name
