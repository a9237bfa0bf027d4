"""A bidirectional Transformer (Devlin et al. 2018, BERT; Sanh et al. 2019, DistilBERT).

The defaults are BERT's style: learned positions, LayerNorm after the embeddings and after each
branch, GELU, biases. BERT's segment is a column that its task makes, `segment` with two ids, whose
embedding is added to the others; DistilBERT has none. Heads and poolers are the task's (`heads`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from tokmill.models.model import Inputs
from tokmill.models.transformers.block import Sizes, TransformerConfig
from tokmill.models.transformers.layers import Activation
from tokmill.models.transformers.transformer import Transformer


class EncoderConfig(TransformerConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes and style of an encoder; the defaults are BERT's style."""

    kind: Literal["encoder"] = "encoder"
    """Which model this is."""
    norm: Literal["rms", "layer"] = "layer"
    """Which norm: RMSNorm or LayerNorm."""
    norm_place: Literal["post", "pre"] = "post"
    """post: the sum of a branch and its input is normed, as in BERT; pre: the input of a branch is
    normed, and the last output, which allows higher learning rates."""
    embedding_norm: bool = True
    """Whether the sum of the embeddings is normed before the first block."""
    position: Literal["rope", "learned"] = "learned"
    """rope: queries and keys are turned; learned: a table is added to the embedding."""
    context: int = 512
    """Positions of the learned table; a document may not be longer."""
    activation: Activation = "gelu"
    """Activation of the feed-forward branch; swiglu has a gate; gelu is exact, gelu_tanh GPT-2's
    approximation of it."""
    bias: bool = True
    """Whether linear maps and LayerNorm add a bias."""
    norm_eps: float = 1e-12
    """Added to the mean square or variance in a norm."""

    sizes: ClassVar[Sizes] = {
        "tiny": {"dim": 128, "layers": 2, "heads": 2, "hidden": 256},
        "mini": {"dim": 256, "layers": 4, "heads": 4, "hidden": 1024},
        "small": {"dim": 512, "layers": 4, "heads": 8, "hidden": 2048},
        "medium": {"dim": 512, "layers": 8, "heads": 8, "hidden": 2048},
        "base": {"dim": 768, "layers": 12, "heads": 12, "hidden": 3072},
        "large": {"dim": 1024, "layers": 24, "heads": 16, "hidden": 4096},
        "distilbert": {"dim": 768, "layers": 6, "heads": 12, "hidden": 3072},
    }
    """Sizes of published models, except that the published tiny has a feed-forward width of 512."""


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
