"""An encoder in DistilBERT's style over tokens of an operation; `[CLS]` is its vector.

The keys of the configuration are those of MLIR-RL's DistilBERT. Its sizes are
hidden_size 768, 12 heads, 6 layers; the defaults here train on a CPU. A mask marks the padding, so
no id is reserved for it, and the vector of `[CLS]` is trained like those of other tokens.
"""

from typing import Literal

import torch
from torch import Tensor

from tokmill.mlir.tokens.views import Spaces, Wanted
from tokmill.models.model import Inputs, Tensors
from tokmill.models.transformers.transformer import Encoder, EncoderConfig
from tokmill.rl.embedding.embeddings import (
    EmbeddingConfig,
    Encoded,
    Observation,
    draw_blocks,
)

COLUMNS = {"ids": "token", "segments": "segment", "depths": "depth"}
"""Array of an observation → column of a store of such sequences."""
POSITIONS = 512
"""Positions of the learned table, unless a sequence needs more."""


class DistilBertConfig(EmbeddingConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of the encoder, and the tokens that it reads."""

    tokens: Literal["fields", "buckets"] = "fields"
    """fields: a token for each field of an operation; buckets: one for each number, as
    MLIR-RL's DistilBERT has it."""
    hidden_size: int = 128
    """Width of the hidden states."""
    num_attention_heads: int = 4
    """Heads of each layer."""
    num_hidden_layers: int = 2
    """Layers."""
    intermediate_size: int = 0
    """Width of the feed-forward branch; 0: 2 times hidden_size up to 128, else 4 times."""
    max_seq_length: int = 0
    """Positions of a sequence; 0: as many as the modules need."""
    vocab_size: int = 0
    """Ids of `buckets`; 0: as many as there are."""
    dropout: float = 0.0
    """Share of values dropped while training, of which the task schedules drops none. The original
    has 0.1; PPO compares a policy with itself, and what is dropped makes it differ."""
    truncate: bool = False
    """Whether a sequence may be cut to max_seq_length."""
    seed_compatible: bool = False
    """Whether ids of `buckets` repeat after 100 numbers, as MLIR-RL's do."""

    def view(self) -> Wanted:
        return Wanted(
            kind=self.tokens,
            max_seq_length=self.max_seq_length,
            vocab_size=self.vocab_size,
            truncate=self.truncate,
            seed_compatible=self.seed_compatible,
        )

    def unused(self) -> dict[str, str]:
        keys = super().unused()
        if self.tokens == "fields":
            if self.vocab_size:
                keys["vocab_size"] = (
                    'tokens of fields have ids of their own; tokens = "buckets" reads it'
                )
            if self.seed_compatible:
                keys["seed_compatible"] = 'tokens = "buckets" reads it'
        elif self.truncate and not self.max_seq_length:
            keys["truncate"] = "max_seq_length is not set, so nothing is cut"
        return keys

    def encoder(self, length: int) -> EncoderConfig:
        wide = self.intermediate_size or self.hidden_size * (2 if self.hidden_size <= 128 else 4)
        return EncoderConfig(
            dim=self.hidden_size,
            layers=self.num_hidden_layers,
            heads=self.num_attention_heads,
            hidden=wide,
            context=max(length, POSITIONS),
            dropout=self.dropout,
        )


class DistilBert(Encoded):
    """The project's encoder; its state at `[CLS]`, and the history beside it."""

    Config = DistilBertConfig

    def __init__(self, config: DistilBertConfig, spaces: Spaces) -> None:
        super().__init__(config)
        self.reads = {array: column for array, column in COLUMNS.items() if array in spaces}
        sizes = {column: int(spaces[array].high.max()) + 1 for array, column in self.reads.items()}
        length = spaces["ids"].shape[0]
        self.encoder = Encoder(config.encoder(length), Inputs(ids=sizes))
        draw_blocks(self.encoder.blocks)
        self.output_size = config.hidden_size + spaces["history"].shape[0]

    def tensors(self, observation: Observation) -> Tensors:
        """Return what the encoder reads, without the padding that all rows have."""
        columns = {column: observation[array].long() for array, column in self.reads.items()}
        return padded(columns, observation["mask"].long())


def padded(columns: dict[str, Tensor], mask: Tensor) -> Tensors:
    """Return columns (B, T, …) as a model reads them; `mask` (B, T): 1 for tokens, 0 behind."""
    keep = int(mask.sum(dim=1).max())
    mask = mask[:, :keep]
    return Tensors(
        columns={name: column[:, :keep] for name, column in columns.items()},
        document=mask - 1,
        position=torch.arange(keep, device=mask.device).expand_as(mask),
        whole=bool(mask.all()),
    )
