"""A bag of n-grams: which ones a document has and how often, hashed, each with an embedding.

Names of tensors carry their shape: B rows, T positions, N documents of the row that has most, D
width of the model.

What n-grams say of a document is learned in a fraction of the time of attention, so this is a model
for one processor, and a baseline for larger ones. Of an n-gram that stands n times in a document,
ln(1 + n) times its embedding is added: TF-IDF (Salton and Buckley 1988) has a weight there. n-grams
are hashed into a table (Weinberger et al. 2009), so two of them may share an embedding; single
tokens have one of their own for each column.
"""

from typing import Annotated, ClassVar, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn

from tokmill.base.errors import UsageError, nearest
from tokmill.base.recipe import Natural, Part, Positive, check_types
from tokmill.models.model import Fields, Inputs, Model, Tensors, taken
from tokmill.models.transformers.block import Sizes
from tokmill.models.transformers.layers import FeedForward

STD = 0.05
"""Standard deviation of embeddings at the start."""
MOST_BUCKETS = 1 << 24
_GOLDEN, _M1, _M2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""The constants of splitmix64 as signed numbers."""
_NOTHING = torch.iinfo(torch.int64).min


class Gram(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of n-grams."""

    size: Positive = 2
    """Tokens n of an n-gram."""
    columns: tuple[str, ...] = ()
    """Columns that a token is compared by; empty: all."""
    runs: bool = False
    """Whether tokens that equal the one before them are left out first, such as the mnemonic that
    stands at each token of an instruction."""


class BagConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of a bag of n-grams."""

    kind: Literal["bag"] = "bag"
    """Which model this is."""
    dim: Positive = 256
    """Width D of the signature and of the hidden states."""
    layers: Natural = 1
    """Residual feed-forward blocks behind the sum of embeddings."""
    hidden: Natural = 0
    """Width of these blocks; 0: 2 × `dim`."""
    grams: tuple[Gram, ...] = (Gram(size=2), Gram(size=3))
    """Kinds of n-grams beside single tokens, each with a table of its own."""
    buckets: Annotated[int, Meta(ge=1, le=MOST_BUCKETS)] = 1 << 15
    """Rows of each table of embeddings."""
    dropout: Part = 0.0
    """Share of the different n-grams of a document that are left out, while training."""

    sizes: ClassVar[Sizes] = {}

    def check(self, inputs: Inputs) -> None:
        """Refuse sizes that do not fit together, and columns that there are not."""
        check_types(self, "model")
        for gram in self.grams:
            for name in gram.columns:
                if name not in inputs.embedded:
                    raise UsageError(
                        f"there is no column {name!r} of ids",
                        where="model.grams",
                        hint=nearest(name, inputs.embedded),
                    )


class Bag(Model):
    """Documents to vectors of what stands in them, whatever the order beyond their n-grams."""

    Config = BagConfig
    causal = False

    def __init__(self, config: BagConfig, inputs: Inputs) -> None:
        super().__init__()
        config.check(inputs)
        self.config, self.dim = config, config.dim
        self.names = list(inputs.embedded)
        self.fields = Fields(inputs, config.dim, STD)
        self.tables = nn.ModuleList(nn.Embedding(config.buckets, config.dim) for _ in config.grams)
        for table in self.tables:
            assert isinstance(table, nn.Embedding)
            nn.init.normal_(table.weight, std=STD)
        self.size = nn.Parameter(torch.zeros(config.dim))
        self.first_norm = nn.LayerNorm(config.dim)
        self.blocks = nn.ModuleList(
            Residual(config.dim, config.hidden or 2 * config.dim) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, batch: Tensors, places: Tensor | None = None) -> Tensor:
        """Return hidden states (B, T, D): of a token and of its document's bag."""
        x_BTD, document_BT = self.fields(batch.columns), batch.document
        if batch.whole:
            around_BND = self.bags(batch, document_BT, x_BTD)[:, None]
        else:
            last = max(0, int(document_BT.max()))
            around_BND = torch.stack([
                self.bags(batch, torch.where(document_BT == number, 0, -1), x_BTD)
                for number in range(last + 1)
            ], 1)  # fmt: skip
        where_BT = document_BT.clamp(min=0)
        if places is not None:
            x_BTD = taken(x_BTD, places)
            where_BT = where_BT.gather(1, places.clamp(min=0))
        return self.last(x_BTD + taken(around_BND, where_BT))

    def signature(self, batch: Tensors) -> Tensor:
        """Return a vector of each row (B, D), of all of its documents together."""
        return self.last(self.bags(batch, batch.document))

    def last(self, x: Tensor) -> Tensor:
        """Return (…, D) behind the norms and the blocks."""
        x = self.first_norm(x)
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.norm(x)

    def bags(self, batch: Tensors, document_BT: Tensor, x_BTD: Tensor | None = None) -> Tensor:
        """Return the weighed sums of embeddings (B, D) of positions whose document is not -1.

        `x`: the embeddings of single tokens, where they are there already.
        """
        inside_BT = document_BT >= 0
        salt = self.salt(document_BT.device)
        token_BT = hash_of([batch.columns[name] for name in self.names])
        weight_BT = self.kept(
            token_BT, log_counts(token_BT.masked_fill(~inside_BT, _NOTHING)), salt
        )
        sum_BD = self.single(batch, weight_BT.masked_fill(~inside_BT, 0), x_BTD)
        for gram, table in zip(self.config.grams, self.tables, strict=True):
            assert isinstance(table, nn.Embedding)
            columns = gram.columns or tuple(self.names)
            key_BT = hash_of([batch.columns[name] for name in columns])
            key_BT, there_BT = grams(key_BT, inside_BT, gram)
            if key_BT.shape[1]:
                ids_BT, weight_BT = counted(key_BT, there_BT, self.config.buckets)
                sum_BD = sum_BD + weighed(table.weight, ids_BT, self.kept(ids_BT, weight_BT, salt))
        tokens_B1 = inside_BT.sum(1, keepdim=True)
        return sum_BD + torch.log1p(tokens_B1.to(sum_BD.dtype)) * self.size

    def single(self, batch: Tensors, weight_BT: Tensor, x_BTD: Tensor | None) -> Tensor:
        """Return the weighed sum of the embeddings of single tokens, (B, D)."""
        if x_BTD is None and not self.fields.maps:
            # The sum over positions for each column needs no (B, T, D).
            parts = [weighed(self.embedding(c), batch.columns[c], weight_BT) for c in self.names]
            return torch.stack(parts).sum(0)
        x_BTD = self.fields(batch.columns) if x_BTD is None else x_BTD
        return torch.einsum("bt,btd->bd", weight_BT.to(x_BTD.dtype), x_BTD)

    def salt(self, device: torch.device) -> Tensor | None:
        """Return a number that decides which n-grams are left out now; None: none are."""
        if not (self.training and self.config.dropout):
            return None
        return torch.randint(1 << 62, (1,), device=device)

    def kept(self, key_BT: Tensor, weight_BT: Tensor, salt: Tensor | None) -> Tensor:
        """Return the weights, with 0 for keys that are left out of a row while training."""
        if salt is None:
            return weight_BT
        row_B1 = torch.arange(len(key_BT), device=key_BT.device)[:, None]
        drawn_BT = mix(key_BT + mix(row_B1 + salt)) & ((1 << 24) - 1)
        there_BT = drawn_BT >= self.config.dropout * (1 << 24)
        return weight_BT * there_BT / (1 - self.config.dropout)

    def flops_per_token(self, length: int) -> float:
        """Return the operations of a training step a token: one addition an n-gram and weight.

        What is computed once a document is left out.
        """
        return 6.0 * self.dim * (1 + len(self.config.grams))


class Residual(nn.Module):
    """x + feed-forward(LayerNorm(x)), which adds nothing at the start."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.branch = FeedForward(dim, hidden, "gelu", bias=True)
        nn.init.zeros_(self.branch.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.norm(x))


def mix(values: Tensor) -> Tensor:
    """Return the splitmix64 finaliser of int64 values (Steele, Lea and Flood 2014)."""
    # A shift of a negative number brings in ones, which the masks take away.
    values = (values ^ (values >> 30 & (1 << 34) - 1)) * _M1
    values = (values ^ (values >> 27 & (1 << 37) - 1)) * _M2
    return values ^ (values >> 31 & (1 << 33) - 1)


def hash_of(columns: list[Tensor]) -> Tensor:
    """Return a hash of the ids of some columns at each position, int64."""
    key = torch.zeros_like(columns[0])
    for ids in columns:
        key = mix(key * _GOLDEN + ids + 1)
    return key


def grams(key_BT: Tensor, inside_BT: Tensor, gram: Gram) -> tuple[Tensor, Tensor]:
    """Return a hash of the n-gram that begins at each position, and whether there is one.

    (B, T - n + 1) int64 and bool; none in rows that are shorter. With `runs` positions are counted
    without those that are left out.
    """
    if gram.runs:
        kept_BT = inside_BT.clone()
        kept_BT[:, 1:] &= (key_BT[:, 1:] != key_BT[:, :-1]) | ~inside_BT[:, :-1]
        order_BT = torch.argsort((~kept_BT).to(torch.uint8), dim=1, stable=True)
        key_BT, inside_BT = key_BT.gather(1, order_BT), kept_BT.gather(1, order_BT)
    count = max(0, key_BT.shape[1] - gram.size + 1)
    keys, there = torch.zeros_like(key_BT[:, :count]), inside_BT[:, :count]
    for step in range(gram.size):
        keys = mix(keys * _GOLDEN + key_BT[:, step : step + count])
        there = there & inside_BT[:, step : step + count]
    return keys, there


def counted(key_BT: Tensor, there_BT: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """Return the bucket of each key, ascending in its row, and ln(1 + n) at the first of n equals.

    (B, T) int64 and float32; the weight of all others, and of keys that are not `there`, is 0.
    """
    # Buckets in the order of a sort: equal ones stand side by side, so no look-up is needed.
    ids_BT = key_BT.remainder(buckets).masked_fill(~there_BT, buckets).sort(1).values
    place_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    begins_BT = torch.ones_like(there_BT)
    begins_BT[:, 1:] = ids_BT[:, 1:] != ids_BT[:, :-1]
    # The place of the next first one, or the end of the row.
    next_BT = torch.full_like(ids_BT, ids_BT.shape[1])
    next_BT[:, :-1] = torch.where(begins_BT[:, 1:], place_T[1:], ids_BT.shape[1])
    next_BT = next_BT.flip(1).cummin(1).values.flip(1)
    weight_BT = torch.log1p((next_BT - place_T).float()) * (begins_BT & (ids_BT < buckets))
    return ids_BT.clamp(max=buckets - 1), weight_BT


def weighed(table_VD: Tensor, ids_BT: Tensor, weight_BT: Tensor) -> Tensor:
    """Return the weighed sum of rows of a table, (B, D)."""
    weight_BT = weight_BT.to(table_VD.dtype)
    return nn.functional.embedding_bag(ids_BT, table_VD, mode="sum", per_sample_weights=weight_BT)


def log_counts(key_BT: Tensor) -> Tensor:
    """Return ln(1 + n) / n for the n places of each key in its row, (B, T) float32."""
    sorted_BT = key_BT.sort(1).values
    key_BT = key_BT.contiguous()
    ends_BT = torch.searchsorted(sorted_BT, key_BT, right=True)
    count_BT = (ends_BT - torch.searchsorted(sorted_BT, key_BT)).float()
    return torch.log1p(count_BT) / count_BT
