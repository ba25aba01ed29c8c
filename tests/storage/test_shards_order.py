"""Which sample comes when, and the proof of what was consumed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.shards.order import extend_hash, rank_positions, sample_index

seeds = st.integers(min_value=0, max_value=2**64)
ORDER = [9, 5, 7, 1, 6, 4, 8, 3, 2, 0, 0, 4, 9, 7, 1, 8, 3, 5, 6, 2]


@given(num_samples=st.integers(1, 600), epoch=st.integers(0, 2**40), seed=seeds)
def test_an_epoch_holds_every_sample_once(num_samples: int, epoch: int, seed: int) -> None:
    start = epoch * num_samples
    seen = [
        sample_index(position, num_samples=num_samples, seed=seed)
        for position in range(start, start + num_samples)
    ]
    assert sorted(seen) == list(range(num_samples))


@given(num_samples=st.integers(1, 2**50), position=st.integers(0, 2**62), seed=seeds)
def test_any_position_of_a_huge_data_set_has_a_sample(
    num_samples: int, position: int, seed: int
) -> None:
    assert 0 <= sample_index(position, num_samples=num_samples, seed=seed) < num_samples


@given(epoch=st.integers(0, 1000), seed=seeds)
def test_epochs_and_seeds_differ_and_none_is_in_order(epoch: int, seed: int) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        start = epoch * 64
        return [sample_index(start + k, num_samples=64, seed=seed) for k in range(64)]

    here = order(seed, epoch)
    assert here != order(seed, epoch + 1)
    assert here != order(seed + 1, epoch)
    assert here != list(range(64))


def test_the_first_sample_of_an_epoch_may_be_any() -> None:
    counts = [0] * 10
    for epoch in range(2000):
        counts[sample_index(epoch * 10, num_samples=10, seed=7)] += 1
    # 200 expected each, with a standard deviation of 13.
    assert min(counts) > 130
    assert max(counts) < 270


def test_the_order_is_a_promise_to_old_checkpoints() -> None:
    order = [sample_index(position, num_samples=10, seed=0) for position in range(20)]
    assert order == ORDER


@given(start=st.integers(0, 10**9), more=st.integers(0, 500), world_size=st.integers(1, 20))
def test_ranks_share_the_positions_without_gap_or_overlap(
    start: int, more: int, world_size: int
) -> None:
    """And as evenly as can be, the first ones having more where that is not even."""
    count = world_size + more
    shares = [
        rank_positions(start, count, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    least, extra = divmod(count, world_size)
    assert [len(share) for share in shares] == [
        least + (rank < extra) for rank in range(world_size)
    ]
    assert sorted(p for share in shares for p in share) == list(range(start, start + count))


@pytest.mark.parametrize(
    ("count", "rank", "world_size"), [(1, 0, 2), (0, 0, 2), (4, 2, 2), (4, -1, 2), (-2, 0, 2)]
)
def test_positions_that_ranks_cannot_share_are_refused(
    count: int, rank: int, world_size: int
) -> None:
    with pytest.raises(ValueError, match=r"world size|must be in"):
        rank_positions(0, count, rank=rank, world_size=world_size)


def consumed(positions: list[int], cuts: set[int]) -> str:
    """The hash after consuming the positions, in the steps that the cuts make of them."""
    state, begin = "", 0
    for end in range(1, len(positions) + 1):
        is_gap = end < len(positions) and positions[end] != positions[end - 1] + 1
        if is_gap or end in cuts or end == len(positions):
            state = extend_hash(state, start=positions[begin], count=end - begin)
            begin = end
    return state


ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=6)
cut_sets = st.sets(st.integers(1, 60))


def positions_of(parts: list[tuple[int, int]]) -> list[int]:
    return [position for start, count in parts for position in range(start, start + count)]


@given(parts=ranges, some=cut_sets, others=cut_sets)
def test_the_hash_does_not_depend_on_the_steps(
    parts: list[tuple[int, int]], some: set[int], others: set[int]
) -> None:
    positions = positions_of(parts)
    assert consumed(positions, some) == consumed(positions, others)


@given(first=ranges, second=ranges, cuts=cut_sets)
def test_another_sequence_of_positions_has_another_hash(
    first: list[tuple[int, int]], second: list[tuple[int, int]], cuts: set[int]
) -> None:
    one, other = positions_of(first), positions_of(second)
    assert (consumed(one, cuts) == consumed(other, cuts)) == (one == other)


def test_a_run_without_gap_or_repetition_says_so() -> None:
    state = ""
    for step in range(10):
        state = extend_hash(state, start=step * 64, count=64)
    assert state == ":0-640"
    assert extend_hash(state, start=641, count=1) != ":0-642"
    assert extend_hash(state, start=640, count=0) == state
    assert extend_hash("", start=0, count=0) == ""


@pytest.mark.parametrize("previous", ["x", "0-3", ":3", "abc:0-3", ":0-3 "])
def test_what_is_no_hash_is_refused(previous: str) -> None:
    with pytest.raises(ValueError, match="is not a hash of consumed ranges"):
        extend_hash(previous, start=0, count=1)
