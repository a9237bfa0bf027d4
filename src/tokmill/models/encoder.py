"""A Transformer that looks both ways (Devlin et al. 2018, BERT; Sanh et al. 2019, DistilBERT).

The defaults are BERT's style: learned positions, LayerNorm after the embeddings and after each
branch, GELU, biases. BERT's segment is a column that its task makes, `segment` with two ids, whose
embedding is added to the others; DistilBERT has none. Heads and poolers are the task's (`heads`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tokmill.models.block import TransformerConfig
from tokmill.models.inputs import Inputs
from tokmill.models.layers import Activation
from tokmill.models.transformer import Transformer


class EncoderConfig(TransformerConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes and style of an encoder; the defaults are BERT's style."""

    kind: Literal["encoder"] = "encoder"
    """Which model this is."""
    norm: Literal["rms", "layer"] = "layer"
    """Which norm: RMSNorm or LayerNorm."""
    norm_place: Literal["post", "pre"] = "post"
    """post: of the sum of a branch and what it read, as in BERT; pre: of what a branch reads, and
    at the end, which trains at higher learning rates."""
    embedding_norm: bool = True
    """Whether the sum of the embeddings is normed, in front of the first block."""
    position: Literal["rope", "learned"] = "learned"
    """rope: queries and keys are turned; learned: a table is added to the embedding."""
    context: int = 512
    """Positions of the learned table; a document may not be longer."""
    activation: Activation = "gelu"
    """Of the feed-forward branch; gelu is exact, gelu_tanh GPT-2's approximation of it."""
    bias: bool = True
    """Whether linear maps and LayerNorm add a bias."""
    norm_eps: float = 1e-12
    """Added to the mean square or variance in a norm."""


def bert(dim: int, layers: int, heads: int) -> EncoderConfig:
    """Return the configuration of a BERT, with its dropout of 0.1 on hidden states."""
    return EncoderConfig(dim=dim, layers=layers, heads=heads, hidden=4 * dim, dropout=0.1)


PRESETS: Mapping[str, EncoderConfig] = {
    "bert-tiny": bert(128, 2, 2),
    "bert-mini": bert(256, 4, 4),
    "bert-small": bert(512, 4, 8),
    "bert-medium": bert(512, 8, 8),
    "bert-base": bert(768, 12, 12),
    "bert-large": bert(1024, 24, 16),
    "distilbert-base": bert(768, 6, 12),
}
"""Name of a published model → its shape. A BERT reads a column `segment`, a DistilBERT does not."""


class Encoder(Transformer):
    """The whole backbone. Heads are the task's."""

    Config = EncoderConfig
    causal = False
    config: EncoderConfig

    def __init__(self, config: EncoderConfig, inputs: Inputs) -> None:
        super().__init__(
            config,
            inputs,
            post_norm=config.norm_place == "post",
            embedding_norm=config.embedding_norm,
        )
