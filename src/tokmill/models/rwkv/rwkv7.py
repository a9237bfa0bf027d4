"""RWKV-7 (Peng et al. 2025, arXiv 2503.14456): a recurrent model that trains like a Transformer.

Names of tensors carry their shape: B rows, T positions, D width, H heads, N width of a head.

Parameters have the names of the official checkpoints, so that these map name by name:

    fields.embeddings.column_NAME.weight (emb.weight)   ln_out.weight .bias
    blocks.N.ln0 (N = 0 only)  blocks.N.ln1  blocks.N.ln2
    blocks.N.att.{x_r,x_w,x_k,x_v,x_a,x_g,w0,w1,w2,a0,a1,a2,v0,v1,v2,g1,g2,k_k,k_a,r_k}
    blocks.N.att.{receptance,key,value,output}.weight   blocks.N.att.ln_x.weight .bias
    blocks.N.ffn.x_k   blocks.N.ffn.{key,value}.weight
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tokmill.base.errors import UsageError
from tokmill.base.recipe import Natural, Positive, check_types
from tokmill.models.model import Fields, Group, Inputs, Join, Model, Tensors, taken
from tokmill.models.rwkv.wkv7 import CHUNK, continues, wkv7
from tokmill.models.transformers.layers import Linear

SLOWEST = -math.exp(-0.5)
"""The log decay lies between this and 0."""
GROUP_EPS = 64e-5
"""Epsilon of the norm over heads, whatever their width, as in the official code."""


class RWKV7Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of an RWKV-7; the defaults are the official ones for a width of `dim`."""

    kind: Literal["rwkv7"] = "rwkv7"
    """Which model this is."""
    dim: Positive = 256
    """Width D of the hidden states, a multiple of `head_dim`."""
    layers: Positive = 6
    """Number of blocks."""
    head_dim: Positive = 64
    """Width N of a head."""
    hidden: Natural = 0
    """Width of the channel mix; 0: 4 times `dim`."""
    join: Join = "sum"
    """How the embeddings of several columns become one vector: their sum, or end to end and a
    linear map."""
    field_dim: Natural = 0
    """Width of a column's embedding where join = "concat"; 0: `dim` / columns."""

    @property
    def ranks(self) -> dict[str, int]:
        """Rank by the letter of the official names: w decays, a rates, v values, g gates.

        Each is max(32, factor × √D rounded to a multiple of 32).
        """
        factors = {"w": 2.5, "a": 2.5, "v": 1.7, "g": 5.0}
        root = math.sqrt(self.dim)
        return {
            letter: max(32, round(factor * root / 32) * 32) for letter, factor in factors.items()
        }

    def check(self) -> None:
        """Refuse sizes that do not fit together."""
        check_types(self, "model")
        if self.dim % self.head_dim:
            raise UsageError(
                f"a width of {self.dim} is not a number of heads of {self.head_dim}",
                where="model.head_dim",
                hint="choose dim = heads × head_dim",
            )


@dataclass(frozen=True, slots=True)
class LayerState:
    """What a layer carries from one position to the next, for B rows."""

    mixed: Tensor
    """(B, D), the last position's input of the time mix."""
    matrix: Tensor
    """(B, H, N, N), float32: the state of `wkv7`."""
    passed: Tensor
    """(B, D), the last position's input of the channel mix."""


State = list[LayerState]
"""States of all layers; a document may be continued from them in constant time."""


class TimeMix(nn.Module):
    """The branch with the recurrence."""

    x_r: nn.Parameter
    x_w: nn.Parameter
    x_k: nn.Parameter
    x_v: nn.Parameter
    x_a: nn.Parameter
    x_g: nn.Parameter
    k_k: nn.Parameter
    k_a: nn.Parameter
    w0: nn.Parameter
    w1: nn.Parameter
    w2: nn.Parameter
    a0: nn.Parameter
    a1: nn.Parameter
    a2: nn.Parameter
    v0: nn.Parameter
    v1: nn.Parameter
    v2: nn.Parameter
    g1: nn.Parameter
    g2: nn.Parameter

    def __init__(self, config: RWKV7Config, layer: int) -> None:
        super().__init__()
        width = config.dim
        self.layer, self.layers, self.head_dim = layer, config.layers, config.head_dim
        self.heads = width // config.head_dim
        for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "k_k", "k_a", "w0", "a0", "v0"):
            self.register_parameter(name, nn.Parameter(torch.empty(1, 1, width)))
        for letter, rank in config.ranks.items():
            self.register_parameter(f"{letter}1", nn.Parameter(torch.empty(width, rank)))
            self.register_parameter(f"{letter}2", nn.Parameter(torch.empty(rank, width)))
        self.r_k = nn.Parameter(torch.empty(self.heads, self.head_dim))
        self.receptance = Linear(width, width, bias=False)
        self.key = Linear(width, width, bias=False)
        self.value = Linear(width, width, bias=False)
        self.output = Linear(width, width, bias=False)
        self.ln_x = nn.GroupNorm(self.heads, width, eps=GROUP_EPS)
        if layer == 0:
            # It has no earlier values to mix in; the official checkpoints hold them all the same.
            for name in ("v0", "v1", "v2"):
                self.get_parameter(name).requires_grad_(False)

    def init_weights(self) -> None:
        width, layer, layers = self.ln_x.num_channels, self.layer, self.layers
        rising = layer / max(layers - 1, 1)
        falling = 1 - layer / layers
        n = torch.arange(width)
        linear = n / max(width - 1, 1) - 0.5
        middle = (self.head_dim - 1) / 2
        zigzag = (n % self.head_dim - middle) / max(middle, 1)
        zigzag = zigzag * zigzag.abs()
        values = {
            "w0": -5.5 + 6 * (n / max(width - 1, 1)) ** (1 + rising**0.3) + 2.5 * zigzag,
            "a0": -0.19 + 0.3 * zigzag + 0.4 * linear,
            "v0": 0.73 - 0.4 * linear,
            "k_k": 0.71 - 0.1 * linear,
            "k_a": torch.full((width,), 1.02),
        }
        for name, power in (("r", 0.2), ("w", 0.9), ("k", 0.7), ("v", 0.7), ("a", 0.9), ("g", 0.2)):
            values[f"x_{name}"] = 1 - (n / width) ** (power * falling)
        with torch.no_grad():
            for name, value in values.items():
                self.get_parameter(name).copy_(value)
            self.r_k.fill_(-0.04)
            self.ln_x.weight.fill_(((1 + layer) / layers) ** 0.7)
            self.ln_x.bias.zero_()
        for letter in "wavg":
            nn.init.zeros_(self.get_parameter(f"{letter}1"))
            up = self.get_parameter(f"{letter}2")
            nn.init.orthogonal_(up, gain=0.1 * max(1.0, math.sqrt(up.shape[0] / up.shape[1])))
        nn.init.orthogonal_(self.receptance.weight)
        nn.init.orthogonal_(self.key.weight, gain=0.1)
        nn.init.orthogonal_(self.value.weight)
        nn.init.zeros_(self.output.weight)

    def forward(
        self, x_BTD: Tensor, first_BTD: Tensor | None, state: LayerState, document: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the branch, the first layer's values, and the recurrence's state at the end."""
        size, length, width = x_BTD.shape
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        ahead = shifted(x_BTD, state.mixed, document) - x_BTD
        r = self.receptance(x_BTD + ahead * self.x_r)
        k = self.key(x_BTD + ahead * self.x_k)
        mixed_v = x_BTD + ahead * self.x_v
        v = self.value(mixed_v)
        low = torch.tanh((x_BTD + ahead * self.x_w) @ self.w1) @ self.w2
        w = SLOWEST * torch.sigmoid((self.w0 + low).to(wide))
        rate = torch.sigmoid(self.a0 + ((x_BTD + ahead * self.x_a) @ self.a1) @ self.a2)
        gate = torch.sigmoid((x_BTD + ahead * self.x_g) @ self.g1) @ self.g2
        if first_BTD is None:
            first_BTD = v
        else:
            v = v + (first_BTD - v) * torch.sigmoid(self.v0 + (mixed_v @ self.v1) @ self.v2)

        def heads(values: Tensor) -> Tensor:
            return values.reshape(size, length, self.heads, self.head_dim)

        removal = F.normalize(heads(k * self.k_k).to(wide), dim=-1)
        k = k * (1 + (rate - 1) * self.k_a)
        r, k, v_heads = heads(r), heads(k), heads(v)
        y_BTHN, matrix = wkv7(
            r.to(wide),
            heads(w),
            k.to(wide),
            v_heads.to(wide),
            -removal,
            removal * heads(rate),
            state.matrix,
            document=document,
        )
        y_BTD = y_BTHN.reshape(size * length, width).to(self.ln_x.weight.dtype)
        y_BTD = self.ln_x(y_BTD).view(size, length, width)
        bonus = (r * k * self.r_k).sum(-1, keepdim=True) * v_heads
        y_BTD = self.output((y_BTD + bonus.reshape(size, length, width)) * gate)
        return y_BTD, first_BTD, matrix


class ChannelMix(nn.Module):
    """The branch without a state but the position before: a squared ReLU."""

    def __init__(self, config: RWKV7Config, layer: int) -> None:
        super().__init__()
        self.layer, self.layers = layer, config.layers
        hidden = config.hidden or 4 * config.dim
        self.x_k = nn.Parameter(torch.empty(1, 1, config.dim))
        self.key = Linear(config.dim, hidden, bias=False)
        self.value = Linear(hidden, config.dim, bias=False)

    def init_weights(self) -> None:
        width = self.x_k.shape[-1]
        power = (1 - self.layer / self.layers) ** 4
        with torch.no_grad():
            self.x_k.copy_(1 - (torch.arange(width) / width) ** power)
        nn.init.orthogonal_(self.key.weight)
        nn.init.zeros_(self.value.weight)

    def forward(self, x_BTD: Tensor, before_BD: Tensor, document: Tensor | None) -> Tensor:
        """Return the branch; `before_BD` is the position before the row."""
        ahead = shifted(x_BTD, before_BD, document) - x_BTD
        return self.value(torch.relu(self.key(x_BTD + ahead * self.x_k)) ** 2)


class Block(nn.Module):
    """Time mix, then channel mix; each reads a norm of the stream and adds to the stream."""

    def __init__(self, config: RWKV7Config, layer: int) -> None:
        super().__init__()
        if layer == 0:
            self.ln0 = nn.LayerNorm(config.dim)
        self.ln1 = nn.LayerNorm(config.dim)
        self.ln2 = nn.LayerNorm(config.dim)
        self.att = TimeMix(config, layer)
        self.ffn = ChannelMix(config, layer)

    def forward(
        self, x_BTD: Tensor, first_BTD: Tensor | None, state: LayerState, document: Tensor | None
    ) -> tuple[Tensor, Tensor, LayerState]:
        """Return the stream after both branches, the first layer's values, the state at the end."""
        if first_BTD is None:
            x_BTD = self.ln0(x_BTD)
        mixed_BTD = self.ln1(x_BTD)
        y_BTD, first_BTD, matrix = self.att(mixed_BTD, first_BTD, state, document)
        x_BTD = x_BTD + y_BTD
        passed_BTD = self.ln2(x_BTD)
        x_BTD = x_BTD + self.ffn(passed_BTD, state.passed, document)
        return x_BTD, first_BTD, LayerState(mixed_BTD[:, -1], matrix, passed_BTD[:, -1])


class RWKV7(Model):
    """The whole backbone. Heads are the task's."""

    Config = RWKV7Config
    causal = True

    def __init__(self, config: RWKV7Config, inputs: Inputs) -> None:
        super().__init__()
        config.check()
        self.config, self.dim = config, config.dim
        self.fields = Fields(inputs, config.dim, join=config.join, width=config.field_dim)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.ln_out = nn.LayerNorm(config.dim)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw all weights as the official code does; a table of embeddings is next to 0."""
        self.fields.init_weights()
        for table in self.fields.embeddings.parameters():
            nn.init.uniform_(table, -1e-4, 1e-4)
        for block in self._blocks():
            block.att.init_weights()
            block.ffn.init_weights()

    def init_head(self, weight: Tensor) -> None:
        more = math.sqrt(weight.shape[0] / weight.shape[1])
        nn.init.orthogonal_(weight, gain=0.5 * max(1.0, more))

    def forward(self, batch: Tensors, places: Tensor | None = None) -> Tensor:
        document = None if batch.whole else batch.document
        y_BTD = self.run(batch.columns, self.start(len(batch.document)), document)[0]
        return y_BTD if places is None else taken(y_BTD, places)

    def start(self, rows: int) -> State:
        """Return the state before the first position of so many rows."""
        table = self.ln_out.weight
        config = self.config
        heads = config.dim // config.head_dim
        wide = torch.promote_types(table.dtype, torch.float32)

        def zeros(*shape: int, dtype: torch.dtype = wide) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=table.device)

        return [
            LayerState(
                zeros(config.dim, dtype=table.dtype),
                zeros(heads, config.head_dim, config.head_dim),
                zeros(config.dim, dtype=table.dtype),
            )
            for _ in range(config.layers)
        ]

    def run(
        self, columns: Mapping[str, Tensor], state: State, document: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return hidden states (B, T, D) of positions that follow `state`, and the state after.

        `document` as for `wkv7`: a state goes on with the first document of its row.
        """
        x_BTD = self.fields(columns)
        recompute = self.recompute and self.training and torch.is_grad_enabled()
        first, after = None, []
        for block, layer in zip(self._blocks(), state, strict=True):
            if recompute:
                x_BTD, first, layer = checkpoint(
                    block, x_BTD, first, layer, document, use_reentrant=False
                )
            else:
                x_BTD, first, layer = block(x_BTD, first, layer, document)
            after.append(layer)
        y_BTD: Tensor = self.ln_out(x_BTD)
        return y_BTD, after

    def param_groups(self, weight_decay: float) -> list[Group]:
        """Return parameter groups: matrices named `.weight` decay; `w0` learns twice as fast."""
        groups: list[Group] = [
            {"params": [], "weight_decay": weight_decay, "lr_scale": 1.0},
            {"params": [], "weight_decay": 0.0, "lr_scale": 1.0},
            {"params": [], "weight_decay": 0.0, "lr_scale": 2.0},
        ]
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                matrix = name.endswith(".weight") and parameter.ndim == 2
                place = 2 if name.endswith(".att.w0") else int(not matrix)
                groups[place]["params"].append(parameter)
        return [group for group in groups if group["params"]]

    def flops_per_token(self, length: int) -> float:
        """Return 6 a weight of the matrices, and what the chunked recurrence takes.

        Forward and backward. A head's chunk of L positions costs, a position: 4 L N for scores,
        8 L N for what they weigh, 4 L² (log2(L) - 1) for the inverse of the triangular system and
        4 L N for what it makes of 2 N columns, and 10 N² for the state; backward twice that.
        """
        weights = sum(p.numel() for p in self.blocks.parameters() if p.ndim == 2)
        n = self.config.head_dim
        head = 16 * CHUNK * n + 4 * CHUNK**2 * (math.log2(CHUNK) - 1) + 10 * n * n
        return 6.0 * weights + 3.0 * head * (self.config.dim // n) * self.config.layers

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block


def shifted(x_BTD: Tensor, before_BD: Tensor, document: Tensor | None) -> Tensor:
    """Return the position before each: 0 at a document's first, `before` at the row's."""
    x_BTD = torch.cat([before_BD[:, None].to(x_BTD.dtype), x_BTD[:, :-1]], 1)
    if document is None:
        return x_BTD
    return x_BTD * continues(document)[..., None].to(x_BTD.dtype)
