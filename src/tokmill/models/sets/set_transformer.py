"""A Transformer of sets: one vector of weighted elements, whatever their order (Lee et al. 2019).

Names of tensors carry their shape: B rows, T elements, N documents of the row that has most, I
inducing points, S seeds, D width, H heads, K width of a head, L positions that look.

Elements are the positions of a row; a row is a set, or several if it has several documents. With
the weights w of the elements, every attention over elements is that to the logarithm of w added: an
element of weight 2 is the same as two equal elements of weight 1, and one of weight 0 is not there.
So the signature is a function of the weighted elements alone, not of padding or of other rows.
"""

from typing import ClassVar, Literal

import msgspec
import torch
from torch import Tensor, nn

from tokmill.base.errors import UsageError
from tokmill.base.recipe import Positive, check_types
from tokmill.models.model import WEIGHT, Fields, Inputs, Model, Tensors, taken
from tokmill.models.transformers.attention import attention
from tokmill.models.transformers.block import Sizes
from tokmill.models.transformers.layers import Linear


class SetTransformerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of a Set Transformer."""

    kind: Literal["set_transformer"] = "set_transformer"
    """Which model this is."""
    dim: Positive = 128
    """Width D of the signature and of the hidden states."""
    layers: Positive = 2
    """Number of blocks in which elements look at each other through inducing points (ISAB)."""
    heads: Positive = 4
    """Heads of each attention."""
    inducing: Positive = 16
    """Inducing points I of a block."""
    seeds: Positive = 4
    """Vectors S that look at all elements (PMA); the signature is made of them."""
    weigh: Literal["attention", "feature", "both"] = "attention"
    """What the weights of elements do, if the task gives any: they are added to attention as
    logarithms; or they are a feature of the element, as in SemanticBBV; or both."""

    sizes: ClassVar[Sizes] = {}

    def check(self) -> None:
        """Refuse sizes that do not fit together."""
        check_types(self, "model")
        if self.dim % self.heads:
            raise UsageError(
                f"{self.heads} heads do not divide a width of {self.dim}",
                where="model.heads",
                hint="choose dim = heads × a width",
            )


class Mab(nn.Module):
    """Multihead attention block: LayerNorm(h + relu(W · h)), h = LayerNorm(x + attention(x, y))."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o, self.feed_forward = (Linear(dim, dim) for _ in range(5))
        self.norm, self.last_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x_BLD: Tensor, y_BTD: Tensor, bias: Tensor | None) -> Tensor:
        """Return (B, L, D); `bias` (B, L or 1, T) is added to the scores."""
        q, k, v = (
            # Logarithms of weights need more digits than half precision has.
            wide(part.unflatten(-1, (self.heads, -1)).transpose(1, 2))
            for part in (self.q(x_BLD), self.k(y_BTD), self.v(y_BTD))
        )
        with torch.autocast(q.device.type, enabled=False):
            bias = None if bias is None else bias[:, None].to(q.dtype)
            seen_BHLK = attention(q, k, v, bias)
        y_BLD = self.norm(x_BLD + self.o(seen_BHLK.transpose(1, 2).flatten(2)))
        return self.last_norm(y_BLD + self.feed_forward(y_BLD).relu())


class Isab(nn.Module):
    """Elements look at inducing points, which have looked at all elements of their set."""

    def __init__(self, dim: int, heads: int, inducing: int) -> None:
        super().__init__()
        self.inducing = nn.Parameter(torch.empty(inducing, dim))
        nn.init.xavier_uniform_(self.inducing)
        self.gather, self.spread = Mab(dim, heads), Mab(dim, heads)

    def forward(self, x_BTD: Tensor, bias_BNT: Tensor | None, same_BTN: Tensor | None) -> Tensor:
        """Return (B, T, D).

        bias: added to the scores of the elements, for each set of a row; `same`: bool, to which
        set an element belongs; None: rows are one set.
        """
        points, sets = len(self.inducing), 1 if bias_BNT is None else bias_BNT.shape[1]
        points_BD = self.inducing.repeat(sets, 1).expand(len(x_BTD), -1, -1)
        bias = None if bias_BNT is None else bias_BNT.repeat_interleave(points, 1)
        seen = self.gather(points_BD, x_BTD, bias)
        other = None
        if same_BTN is not None:
            other = torch.zeros_like(same_BTN, dtype=x_BTD.dtype)
            other = other.masked_fill(~same_BTN, nothing(other)).repeat_interleave(points, 2)
        return self.spread(x_BTD, seen, other)


class SetTransformer(Model):
    """Elements to hidden states that know of each other (`forward`), and to a `signature`."""

    Config = SetTransformerConfig
    causal = False

    def __init__(self, config: SetTransformerConfig, inputs: Inputs) -> None:
        super().__init__()
        config.check()
        self.config, self.dim = config, config.dim
        vectors = dict(inputs.vectors)
        if config.weigh == "attention":
            vectors.pop(WEIGHT, None)
        self.fields = Fields(Inputs(ids=inputs.embedded, vectors=vectors), config.dim)
        self.blocks = nn.ModuleList(
            Isab(config.dim, config.heads, config.inducing) for _ in range(config.layers)
        )
        self.seeds = nn.Parameter(torch.empty(config.seeds, config.dim))
        nn.init.xavier_uniform_(self.seeds)
        self.each = Linear(config.dim, config.dim)
        self.look, self.mix = Mab(config.dim, config.heads), Mab(config.dim, config.heads)
        self.output = Linear(config.seeds * config.dim, config.dim)
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, batch: Tensors, places: Tensor | None = None) -> Tensor:
        x_BTD, weight_BT = self.fields(batch.columns), self.log_weights(batch)
        bias, same = None, None
        if not batch.whole:
            sets = torch.arange(max(1, int(batch.document.max()) + 1), device=x_BTD.device)
            bias = weight_BT[:, None].masked_fill(
                batch.document[:, None] != sets[:, None], nothing(weight_BT)
            )
            # Nobody reads the states of padding, which looks at the first set.
            same = batch.document.clamp(min=0)[..., None] == sets
            same = same if len(sets) > 1 else None
        elif WEIGHT in batch.columns:
            bias = weight_BT[:, None]
        for block in self.blocks:
            x_BTD = self.run_block(block, x_BTD, bias, same)
        return x_BTD if places is None else taken(x_BTD, places)

    def signature(self, batch: Tensors) -> Tensor:
        """Return a vector of each row (B, D); 0 of a row whose elements all have no weight."""
        weight_BT = self.log_weights(batch)
        x_BTD = self.each(self(batch)).relu()
        seeds_BSD = self.seeds.expand(len(x_BTD), -1, -1)
        y_BSD = self.look(seeds_BSD, x_BTD, weight_BT[:, None])
        y_BSD = self.mix(y_BSD, y_BSD, None)
        there_B1 = (weight_BT > nothing(weight_BT)).any(1, keepdim=True)
        return torch.where(there_B1, self.norm(self.output(y_BSD.flatten(1))), 0)

    def log_weights(self, batch: Tensors) -> Tensor:
        """Return the logarithms of the elements' weights (B, T) float32; a large negative number
        at padding and for weights that are not above 0.
        """
        inside = batch.document >= 0
        if WEIGHT in batch.columns:
            weight = batch.columns[WEIGHT][..., 0].float()
            inside = inside & (weight > 0)
            logs = torch.where(inside, weight, 1).log()
            logs = torch.zeros_like(logs) if self.config.weigh == "feature" else logs
        else:
            logs = torch.zeros(inside.shape, device=inside.device)
        return logs.masked_fill(~inside, nothing(logs))

    def flops_per_token(self, length: int) -> float:
        """Return the operations of a training step an element: 6 a weight that it passes.

        Attention over I inducing points or S seeds is 12 · I · D. What is computed once a set is
        left out.
        """
        config = self.config
        block = 5 * config.dim**2 * 6 + 2 * 12 * config.inducing * config.dim
        return float(config.layers * block + 18 * config.dim**2 + 12 * config.seeds * config.dim)


def wide(x: Tensor) -> Tensor:
    """Return a tensor in float32, or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def nothing(like: Tensor) -> float:
    """Return a score that leaves nothing after a softmax, with any other score added to it."""
    return torch.finfo(like.dtype).min / 4
