import pytest

from storage.errors import SpecError
from trainer.plan.arithmetic import ModelShape, run_sums
from trainer.spec import ModelSpec, TrainSpec

LLAMA_8B = ModelSpec(
    dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14_336, vocab=128_256, rope_theta=500_000
)


def test_a_model_whose_size_is_published_comes_out_the_same() -> None:
    shape = ModelShape.resolve(LLAMA_8B, tokenizer_vocab=128_256)
    assert shape.num_params == 8_030_261_248


def test_defaults_are_the_tokenizers_vocabulary_and_eight_thirds_of_dim_up_to_64s() -> None:
    shape = ModelShape.resolve(ModelSpec(dim=128, heads=4), tokenizer_vocab=257)
    assert (shape.vocab, shape.ffn_dim, shape.kv_heads) == (320, 384, 4)


def test_flops_leave_the_embedding_out_and_count_attention_by_the_sequence() -> None:
    shape = ModelShape.resolve(LLAMA_8B, tokenizer_vocab=128_256)
    dense = 6 * (8_030_261_248 - 128_256 * 4096)
    assert shape.flops_per_token(0) == dense
    assert shape.flops_per_token(8192) - dense == 6 * 32 * 32 * (128 + 128) * 8192


def test_a_vocabulary_below_the_tokenizers_is_refused_with_both_numbers() -> None:
    with pytest.raises(SpecError, match=r"train\.model\.vocab 100 .* 257; .* 320"):
        ModelShape.resolve(ModelSpec(vocab=100), tokenizer_vocab=257)


def test_sums_of_a_run() -> None:
    train = TrainSpec(steps=10, sequence=32, global_batch=16, micro_batch=2)
    sums = run_sums(train, tokenizer_vocab=257, world_size=4)
    assert (sums.tokens_per_step, sums.total_tokens) == (512, 5_120)
    assert sums.micro_batches_per_step == 2
    assert sums.checkpoint_bytes == 12 * sums.num_params
    assert sums.state_bytes_per_rank == 4 * sums.num_params
