"""Which sample comes when: a function of one integer, and a proof of what was consumed.

The training state is the number of samples that the whole world has consumed. Everything else
follows from it, so the order depends on no rank count, no worker and no earlier attempt. Pure: no
client, no clock, no path, and O(1) memory whatever the size of the data set.
"""

from __future__ import annotations

import hashlib
import re

_ROUNDS = 6
_MASK = 2**64 - 1
_STATE = re.compile(r"(?P<digest>(?:[0-9a-f]{32})?):(?P<start>\d+)-(?P<end>\d+)")


def sample_index(position: int, *, num_samples: int, seed: int) -> int:
    """The sample at a global position: each run of `num_samples` positions is one epoch.

    Within an epoch every sample comes once, in an order keyed by seed and epoch: a Feistel network
    over the next power of four, walked until it lands inside (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002). Fewer than four rounds of walking are needed on average.
    """
    if position < 0 or num_samples < 1:
        raise ValueError(
            f"position {position} must be at least 0 and num_samples {num_samples} at least 1"
        )
    epoch, value = divmod(position, num_samples)
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    key = _mix(_mix(seed & _MASK) ^ (epoch & _MASK))
    while True:
        value = _feistel(value, half_bits=half_bits, key=key)
        if value < num_samples:
            return value


def rank_positions(start: int, count: int, *, rank: int, world_size: int) -> range:
    """The positions of `start … start + count` that a rank takes: ranks stride over them.

    Where they cannot share them evenly, the first ones take one more than the others.

    Raises:
        ValueError: there are not enough positions for each rank to take one, or no such rank.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} must be in 0 … {world_size - 1}")
    if start < 0 or count < world_size:
        raise ValueError(
            f"start {start} must be at least 0, and count {count} at least the world size "
            f"{world_size}"
        )
    return range(start + rank, start + count, world_size)


def extend_hash(previous: str, *, start: int, count: int) -> str:
    """The running hash after the positions `start … start + count` were consumed as well.

    The hash is `<digest>:<start>-<end>`: the range consumed last, its end excluded, and a digest
    chained over the ranges before it. A range that begins where the last one ended is joined to it,
    so the hash depends on the sequence of positions alone, not on how they were cut into steps.
    A run that consumed each of the first n positions once, in order, has the hash `:0-<n>`; any gap
    or repetition leaves a digest for ever. `""` is the hash of nothing consumed.

    Raises:
        ValueError: `previous` is no such hash, or the range is negative.
    """
    if start < 0 or count < 0:
        raise ValueError(f"start {start} and count {count} must not be negative")
    if not previous:
        return f":{start}-{start + count}" if count else ""
    state = _STATE.fullmatch(previous)
    if state is None:
        raise ValueError(f"{previous!r} is not a hash of consumed ranges")
    if count == 0:
        return previous
    if int(state["end"]) == start:
        return f"{state['digest']}:{state['start']}-{start + count}"
    digest = hashlib.blake2b(previous.encode(), digest_size=16).hexdigest()
    return f"{digest}:{start}-{start + count}"


def _feistel(value: int, *, half_bits: int, key: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_number in range(_ROUNDS):
        left, right = right, left ^ (_mix(key ^ (round_number << 56) ^ right) & mask)
    return (left << half_bits) | right


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
