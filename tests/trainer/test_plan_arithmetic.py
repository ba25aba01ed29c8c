import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    assert sums.padding == 0


def test_ranks_that_cannot_share_a_batch_evenly_pass_as_often_as_the_fullest_and_pad() -> None:
    """16 sequences on 3 ranks: 6, 5 and 5, so two ranks take one more; each passes 4, then 2."""
    train = TrainSpec(global_batch=16, micro_batch=4)
    sums = run_sums(train, tokenizer_vocab=257, world_size=3)
    assert sums.micro_batches_per_step == 2
    assert sums.padding == pytest.approx(2 / 18)


@given(batch=st.integers(1, 400), ranks=st.integers(1, 60), micro_batch=st.integers(1, 50))
def test_every_batch_that_has_a_sequence_for_each_rank_can_be_accumulated(
    batch: int, ranks: int, micro_batch: int
) -> None:
    train = TrainSpec(global_batch=batch, micro_batch=micro_batch)
    if batch < ranks:
        with pytest.raises(ValueError, match=f"global_batch {batch} must be at least the {ranks}"):
            train.accumulation(ranks)
        return
    passes, share = train.accumulation(ranks), train.largest_share(ranks)
    assert (passes - 1) * micro_batch < share <= passes * micro_batch
    assert share * ranks >= batch > (share - 1) * ranks
    assert 0 <= train.padding(ranks) < 0.5
