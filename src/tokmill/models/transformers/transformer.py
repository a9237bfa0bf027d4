"""The backbone of decoder and encoder, the decoder, and its decoding with a cache.

Names of tensors carry their shape: B rows, T positions (new ones in decoding), M positions that are
wanted, S filled slots, C slots in all, D width, H query heads, G key and value heads, K width of a
head. The rows of weights are in the order of the public checkpoints, so that these map name by
name:

    fields.embeddings.column_NAME.weight  fields.maps.column_NAME.weight (of vectors)
    positions.weight (learned)
    embedding_norm.weight .bias (asked for)   norm.weight .bias (not with post_norm)
    blocks.N.attention_norm.weight .bias      blocks.N.attention.{q,k,v,o}.weight .bias
    blocks.N.feed_forward_norm.weight .bias   blocks.N.feed_forward.{gate,up,down}.weight .bias

Decoders are in the style of Llama (RMSNorm before each branch, rotary positions, SwiGLU, grouped
queries, no bias) or of GPT-2 (Radford et al. 2019: LayerNorm, learned positions, GELU, biases).

Decoding keeps keys and values, so that each id is read once. It computes the same as
`Decoder.forward`, except for rounding, in fewer and larger operations: one product for queries,
keys and values, and rotary positions as a product of complex numbers, for which the values of a
pair must be adjacent. (The rows of q and k are put into the same new order, so their products do
not change.)
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from tokmill.base.errors import UsageError
from tokmill.base.recipe import Amount, Natural
from tokmill.models.model import Cached, Fields, Inputs, Model, Tensors
from tokmill.models.transformers.attention import (
    Rotation,
    Seen,
    attention,
    attention_at,
    causal_attention,
    document_attention,
    rotary,
)
from tokmill.models.transformers.block import Block, Sizes, TransformerConfig, make_norm
from tokmill.models.transformers.layers import Activation, RMSNorm, gelu, product_dtype, product_for


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

    def flops_per_token(self, length: int) -> float:
        """Return 6 a weight of the blocks and 12 · layers · heads · K · length for attention.

        Forward and backward; after Chowdhery et al. 2022 (PaLM), appendix B. Attention is halved
        where a position does not look ahead.
        """
        weights = sum(p.numel() for p in self.blocks.parameters() if p.ndim == 2)
        width = self.config.heads * self.config.head_width
        attention = (6.0 if self.causal else 12.0) * width * self.config.layers * length
        return 6.0 * weights + attention


SLOTS = 64
"""Slots are made in multiples of this; when they are used up their number is doubled."""
Weights = tuple[Tensor, Tensor | None]
Function = Callable[[Tensor], Tensor]


class Layer(NamedTuple):
    """A block in the form that is computed; the weights of its fused product are a copy."""

    attention_norm: Function
    qkv: Weights
    o: Weights
    feed_forward_norm: Function
    gate: Weights | None
    up: Weights
    down: Weights


class Decoding:
    """Rows of ids that a decoder reads in a batch; rows do not see each other.

    Rows are aligned at the right: before a shorter row are slots that are masked. Call it without
    gradients and without autocast.
    """

    def __init__(self, model: Transformer) -> None:
        self.model, config = model, model.config
        self.heads, self.groups, self.width = config.heads, config.groups, config.head_width
        self.rotary = model.positions is None
        assert model.norm is not None  # A decoder has its norms before the branches.
        self.norm = as_function(model.norm)
        self.gelu = partial(gelu, approximate=config.activation == "gelu_tanh")
        with torch.no_grad():
            self.layers = [self._layer(block) for block in model.blocks if isinstance(block, Block)]
        self.device = self.layers[0].qkv[0].device
        self.caches: list[Tensor] = []
        """Keys, then values, of each layer: (B, 2, G, C, K)."""
        self.filled = 0
        self.starts_B = torch.zeros(0, dtype=torch.long)
        """The slot of each row's first id."""
        self.mask_B11C: Tensor | None = None
        """What is added to scores; None: all rows begin at slot 0."""
        self.turns_CK = torch.zeros(0)
        """What pairs of values are multiplied by at each position."""

    def begin(self, columns: Mapping[str, Tensor], starts: Tensor) -> Tensor:
        rows, length = next(iter(columns.values())).shape
        self.caches, self.filled, self.starts_B = [], 0, starts.to(self.device)
        self._grow_caches(rows, length + 1)
        mask = None if self.mask_B11C is None else self._mask_of_rows(length)
        position_BT = torch.arange(length, device=self.device) - self.starts_B[:, None]
        return self._read(columns, position_BT.clamp(min=0), mask)

    def next(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden states (B, D) of the ids (B, 1) that come next in each row."""
        if self.filled == len(self.turns_CK):
            self._grow_caches(len(self.starts_B), 2 * self.filled)
        mask = self.mask_B11C
        if mask is not None:
            mask = mask.narrow(3, 0, self.filled + 1)
        return self._read(columns, (self.filled - self.starts_B)[:, None], mask)

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows (int64 numbers; one may be repeated)."""
        rows = rows.to(self.device)
        starts_B = self.starts_B[rows]
        cut = int(starts_B.min()) if len(rows) else 0
        self.starts_B, self.filled = starts_B - cut, self.filled - cut
        slots = slice(cut, cut + self.filled)
        for number, cache in enumerate(self.caches):
            # One layer at a time, so that there are never two copies of the whole cache.
            kept = cache.new_empty(len(rows), *cache.shape[1:])
            kept[:, :, :, : self.filled] = cache[rows, :, :, slots]
            self.caches[number] = kept
        self._make_mask()

    def _read(
        self, columns: Mapping[str, Tensor], position_BT: Tensor, mask: Tensor | None
    ) -> Tensor:
        rows, length = position_BT.shape
        model, heads, groups, width = self.model, self.heads, self.groups, self.width
        x_BTD = model.fields(columns)
        turn = None
        if model.positions is None:
            turn = self.turns_CK[position_BT][:, :, None]
        else:
            x_BTD = x_BTD + model.positions(position_BT)
        x = x_BTD.reshape(rows * length, -1)
        product = product_for(x, self.layers[0].qkv[0])
        filled = self.filled + length
        for layer, cache in zip(self.layers, self.caches, strict=True):
            qkv = product(layer.attention_norm(x), *layer.qkv)
            qkv_BTHK = qkv.view(rows, length, heads + 2 * groups, width)
            turned_BTHK = qkv_BTHK.narrow(2, 0, heads + groups)
            if turn is not None:
                pairs = turned_BTHK.view(rows, length, heads + groups, -1, 2)
                torch.view_as_complex(pairs).mul_(turn)
            new = qkv_BTHK.narrow(2, heads, 2 * groups).view(rows, length, 2, groups, width)
            cache.narrow(3, self.filled, length).copy_(new.permute(0, 2, 3, 1, 4))
            k, v = cache.narrow(3, 0, filled).unbind(1)
            q_BTHK = qkv_BTHK.narrow(2, 0, heads)
            if length == 1:
                # Queries of a group attend to the same keys, so they are passed as positions.
                q = q_BTHK.reshape(rows, groups, heads // groups, width)
                y = F.scaled_dot_product_attention(q, k, v, mask).reshape(rows, -1)
            else:
                q = q_BTHK.transpose(1, 2)
                y = causal_attention(q, k, v) if mask is None else attention(q, k, v, mask)
                y = y.transpose(1, 2).reshape(rows * length, -1)
            x = x + product(y, *layer.o)
            h = layer.feed_forward_norm(x)
            up = product(h, *layer.up)
            y = up.mul_(F.silu(product(h, *layer.gate))) if layer.gate else self.gelu(up)
            x = x + product(y, *layer.down)
        self.filled = filled
        return self.norm(x.view(rows, length, -1)[:, -1])

    def _grow_caches(self, rows: int, slots: int) -> None:
        slots = -(-slots // SLOTS) * SLOTS
        weight = self.layers[0].qkv[0]
        for number in range(len(self.layers)):
            larger = weight.new_empty(rows, 2, self.groups, slots, self.width)
            if self.caches[number:]:
                larger[:, :, :, : self.filled] = self.caches[number][:, :, :, : self.filled]
                self.caches[number] = larger
            else:
                self.caches.append(larger)
        self.turns_CK = self._turns(slots)
        self._make_mask()

    def _make_mask(self) -> None:
        self.mask_B11C = None
        if self.starts_B.any():
            slots = torch.arange(len(self.turns_CK), device=self.device)
            hidden = slots < self.starts_B[:, None, None, None]
            self.mask_B11C = self._added(hidden)

    def _mask_of_rows(self, length: int) -> Tensor:
        """Return (B, 1, T, T): causal within the row; a slot before the row attends to itself."""
        slot = torch.arange(length, device=self.device)
        ahead = slot[:, None] < slot
        before = slot < self.starts_B[:, None, None, None]
        return self._added(ahead | (before & (slot[:, None] != slot)))

    def _added(self, hidden: Tensor) -> Tensor:
        zeros = torch.zeros(hidden.shape, dtype=self.layers[0].qkv[0].dtype, device=self.device)
        return zeros.masked_fill_(hidden, -torch.inf)

    def _turns(self, slots: int) -> Tensor:
        if not self.rotary:
            return torch.zeros(slots)
        config = self.model.config
        place = torch.arange(slots, device=self.device)
        cosine, sine = rotary(place, self.width, config.rope_theta, config.rope_scaling)
        half = self.width // 2
        return torch.complex(cosine[:, :half].contiguous(), sine[:, half:].contiguous())

    def _layer(self, block: Block) -> Layer:
        attention, forward, config = block.attention, block.feed_forward, self.model.config
        parts = [(attention.q, self.heads), (attention.k, self.groups), (attention.v, 0)]
        heads = [(part, heads if self.rotary else 0) for part, heads in parts]
        biases = [in_pairs(part.bias, n) for part, n in heads if part.bias is not None]
        return Layer(
            as_function(block.attention_norm),
            (
                torch.cat([in_pairs(part.weight, n) for part, n in heads]),
                torch.cat(biases) if biases else None,
            ),
            (attention.o.weight, attention.o.bias),
            as_function(block.feed_forward_norm),
            (forward.gate.weight, forward.gate.bias) if config.activation == "swiglu" else None,
            (forward.up.weight, forward.up.bias),
            (forward.down.weight, forward.down.bias),
        )


def in_pairs(rows: Tensor, heads: int) -> Tensor:
    """Return rows (heads · K, …) with each pair (i, i + K / 2) adjacent; 0 heads: unchanged."""
    if not heads:
        return rows
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).flatten(0, 2)


def as_function(norm: nn.Module) -> Function:
    """Return a norm as a function, without the overhead of a module."""
    if isinstance(norm, nn.LayerNorm):
        shape, weight, bias, eps = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
    assert isinstance(norm, RMSNorm)
    scale, small = norm.weight, norm.eps
    return lambda x: torch.rms_norm(x, scale.shape, scale, small)


class DecoderConfig(TransformerConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes and style of a decoder; the defaults are Llama's style."""

    kind: Literal["decoder"] = "decoder"


class Decoder(Transformer):
    """The whole backbone. Heads are the task's."""

    Config = DecoderConfig
    causal = True
    config: DecoderConfig

    @property
    def adding_scale(self) -> float:
        """1/sqrt(2 layers), as in GPT-2 (Radford et al. 2019, section 2.3)."""
        return float((2 * self.config.layers) ** -0.5)

    def cached(self) -> Cached:
        return Decoding(self)


class EncoderConfig(TransformerConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes and style of an encoder; the defaults are BERT's style."""

    kind: Literal["encoder"] = "encoder"
    norm: Literal["rms", "layer"] = "layer"
    norm_place: Literal["post", "pre"] = "post"
    """post: the sum of a branch and its input is normed, as in BERT; pre: the input of a branch is
    normed, and the last output, which allows higher learning rates."""
    embedding_norm: bool = True
    """Whether the sum of the embeddings is normed before the first block."""
    position: Literal["rope", "learned"] = "learned"
    context: Natural = 512
    activation: Activation = "gelu"
    bias: bool = True
    norm_eps: Amount = 1e-12

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
