import math

import pytest
import torch
from torch.nn import functional

from trainer.model import Decoder, model_hash, rotate
from trainer.plan.arithmetic import ModelShape
from trainer.spec import ModelSpec
from trainer.weights import initialise

TINY = ModelSpec(dim=16, layers=2, heads=4, kv_heads=2)


def build(spec: ModelSpec = TINY, *, seed: int = 0) -> Decoder:
    shape = ModelShape.resolve(spec, tokenizer_vocab=100)
    with torch.device("meta"):
        model = Decoder(shape, sequence=12, rope_theta=10_000.0, norm_eps=1e-5)
    model.to_empty(device="cpu")
    initialise(model, seed=seed)
    return model


@pytest.mark.parametrize("kv_heads", [1, 2, 4, None])
def test_has_as_many_parameters_as_the_plan_says(kv_heads: int | None) -> None:
    model = build(TINY.model_copy(update={"kv_heads": kv_heads}))
    assert sum(p.numel() for p in model.parameters()) == model.shape.num_params


def test_a_token_sees_none_that_come_after_it() -> None:
    model = build()
    tokens = torch.randint(0, 100, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 100
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_rotation_makes_attention_depend_on_distance_alone() -> None:
    rope = build().rope
    query, key = torch.randn(4), torch.randn(4)
    queries, keys = (rotate(vector.expand(12, 4), rope) for vector in (query, key))
    scores = queries @ keys.T
    for distance in range(1, 11):
        torch.testing.assert_close(
            scores.diagonal(distance), scores[0, distance].expand(12 - distance)
        )
    torch.testing.assert_close(scores.diagonal(), (query @ key).expand(12))


def test_grouped_heads_equal_full_heads_with_keys_and_values_repeated() -> None:
    grouped = build()
    full = build(TINY.model_copy(update={"kv_heads": 4}))
    weights = grouped.state_dict()
    for name in list(weights):
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            weights[name] = weights[name].view(2, 4, 16).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    tokens = torch.randint(0, 100, (2, 12))
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_an_untrained_model_is_as_unsure_as_can_be() -> None:
    model = build()
    tokens = torch.randint(0, 100, (4, 12))
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(math.log(model.shape.vocab), rel=0.02)


def test_the_seed_decides_the_weights() -> None:
    first, again, other = (build(seed=seed).head.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_hash_tells_shapes_apart_and_not_values() -> None:
    assert model_hash(build(seed=1)) == model_hash(build(seed=2))
    assert model_hash(build()) != model_hash(build(TINY.model_copy(update={"kv_heads": 4})))
