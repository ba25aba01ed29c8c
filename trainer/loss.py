"""The loss of a part of a batch, scaled so that the parts of a step simply add up.

Every part is divided by the valid tokens of the *whole* step. So neither the number of ranks nor
that of micro-batches changes loss or gradient, only the speed.
"""

from __future__ import annotations

import torch
from torch.nn import functional

IGNORED = -100
"""A target that is not scored."""


def partial_loss(logits: torch.Tensor, targets: torch.Tensor, *, valid_tokens: int) -> torch.Tensor:
    """This part's share of the step's mean cross-entropy, in float32.

    Args:
        logits: (batch, sequence, vocab), of any float type.
        targets: (batch, sequence), int64; `IGNORED` ones do not count.
        valid_tokens: scored tokens of the step, over all micro-batches and ranks.
    """
    summed = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return summed / valid_tokens
