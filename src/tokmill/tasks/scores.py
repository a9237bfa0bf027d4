"""The score of each predicted token, for the tables of an evaluation.

Shapes: B rows, T positions, N positions of a chunk, D width of the model, V ids of a column.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokmill.models.transformers.layers import (
    chunk_rows,
    product,
    product_dtype,
)


class Scores(NamedTuple):
    """Scores of one column at each position; 0 and False without a target."""

    loss: Tensor
    """(B, T) float32 or wider: -log p(target), in nats."""
    right: Tensor
    """(B, T) bool: whether the target was the likeliest id."""


def token_scores(
    hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, bias_V: Tensor | None = None
) -> Scores:
    """Return the scores of the logits hidden · weightᵀ + bias, without a gradient.

    `targets_BT`: int64, -1 for no target. As in `linear_cross_entropy`, only a chunk of the logits
    is in memory at a time, and products have autocast's type if it is on.
    """
    dtype = product_dtype(hidden_BTD)
    hidden, targets = hidden_BTD.flatten(0, -2).to(dtype), targets_BT.flatten()
    weight_DV = weight_VD.to(dtype).t()
    wide = torch.promote_types(hidden_BTD.dtype, torch.float32)
    loss = torch.zeros(len(targets), dtype=wide, device=targets.device)
    right = torch.zeros(len(targets), dtype=torch.bool, device=targets.device)
    rows = chunk_rows(hidden, len(weight_VD))
    for start in range(0, len(targets), rows):
        part = slice(start, start + rows)
        logits_NV = product(hidden[part], weight_DV).to(wide)
        if bias_V is not None:
            logits_NV += bias_V
        target_N = targets[part].clamp(min=0)
        logit_N = logits_NV.gather(1, target_N[:, None])[:, 0]
        loss[part] = logits_NV.logsumexp(-1) - logit_N
        right[part] = logits_NV.argmax(-1) == target_N
    valid = targets >= 0
    return Scores(
        torch.where(valid, loss, 0).view(targets_BT.shape), (right & valid).view(targets_BT.shape)
    )
