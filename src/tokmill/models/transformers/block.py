"""A block of a Transformer, and the configuration that all Transformers share.

Names of tensors carry their shape: T positions, D width.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec
from torch import Tensor, nn

from tokmill.base.errors import UsageError
from tokmill.base.recipe import AboveZero, Amount, Natural, Part, Positive, check_types
from tokmill.models.model import Join, taken
from tokmill.models.transformers.attention import (
    Attend,
    Attention,
    RopeScaling,
    Rotation,
    causal_attention,
)
from tokmill.models.transformers.layers import Activation, FeedForward, RMSNorm

Sizes = Mapping[str, Mapping[str, int]]
"""Name of a size → the keys that it stands for."""


class TransformerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes and style of a Transformer; the defaults are Llama's style."""

    kind: str = ""
    """Which model this is."""
    dim: Positive = 128
    """Width D of the hidden states."""
    layers: Positive = 4
    """Number of blocks."""
    heads: Positive = 4
    """Number of query heads."""
    kv_heads: Natural = 0
    """Number of key and value heads, shared by groups of query heads; 0: as many as `heads`."""
    head_dim: Natural = 0
    """Width K of a head; 0: `dim` / `heads`."""
    hidden: Natural = 0
    """Width of the feed-forward branch; 0: 8/3 of `dim`, rounded up to a multiple of 32, with
    a gate, and 4 times `dim` without."""
    norm: Literal["rms", "layer"] = "rms"
    """Which norm: RMSNorm or LayerNorm."""
    position: Literal["rope", "learned"] = "rope"
    """rope: queries and keys are turned; learned: a table is added to the embedding."""
    context: Natural = 0
    """Positions of the learned table; a document may not be longer."""
    activation: Activation = "swiglu"
    """Activation of the feed-forward branch; swiglu has a gate; gelu is exact, gelu_tanh GPT-2's
    approximation of it."""
    bias: bool = False
    """Whether linear maps and LayerNorm add a bias."""
    rope_theta: AboveZero = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """How rotary frequencies are lowered, as in Llama 3.1; none: they are not."""
    norm_eps: Amount = 1e-5
    """Added to the mean square or variance in a norm."""
    dropout: Part = 0.0
    """Share of values dropped after the embedding and after each branch, while training."""
    attention_dropout: Part = 0.0
    """Share of attention's probabilities dropped while training; it is slower, and on a GPU rows of
    several documents are then computed with a mask."""
    join: Join = "sum"
    """How the embeddings of several columns become one vector: sum adds them; concat puts them end
    to end and applies a linear map."""
    field_dim: Natural = 0
    """Width of a column's embedding where join = "concat"; 0: `dim` / columns."""

    sizes: ClassVar[Sizes] = {}
    """What `size = NAME` in a recipe's table `[model]` stands for."""

    @property
    def feed_forward(self) -> int:
        """Width F of the feed-forward branch."""
        gated = self.activation == "swiglu"
        return self.hidden or (-(-8 * self.dim // 3 // 32) * 32 if gated else 4 * self.dim)

    @property
    def groups(self) -> int:
        """Number G of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width K of a head."""
        return self.head_dim or self.dim // self.heads

    def check(self) -> None:
        """Refuse sizes that do not fit together."""
        check_types(self, "model")
        if not self.head_dim and self.dim % self.heads:
            raise UsageError(
                f"{self.heads} heads do not divide a width of {self.dim}",
                where="model.heads",
                hint="choose dim = heads × a width, or set head_dim",
            )
        if self.position == "rope" and self.head_width % 2:
            raise UsageError(
                f"rotary positions turn pairs, and a head is {self.head_width} wide",
                where="model.head_dim" if self.head_dim else "model.heads",
                hint="choose dim = heads × an even number",
            )
        if self.heads % self.groups:
            raise UsageError(
                f"{self.heads} query heads cannot share {self.groups} key heads",
                where="model.kv_heads",
                hint="kv_heads must divide heads",
            )
        if self.rope_scaling is not None:
            self.rope_scaling.check()
        if self.position == "learned" and not self.context:
            raise UsageError(
                "a table of learned positions needs its size",
                where="model.context",
                hint="set it to task.length, which no document of a row exceeds",
            )


class Block(nn.Module):
    """Attention, then feed-forward; each adds to the stream.

    A branch reads a norm of the stream, as in Llama and GPT-2. With `post_norm` it reads the
    stream itself, and the sum is normed, as in Vaswani et al. 2017 and BERT.
    """

    def __init__(self, config: TransformerConfig, post_norm: bool = False) -> None:
        super().__init__()
        self.post_norm = post_norm
        self.attention_norm = make_norm(config)
        self.attention = Attention(
            config.dim,
            config.heads,
            config.groups,
            config.head_width,
            config.bias,
        )
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(
            config.dim, config.feed_forward, config.activation, config.bias
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        turn: Rotation | None = None,
        attend: Attend = causal_attention,
        places: Tensor | None = None,
    ) -> Tensor:
        """Return the stream (…, T, D) after both branches; `turn`, `attend`: see `Attention`.

        With `places` (B, M) it is the stream (B, M, D) at these positions; of the other positions
        only keys and values are computed.
        """
        read = x if self.post_norm else self.attention_norm(x)
        y = self.dropout(self.attention(read, turn, attend, places))
        x = (x if places is None else taken(x, places)) + y
        if self.post_norm:
            x = self.attention_norm(x)
            x = self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        else:
            x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x


def make_norm(config: TransformerConfig) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(config.dim, config.norm_eps)
    return nn.LayerNorm(config.dim, config.norm_eps, bias=config.bias)
