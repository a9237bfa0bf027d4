"""Dilated convolutions over the positions of a document, such as the bytes of a function.

Names of tensors carry their shape: B rows, T positions, D width of the model, S taps of a kernel.

A small model, for baselines on raw bytes. Blocks are residual: h + W2 · gelu(convolution(LayerNorm
(h))), with dilations 1, 2, 4, …, so L layers see (taps - 1) · (2^L - 1) positions besides their own
(van den Oord et al. 2016; Bai et al. 2018), here to both sides. Outside of its document a
convolution reads zeros.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
import torch
from torch import Tensor, nn

from tokmill.errors import UsageError
from tokmill.models.block import Sizes
from tokmill.models.fields import Fields, Join
from tokmill.models.inputs import Inputs
from tokmill.models.layers import Linear, gelu
from tokmill.models.model import Model, Tensors
from tokmill.models.predicted import taken


class ConvolutionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of a stack of dilated convolutions."""

    kind: Literal["convolution"] = "convolution"
    """Which model this is."""
    dim: int = 128
    """Width D of the hidden states."""
    layers: int = 5
    """Number of blocks; the dilation doubles with each, and begins anew after `cycle` of them."""
    taps: int = 5
    """Positions that a convolution reads, an odd number."""
    cycle: int = 8
    """Blocks until the dilation is 1 again."""
    dropout: float = 0.0
    """Share of values dropped behind each block's activation, while training."""
    join: Join = "sum"
    """How the embeddings of several columns become one vector: their sum, or end to end and a
    linear map."""
    field_dim: int = 0
    """Width of a column's embedding where join = "concat"; 0: `dim` / columns."""

    sizes: ClassVar[Sizes] = {}
    alike: ClassVar[bool] = False
    """A block with a larger dilation takes more memory."""

    def check(self) -> None:
        """Refuse sizes that do not fit together."""
        if min(self.dim, self.layers, self.cycle) < 1 or self.field_dim < 0:
            raise UsageError(
                "dim, layers and cycle must be at least 1, field_dim at least 0",
                where="model",
                hint="--set model.layers=5, for example",
            )
        if self.taps < 1 or self.taps % 2 == 0:
            raise UsageError(
                f"a convolution of {self.taps} taps has no middle",
                where="model.taps",
                hint="--set model.taps=5, or another odd number",
            )
        if not 0 <= self.dropout < 1:
            raise UsageError(
                f"dropout must be at least 0 and below 1, not {self.dropout}",
                where="model.dropout",
                hint="--set model.dropout=0.1",
            )


class DilatedBlock(nn.Module):
    """A residual block of one convolution."""

    def __init__(self, config: ConvolutionConfig, dilation: int) -> None:
        super().__init__()
        self.dilation, self.taps = dilation, config.taps
        self.norm = nn.LayerNorm(config.dim)
        self.taken = Linear(config.taps * config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.down = Linear(config.dim, config.dim)

    def forward(self, x_BTD: Tensor, document_BT: Tensor | None) -> Tensor:
        """Return (B, T, D); `document` (B, T): of rows that are no one document each."""
        around = neighbours(self.norm(x_BTD), document_BT, self.taps, self.dilation)
        y_BTD: Tensor = self.down(self.dropout(gelu(self.taken(around))))
        return x_BTD + y_BTD


def neighbours(x_BTD: Tensor, document_BT: Tensor | None, taps: int, dilation: int) -> Tensor:
    """Return what the taps of each position read, end to end, (B, T, S · D).

    They lie `dilation` positions apart, around the position; outside of its document they read 0.
    A convolution is then one matrix product, which is as fast on a CPU.
    """
    length, reach = x_BTD.shape[1], taps // 2 * dilation
    padded = nn.functional.pad(x_BTD, (0, 0, reach, reach))
    parts = [padded[:, tap * dilation : tap * dilation + length] for tap in range(taps)]
    if document_BT is not None:
        beside = nn.functional.pad(document_BT, (reach, reach), value=-2)
        parts = [
            part.masked_fill((beside[:, tap * dilation :][:, :length] != document_BT)[..., None], 0)
            for tap, part in enumerate(parts)
        ]
    return torch.cat(parts, -1)


class Convolution(Model):
    """The whole backbone. Heads are the task's."""

    Config = ConvolutionConfig
    causal = False

    def __init__(self, config: ConvolutionConfig, inputs: Inputs) -> None:
        super().__init__()
        config.check()
        self.config, self.dim = config, config.dim
        self.fields = Fields(inputs, config.dim, join=config.join, width=config.field_dim)
        self.blocks = nn.ModuleList(
            DilatedBlock(config, 1 << number % config.cycle) for number in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, batch: Tensors, places: Tensor | None = None) -> Tensor:
        """Return hidden states (B, T, D), normed; with `places` (B, M) those alone, (B, M, D)."""
        x_BTD, document = self.fields(batch.columns), None if batch.whole else batch.document
        for block in self.blocks:
            x_BTD = self.run_block(block, x_BTD, document)
        y_BTD: Tensor = self.norm(x_BTD if places is None else taken(x_BTD, places))
        return y_BTD

    def embedding(self, column: str) -> nn.Parameter:
        """Return the embedding (V, D) of a column."""
        return self.fields.weight(column)

    def flops_per_token(self, length: int) -> float:
        """Return 6 a weight of the blocks, forward and backward."""
        return 6.0 * sum(p.numel() for p in self.blocks.parameters() if p.ndim == 2)
