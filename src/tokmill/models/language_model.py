"""A decoder and its head, alone: ids in, logits out, without a store, a recipe or a batch.

Its parameters have the names that they have in a run of the task `next_token` on a column `token`,
so the weights of one load into the other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tokmill.models.decoder import Decoder, DecoderConfig
from tokmill.models.heads import Heads
from tokmill.models.inputs import Inputs
from tokmill.models.layers import linear, linear_cross_entropy
from tokmill.models.model import Tensors

COLUMN = "token"


class LanguageModel(nn.Module):
    """A decoder over `vocab_size` ids; `tied`: its embedding is its head."""

    def __init__(self, config: DecoderConfig, vocab_size: int, tied: bool = True) -> None:
        super().__init__()
        self.model = Decoder(config, Inputs({COLUMN: vocab_size}))
        self.heads = Heads(self.model, {COLUMN: vocab_size}, tied)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, V) from integer ids (B, T); each row is one document."""
        return linear(self.hidden(ids), self.head_weight)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of int64 targets (B, T), -1 where there is none.

        It is `cross_entropy` of the logits, which are never there as a whole.
        """
        total = linear_cross_entropy(self.hidden(ids), self.head_weight, targets)
        return total / (targets >= 0).sum()

    def hidden(self, ids: Tensor) -> Tensor:
        """Return hidden states (B, T, D) from integer ids (B, T)."""
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        states: Tensor = self.model(
            Tensors({COLUMN: ids}, torch.zeros_like(ids), place, whole=True)
        )
        return states

    @property
    def head_weight(self) -> Tensor:
        """The head (V, D)."""
        return self.heads.weight(self.model, COLUMN)
