"""The backbone that the decoder and the encoder are made of.

Names of tensors carry their shape: B rows, T positions, M positions that are wanted, D width, K
width of a head. The rows of weights are in the order of the public checkpoints, so that these map
name by name:

    fields.embeddings.column_NAME.weight  fields.maps.column_NAME.weight (of vectors)
    positions.weight (learned)
    embedding_norm.weight .bias (asked for)   norm.weight .bias (not with post_norm)
    blocks.N.attention_norm.weight .bias      blocks.N.attention.{q,k,v,o}.weight .bias
    blocks.N.feed_forward_norm.weight .bias   blocks.N.feed_forward.{gate,up,down}.weight .bias
"""

from __future__ import annotations

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tokmill.base.errors import UsageError
from tokmill.models.model import Model, Tensors
from tokmill.models.model_inputs import Fields, Inputs
from tokmill.models.transformers.attention import (
    Rotation,
    Seen,
    attention_at,
    document_attention,
    rotary,
)
from tokmill.models.transformers.block import Block, TransformerConfig, make_norm
from tokmill.models.transformers.layers import product_dtype


class Transformer(Model):
    """Embeddings, positions and blocks. A kind of model says whether it is `causal`.

    `post_norm`: where the blocks' norms stand (`Block`); the stream is normed at its end where they
    stand in front of the branches. `embedding_norm`: whether it is normed at its beginning too.
    """

    def __init__(
        self,
        config: TransformerConfig,
        inputs: Inputs,
        *,
        post_norm: bool = False,
        embedding_norm: bool = False,
    ) -> None:
        super().__init__()
        config.check()
        self.config, self.dim = config, config.dim
        self.fields = Fields(inputs, config.dim, join=config.join, width=config.field_dim)
        self.positions: nn.Embedding | None = None
        if config.position == "learned":
            self.positions = nn.Embedding(config.context, config.dim)
        self.embedding_norm = make_norm(config) if embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, post_norm) for _ in range(config.layers))
        self.norm = None if post_norm else make_norm(config)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw all weights: normal, std 0.02; biases are 0.

        `adding_scale` is for what adds to the stream.
        """
        self.fields.init_weights()
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=0.02)
        for name, parameter in self.blocks.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith(("attention.o.weight", "feed_forward.down.weight"))
                nn.init.normal_(parameter, std=0.02 * (self.adding_scale if adds else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    @property
    def adding_scale(self) -> float:
        """How much smaller weights begin that make what is added to the stream."""
        return 1.0

    def forward(self, batch: Tensors, places: Tensor | None = None) -> Tensor:
        """Return hidden states (B, T, D), normed; with `places` (B, M) those alone, (B, M, D)."""
        x_BTD = self.fields(batch.columns)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(self.checked(batch.position))
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        x_BTD = self.dropout(x_BTD)
        dropout = self.config.attention_dropout if self.training else 0.0
        turn, seen = self.turn(batch), Seen(self.causal, dropout)
        dtype, width = product_dtype(x_BTD), self.config.head_width
        attend = document_attention(batch, dtype, width, seen)
        *blocks, last = self.blocks
        for block in blocks:
            x_BTD = self.run_block(block, x_BTD, turn, attend)
        if places is not None:
            # Nobody reads what the last block would make of other positions.
            attend = attention_at(batch, places, seen)
        x_BTD = self.run_block(last, x_BTD, turn, attend, places)
        return x_BTD if self.norm is None else self.norm(x_BTD)

    def turn(self, batch: Tensors) -> Rotation | None:
        """Return the rotation of queries and keys; None where positions are learned."""
        config, place = self.config, batch.position[:, None]
        if self.positions is not None:
            return None
        return rotary(place, config.head_width, config.rope_theta, config.rope_scaling)

    def checked(self, position_BT: Tensor) -> Tensor:
        """Return the positions, none of which is past the learned table."""
        # Looked at only where it may happen: on a GPU the answer has to be waited for.
        # Where memory is estimated there are no numbers to look at.
        has_values = not isinstance(position_BT, FakeTensor)
        if has_values and position_BT.shape[1] > self.config.context:
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

    def embedding(self, column: str) -> nn.Parameter:
        """Return the embedding (V, D) of a column."""
        return self.fields.weight(column)

    def flops_per_token(self, length: int) -> float:
        """Return 6 a weight of the blocks and 12 · layers · heads · K · length for attention.

        Forward and backward; after Chowdhery et al. 2022 (PaLM), appendix B. Attention is halved
        where a position does not look ahead.
        """
        weights = sum(p.numel() for p in self.blocks.parameters() if p.ndim == 2)
        width = self.config.heads * self.config.head_width
        attention = (6.0 if self.causal else 12.0) * width * self.config.layers * length
        return 6.0 * weights + attention
