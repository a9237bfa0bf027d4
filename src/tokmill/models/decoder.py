"""A causal Transformer, in the style of Llama or of GPT-2.

Names of tensors carry their shape: B rows, T positions, D width, K width of a head.

Llama's style: RMSNorm before each branch, rotary positions, SwiGLU, grouped queries, no bias.
GPT-2's style (Radford et al. 2019): LayerNorm, learned positions, GELU, biases. The rows of weights
are in the order of the public checkpoints, so that these map name by name:

    fields.embeddings.column_NAME.weight  positions.weight (learned)  norm.weight .bias
    blocks.N.attention_norm.weight .bias      blocks.N.attention.{q,k,v,o}.weight .bias
    blocks.N.feed_forward_norm.weight .bias   blocks.N.feed_forward.{gate,up,down}.weight .bias
"""

from __future__ import annotations

from typing import Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokmill.errors import UsageError
from tokmill.models.attention import (
    Attend,
    Attention,
    RopeScaling,
    Rotation,
    causal_attention,
    document_attention,
    rotary,
)
from tokmill.models.fields import Fields, Join
from tokmill.models.inputs import Inputs
from tokmill.models.layers import Activation, FeedForward, RMSNorm, product_dtype
from tokmill.models.model import Cached, Model, Tensors


class DecoderConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes and style of a decoder; the defaults are Llama's style."""

    kind: Literal["decoder"] = "decoder"
    """Which model this is."""
    dim: int = 128
    """Width D of the hidden states."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 0
    """Key and value heads, shared by groups of query heads; 0: as many as `heads`."""
    head_dim: int = 0
    """Width K of a head; 0: `dim` / `heads`."""
    hidden: int = 0
    """Width of the feed-forward branch; 0: 8/3 of `dim`, rounded up to a multiple of 32, with
    swiglu, and 4 times `dim` without."""
    norm: Literal["rms", "layer"] = "rms"
    """Before each branch and at the end: RMSNorm or LayerNorm."""
    position: Literal["rope", "learned"] = "rope"
    """rope: queries and keys are turned; learned: a table is added to the embedding."""
    context: int = 0
    """Positions of the learned table; a document may not be longer."""
    activation: Activation = "swiglu"
    """Of the feed-forward branch; gelu is exact, gelu_tanh GPT-2's approximation of it."""
    bias: bool = False
    """Whether linear maps and LayerNorm add a bias."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """How rotary frequencies are lowered, as in Llama 3.1; none: they are not."""
    norm_eps: float = 1e-5
    """Added to the mean square or variance in a norm."""
    dropout: float = 0.0
    """Share of values dropped after the embedding and after each branch, while training."""
    join: Join = "sum"
    """How the embeddings of several columns become one vector: their sum, or end to end and a
    linear map."""
    field_dim: int = 0
    """Width of a column's embedding where join = "concat"; 0: `dim` / columns."""

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
        if min(self.dim, self.layers, self.heads) < 1:
            raise UsageError(
                "dim, layers and heads must be at least 1",
                where="model",
                hint="--set model.layers=4, for example",
            )
        if min(self.kv_heads, self.head_dim, self.hidden, self.context, self.field_dim) < 0:
            raise UsageError(
                "a size cannot be negative", where="model", hint="0 means the default of this key"
            )
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
    """Attention, then feed-forward; each reads a norm of the stream and adds to the stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(
            config.dim, config.heads, config.groups, config.head_width, config.bias
        )
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(
            config.dim, config.feed_forward, config.activation, config.bias
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, turn: Rotation | None = None, attend: Attend = causal_attention
    ) -> Tensor:
        """Return the stream (…, T, D) after both branches; `turn`, `attend`: see `Attention`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), turn, attend))
        y: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return y


def make_norm(config: DecoderConfig) -> nn.Module:
    """Return a new norm over the width."""
    if config.norm == "rms":
        return RMSNorm(config.dim, config.norm_eps)
    return nn.LayerNorm(config.dim, config.norm_eps, bias=config.bias)


class Decoder(Model):
    """The whole backbone. Heads are the task's."""

    Config = DecoderConfig
    causal = True

    def __init__(self, config: DecoderConfig, inputs: Inputs) -> None:
        super().__init__()
        config.check()
        self.config, self.dim = config, config.dim
        self.fields = Fields(inputs, config.dim, join=config.join, width=config.field_dim)
        self.positions: nn.Embedding | None = None
        if config.position == "learned":
            self.positions = nn.Embedding(config.context, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = make_norm(config)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw all weights: normal, std 0.02; what adds to the stream by 1/sqrt(2 layers) less.

        Biases are 0. As in GPT-2 (Radford et al. 2019, section 2.3).
        """
        self.fields.init_weights()
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=0.02)
        for name, parameter in self.blocks.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith(("attention.o.weight", "feed_forward.down.weight"))
                scale = (2 * self.config.layers) ** -0.5 if adds else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, batch: Tensors) -> Tensor:
        """Return hidden states (B, T, D), normed."""
        x_BTD = self.fields(batch.columns)
        turn = None
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(self.checked(batch.position))
        else:
            turn = rotary(
                batch.position[:, None],
                self.config.head_width,
                self.config.rope_theta,
                self.config.rope_scaling,
            )
        x_BTD = self.dropout(x_BTD)
        attend = document_attention(batch, product_dtype(x_BTD), self.config.head_width)
        recompute = self.recompute and self.training and torch.is_grad_enabled()
        for block in self.blocks:
            if recompute:
                x_BTD = checkpoint(block, x_BTD, turn, attend, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, turn, attend)
        y_BTD: Tensor = self.norm(x_BTD)
        return y_BTD

    def checked(self, position_BT: Tensor) -> Tensor:
        """Return the positions, none of which is past the learned table."""
        # Looked at only where it may happen: on a GPU the answer has to be waited for.
        if position_BT.shape[1] > self.config.context:
            longest = int(position_BT.max()) + 1
            if longest > self.config.context:
                raise UsageError(
                    f"a document has {longest} positions in its row, the learned table has "
                    f"{self.config.context}",
                    where="model.context",
                    hint=f"--set model.context={longest}, or shorter rows: "
                    f"--set task.length={self.config.context}",
                )
        return position_BT

    @property
    def longest(self) -> int:
        """Rows of the learned table, or 0."""
        return self.config.context if self.positions is not None else 0

    def cached(self) -> Cached:
        """Return what keeps keys and values."""
        from tokmill.models.decoding import Decoding  # It reads this module.

        return Decoding(self)

    def embedding(self, column: str) -> nn.Parameter:
        """Return the embedding (V, D) of a column."""
        return self.fields.weight(column)

    def flops_per_token(self, length: int) -> float:
        """Return 6 a weight of the blocks and 12 · layers · heads · K · length / 2 for attention.

        Forward and backward; after Chowdhery et al. 2022 (PaLM), appendix B, halved for causality.
        """
        weights = sum(p.numel() for p in self.blocks.parameters() if p.ndim == 2)
        width = self.config.heads * self.config.head_width
        return 6.0 * weights + 6.0 * self.config.layers * width * length
