"""The model's sizes and the run's sums, so that `headrace plan` answers before torch is loaded.

The trainer builds its model from the same `ModelShape`, so plan and model cannot drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.errors import SpecError
from trainer.spec import ModelSpec, TrainSpec

ALIGNMENT = 64
"""Matrix widths that are multiples of this run fast on every accelerator."""

BYTES_PER_FLOAT32 = 4


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder with every default filled in."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab: int

    @classmethod
    def resolve(cls, model: ModelSpec, *, tokenizer_vocab: int) -> ModelShape:
        """Fills in what the spec leaves open.

        Raises:
            SpecError: the model's vocabulary cannot hold the tokenizer's.
        """
        if model.vocab is not None and model.vocab < tokenizer_vocab:
            raise SpecError(
                f"train.model.vocab {model.vocab} must be at least the tokenizer's "
                f"{tokenizer_vocab}; raise it, or leave it out for "
                f"{_round_up(tokenizer_vocab, ALIGNMENT)}"
            )
        return cls(
            dim=model.dim,
            layers=model.layers,
            heads=model.heads,
            kv_heads=model.kv_heads or model.heads,
            ffn_dim=model.ffn_dim or _round_up(-(-8 * model.dim // 3), ALIGNMENT),
            vocab=model.vocab or _round_up(tokenizer_vocab, ALIGNMENT),
        )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def num_embedding_params(self) -> int:
        """Parameters that are looked up, not multiplied: no FLOPs are spent on them."""
        return self.vocab * self.dim

    @property
    def num_params(self) -> int:
        attention = 2 * self.dim * self.head_dim * (self.heads + self.kv_heads)
        feed_forward = 3 * self.dim * self.ffn_dim
        norms = 2 * self.dim
        head = self.dim + self.dim * self.vocab
        return self.num_embedding_params + self.layers * (attention + feed_forward + norms) + head

    def flops_per_token(self, sequence: int) -> int:
        """Forward and backward: 6·(P − P_emb) + 6·L·H·(d_qk + d_v)·s (PaLM, appendix B)."""
        dense = 6 * (self.num_params - self.num_embedding_params)
        return dense + 6 * self.layers * self.heads * 2 * self.head_dim * sequence


@dataclass(frozen=True, kw_only=True)
class RunSums:
    """What a whole run on `world_size` ranks amounts to."""

    world_size: int
    num_params: int
    flops_per_token: int
    tokens_per_step: int
    total_tokens: int
    micro_batches_per_step: int
    padding: float
    checkpoint_bytes: int
    state_bytes_per_rank: int


def run_sums(train: TrainSpec, *, tokenizer_vocab: int, world_size: int) -> RunSums:
    """Sums up the run on `world_size` ranks.

    A checkpoint holds the fp32 weight and Adam's two fp32 moments: 4 + 4 + 4 = 12 bytes a
    parameter. In memory an fp32 gradient comes on top: 16 bytes a parameter, spread over the ranks.

    Raises:
        SpecError: the vocabulary is too small.
        ValueError: the batch has fewer sequences than there are ranks.
    """
    shape = ModelShape.resolve(train.model, tokenizer_vocab=tokenizer_vocab)
    tokens_per_step = train.global_batch * train.sequence
    return RunSums(
        world_size=world_size,
        num_params=shape.num_params,
        flops_per_token=shape.flops_per_token(train.sequence),
        tokens_per_step=tokens_per_step,
        total_tokens=tokens_per_step * train.steps,
        micro_batches_per_step=train.accumulation(world_size),
        padding=train.padding(world_size),
        checkpoint_bytes=3 * BYTES_PER_FLOAT32 * shape.num_params,
        state_bytes_per_rank=-(-4 * BYTES_PER_FLOAT32 * shape.num_params // world_size),
    )
