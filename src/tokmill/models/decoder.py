"""A causal Transformer: RMSNorm before each branch, rotary positions, SwiGLU, grouped queries.

Names of tensors carry their shape:
    B rows, T positions, D width, H query heads, G key and value heads, K width of a head,
    F width of the feed-forward branch. `x_BHTK` is (B, H, T, K).

Sources: Vaswani et al. 2017 (attention), Zhang and Sennrich 2019 (RMSNorm), Su et al. 2021
(rotary positions), Shazeer 2020 (SwiGLU), Ainslie et al. 2023 (grouped queries). The layout is
Llama's, rotary halves included, so that public checkpoints map name by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokmill.errors import UsageError
from tokmill.models.fields import Fields
from tokmill.models.model import Model, Tensors


class DecoderConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of a decoder."""

    kind: Literal["decoder"] = "decoder"
    """Which model this is."""
    dim: int = 128
    """Width D of the hidden states."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Query heads; must divide `dim`."""
    kv_heads: int = 0
    """Key and value heads, shared by groups of query heads; 0: as many as `heads`."""
    hidden: int = 0
    """Width of the feed-forward branch; 0: 8/3 of `dim`, rounded up to a multiple of 32."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    dropout: float = 0.0
    """Share of values dropped after the embedding and after each branch, while training."""

    @property
    def feed_forward(self) -> int:
        """Width F of the feed-forward branch."""
        return self.hidden or -(-8 * self.dim // 3 // 32) * 32

    @property
    def groups(self) -> int:
        """Number G of key and value heads."""
        return self.kv_heads or self.heads

    def check(self) -> None:
        """Refuse sizes that do not fit together."""
        if min(self.dim, self.layers, self.heads) < 1:
            raise UsageError("dim, layers and heads must be at least 1", where="model")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise UsageError(
                f"{self.heads} heads do not divide a width of {self.dim} into even parts",
                where="model.heads",
                hint="choose dim = heads × an even number",
            )
        if self.groups < 1 or self.heads % self.groups:
            raise UsageError(
                f"{self.heads} query heads cannot share {self.groups} key heads",
                where="model.kv_heads",
                hint="kv_heads must divide heads",
            )


class Attention(nn.Module):
    """Causal self-attention within documents."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.groups = config.heads, config.groups
        width = config.dim // config.heads
        self.q = nn.Linear(config.dim, config.heads * width, bias=False)
        self.k = nn.Linear(config.dim, config.groups * width, bias=False)
        self.v = nn.Linear(config.dim, config.groups * width, bias=False)
        self.o = nn.Linear(config.heads * width, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Return (B, T, D); `mask` (B, 1, T, T) says where a position may look, None: back."""
        q_BHTK = rotate(split(self.q(x_BTD), self.heads), *rope)
        k_BGTK = rotate(split(self.k(x_BTD), self.groups), *rope)
        v_BGTK = split(self.v(x_BTD), self.groups)
        y_BHTK = F.scaled_dot_product_attention(
            q_BHTK,
            k_BGTK,
            v_BGTK,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.groups != self.heads,
        )
        y_BTD: Tensor = self.o(y_BHTK.transpose(1, 2).flatten(2))
        return y_BTD


class FeedForward(nn.Module):
    """SwiGLU: a gated branch of width F."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.feed_forward, bias=False)
        self.up = nn.Linear(config.dim, config.feed_forward, bias=False)
        self.down = nn.Linear(config.feed_forward, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, T, D)."""
        y_BTD: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return y_BTD


class Block(nn.Module):
    """Attention, then feed-forward; each reads a norm of the stream and adds to the stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Return the stream (B, T, D) after both branches."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), rope, mask))
        y_BTD: Tensor = x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))
        return y_BTD


class Decoder(Model):
    """The whole backbone. Heads are the task's."""

    Config = DecoderConfig

    def __init__(self, config: DecoderConfig, sizes: Mapping[str, int]) -> None:
        super().__init__()
        config.check()
        self.config, self.dim = config, config.dim
        self.fields = Fields(sizes, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw all weights: normal, std 0.02; what adds to the stream by 1/sqrt(2 layers) less.

        As in GPT-2 (Radford et al. 2019, section 2.3).
        """
        self.fields.init_weights()
        for name, parameter in self.blocks.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith(("attention.o.weight", "feed_forward.down.weight"))
                scale = (2 * self.config.layers) ** -0.5 if adds else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, batch: Tensors) -> Tensor:
        """Return hidden states (B, T, D), normed."""
        x_BTD = self.dropout(self.fields(batch.columns))
        rope = rotary(batch.position, self.dim // self.config.heads, self.config.rope_theta)
        mask = None if batch.whole else document_mask(batch.document)
        for block in self.blocks:
            x_BTD = block(x_BTD, rope, mask)
        y_BTD: Tensor = self.norm(x_BTD)
        return y_BTD

    def embedding(self, column: str) -> nn.Parameter:
        """Return the embedding (V, D) of a column."""
        return self.fields.weight(column)

    def flops_per_token(self, length: int) -> float:
        """Return 6 a weight of the blocks and 12 · layers · D · length / 2 for attention.

        Forward and backward; after Chowdhery et al. 2022 (PaLM), appendix B, halved for causality.
        """
        weights = sum(p.numel() for p in self.blocks.parameters() if p.ndim == 2)
        return 6.0 * weights + 6.0 * self.config.layers * self.dim * length


def split(x_BTE: Tensor, heads: int) -> Tensor:
    """Return (B, heads, T, K) from (B, T, heads · K)."""
    rows, length, width = x_BTE.shape
    return x_BTE.view(rows, length, heads, width // heads).transpose(1, 2)


def document_mask(document_BT: Tensor) -> Tensor:
    """Return where a position may look, (B, 1, T, T): back, and within its document.

    Padding is a document of its own, so no line of the mask is empty.
    """
    length = document_BT.shape[1]
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    causal_TT = torch.ones(length, length, dtype=torch.bool, device=document_BT.device).tril()
    return (same_BTT & causal_TT)[:, None]


def rotary(position_BT: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine (B, 1, T, K / 2) of position × theta^(-2i / K), in float32."""
    exponent = torch.arange(0, width, 2, device=position_BT.device, dtype=torch.float32) / width
    angle_BTK = position_BT[:, :, None].float() * theta**-exponent
    return angle_BTK.cos()[:, None], angle_BTK.sin()[:, None]


def rotate(x_BHTK: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (i, i + K / 2) of a head by its angle; Llama's layout."""
    first, second = x_BHTK.chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.type_as(x_BHTK)
