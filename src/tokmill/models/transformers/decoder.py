"""A causal Transformer, in the style of Llama or of GPT-2.

Llama's style: RMSNorm before each branch, rotary positions, SwiGLU, grouped queries, no bias.
GPT-2's style (Radford et al. 2019): LayerNorm, learned positions, GELU, biases.
"""

from __future__ import annotations

from typing import Literal

from tokmill.models.model import Cached
from tokmill.models.model_inputs import Inputs
from tokmill.models.transformers.block import TransformerConfig
from tokmill.models.transformers.decoding import Decoding
from tokmill.models.transformers.transformer import Transformer


class DecoderConfig(TransformerConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes and style of a decoder; the defaults are Llama's style."""

    kind: Literal["decoder"] = "decoder"
    """Which model this is."""


class Decoder(Transformer):
    """The whole backbone. Heads are the task's."""

    Config = DecoderConfig
    causal = True
    config: DecoderConfig

    def __init__(self, config: DecoderConfig, inputs: Inputs) -> None:
        super().__init__(config, inputs)

    @property
    def adding_scale(self) -> float:
        """1/sqrt(2 layers), as in GPT-2 (Radford et al. 2019, section 2.3)."""
        return float((2 * self.config.layers) ** -0.5)

    def cached(self) -> Cached:
        return Decoding(self)
