"""The built-in model: a Llama-style decoder, plain enough that a block is one FSDP unit.

It may be built on the meta device: nothing here reads a parameter's value. `trainer.weights` fills
the parameters, and `reset_rope` the one buffer that is computed.
"""

from __future__ import annotations

import hashlib
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from trainer.plan.arithmetic import ModelShape


class Decoder(nn.Module):
    """RMSNorm, RoPE, GQA, SwiGLU: ids (batch, sequence) to logits (batch, sequence, vocab)."""

    rope: torch.Tensor

    def __init__(
        self, shape: ModelShape, *, sequence: int, rope_theta: float, norm_eps: float
    ) -> None:
        super().__init__()
        self.shape = shape
        self.sequence = sequence
        self.rope_theta = rope_theta
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape, norm_eps=norm_eps) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=norm_eps)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        self.register_buffer("rope", self._angles(self.embedding.weight.device), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        rope = self.rope[:, : tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, rope)
        return cast("torch.Tensor", self.head(self.norm(hidden)))

    def reset_rope(self) -> None:
        """Computes the buffer anew, as has to be done after `to_empty`."""
        self.rope.copy_(self._angles(self.rope.device))

    def _angles(self, device: torch.device) -> torch.Tensor:
        """Cosines and sines (2, sequence, head_dim / 2) of the rotary embedding (RoFormer)."""
        half = self.shape.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float64, device=device) / half
        positions = torch.arange(self.sequence, dtype=torch.float64, device=device)
        angles = positions[:, None] * self.rope_theta**-exponents
        return torch.stack([angles.cos(), angles.sin()]).float()


class Block(nn.Module):
    """Attention, then the feed-forward layer, each on the normed residual stream."""

    def __init__(self, shape: ModelShape, *, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=norm_eps)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.dim, eps=norm_eps)
        self.feed_forward = FeedForward(shape)

    def forward(self, hidden: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rope)
        return cast("torch.Tensor", hidden + self.feed_forward(self.feed_forward_norm(hidden)))


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.query = nn.Linear(shape.dim, self.heads * self.head_dim, bias=False)
        self.key = nn.Linear(shape.dim, self.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(shape.dim, self.kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(self.heads * self.head_dim, shape.dim, bias=False)

    def forward(self, hidden: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = hidden.shape
        by_head = (batch, sequence, -1, self.head_dim)
        query = rotate(self.query(hidden).view(by_head).transpose(1, 2), rope)
        key = rotate(self.key(hidden).view(by_head).transpose(1, 2), rope)
        value = self.value(hidden).view(by_head).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.kv_heads < self.heads
        )
        return cast("torch.Tensor", self.output(mixed.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gated = functional.silu(self.gate(hidden)) * self.up(hidden)
        return cast("torch.Tensor", self.down(gated))


def rotate(heads: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Turns each pair (i, i + head_dim / 2) of (…, sequence, head_dim) by its position's angle.

    Done in float32 whatever the parameters' type: bfloat16 angles blur distant positions.
    """
    cosine, sine = rope[0], rope[1]
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(heads.dtype)


def model_hash(model: nn.Module) -> str:
    """A digest of every parameter's name, global shape and type: what a checkpoint has to fit."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    return digest.hexdigest()[:32]
