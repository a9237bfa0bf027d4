"""`build mine`: entries for contrastive learning, made of the records of one store."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from tokmill.base.errors import UsageError
from tokmill.base.files import machine_errors, sampled
from tokmill.builds.mining.intervals import NO_NEGATIVE, NO_POSITIVE, NO_SEMI_HARD, Intervals
from tokmill.builds.mining.mine_triplets import ALONE, Groups, Triplets
from tokmill.builds.mining.name_columns import AMBIGUOUS, NAMELESS, WHY
from tokmill.builds.source import Hash, Item, Source
from tokmill.store.manifest import Reference
from tokmill.store.references import reference_to
from tokmill.store.schema import Column, Records, Schema, id_dtype
from tokmill.store.store import Store

What = Literal["triplets", "groups", "bbv"]
REF = "records"
"""Name of the reference to the store that is mined."""


class MineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is mined, and how records are chosen."""

    what: What = "triplets"
    """triplets: anchor, positive, negative; groups: several records of one function; bbv:
    triplets of intervals."""
    seed: int = 0
    """Seed of the random choice of positives and negatives."""
    same: tuple[str, ...] = ()
    """Columns in which records of one function are equal; by default project, program, function and
    part, as far as the store has them."""
    differ: tuple[str, ...] = ()
    """Columns of which at least one differs between anchor and positive; by default compiler and
    level."""
    apart: tuple[str, ...] = ()
    """Records that are equal in these columns are never negatives; by default function."""
    nameless: str = "sub_[0-9a-f]+|"
    """Regular expression of meaningless names; such records are left out."""
    count: Annotated[int, Meta(ge=1)] = 1
    """Triplets of each anchor."""
    negatives: Literal["random", "semi-hard"] = "random"
    """random; semi-hard: less similar to the anchor than the positive, by less than the margin
    (intervals)."""
    margin: Annotated[float, Meta(gt=0, le=2)] = 0.2
    """Margin of semi-hard negatives, as a cosine."""
    members: Annotated[int, Meta(ge=2)] = 8
    """Largest number of records in a group; a function with more makes several groups."""
    dimensions: Annotated[int, Meta(ge=1, le=4096)] = 100
    """Dimensions of a projected vector (intervals)."""
    above: Annotated[float, Meta(ge=-1000, le=1000)] = 0.5
    """Cosines of positive intervals are above the mean of all pairs of the program by this number
    of standard deviations; if none is, above that quantile of a normal distribution."""
    below: Annotated[float, Meta(ge=-1000, le=1000)] = 1.0
    """Cosines of negative intervals are below the mean by this number of standard deviations, or
    below that quantile."""
    neighbours: Annotated[int, Meta(ge=0)] = 0
    """Positive intervals are among this number of nearest ones, and above the threshold;
    0: any above the threshold."""
    cpi: bool = False
    """Leave out intervals without a CPI."""
    across: bool = False
    """Pair intervals of different programs too."""


NAMES = ("same", "differ", "apart", "nameless")
OPTIONS_OF: dict[str, tuple[str, ...]] = {
    "triplets": (*NAMES, "count"),
    "groups": (*NAMES, "members"),
    "bbv": ("count", "negatives", "margin", "dimensions", "above", "below", "neighbours", "cpi",
            "across"),
}  # fmt: skip
"""What is mined → the options that it reads besides `seed`."""


MINERS: dict[str, type[Triplets | Groups | Intervals]] = {
    "triplets": Triplets, "groups": Groups, "bbv": Intervals,
}  # fmt: skip


THRESHOLDS = (
    "--above, --below and --margin set the similarity of pairs; intervals with equal counts are "
    "not a pair"
)


class MineSource(Source):
    """Entries of a store's records, as columns of references to that store.

    An item is a shard of the store: it has the entries of the anchors (of groups: of the first
    records) in it. Positives and negatives may be any records of the store.
    """

    Config: ClassVar[type[msgspec.Struct]] = MineConfig
    places = "record"
    version: ClassVar[int] = 5
    has_tokenizer: ClassVar[bool] = False
    is_bounded = False
    hints: ClassVar[Mapping[str, str]] = {
        ALONE: "if paths say what was built how, `tokmill build x86 --layout` reads it; `tokmill "
        "inspect STORE --head 3` shows the columns, --same and --differ name others",
        **dict.fromkeys((NO_POSITIVE, NO_NEGATIVE, NO_SEMI_HARD), THRESHOLDS),
        WHY[NAMELESS]: "programs without symbols have no names to pair functions by",
        WHY[AMBIGUOUS]: "name the columns that distinguish these records: --same",
    }
    schema: Schema = {}
    config: MineConfig

    def prepare(self) -> None:
        check(self.config)
        self.store = open_store(self.inputs)
        ref = Column(id_dtype(max(1, len(self.store))), per="record", ref=REF)
        scratch = self.resources.scratch
        self.miner = MINERS[self.config.what](self.store, self.config, scratch, ref)
        self.schema = dict(self.miner.columns)

    def identity(self) -> dict[str, Any]:
        """Return null for options that are not read, and the columns that are compared."""
        read = OPTIONS_OF[self.config.what]
        unused = [key for key in MineConfig.__struct_fields__ if key not in ("what", "seed", *read)]
        return {**dict.fromkeys(unused), **self.miner.identity()}

    def references(self) -> dict[str, Reference]:
        return {REF: reference_to(self.store.path)}

    def items(self) -> Iterator[Item]:
        for place, entry in enumerate(self.store.shards):
            path = self.store.shard_file(place).absolute()
            with machine_errors("read", path):
                digest = sampled(path)[1]
            yield Item(f"{place:08d}/{entry.name}", str(path), 0, entry.bytes, digest)

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        place = int(item.name.partition("/")[0])
        digest.update(f"{self.store.fingerprint} {self.store.shards[place].sha256}".encode())
        yield from self.miner.read(place)


def open_store(inputs: Sequence[str]) -> Store:
    """Open the store that is mined."""
    if len(inputs) != 1:
        raise UsageError(
            f"entries refer to one store, not to {len(inputs) or 'none'}",
            hint="merge stores first: tokmill build select STORE STORE -o MERGED",
        )
    return Store(Path(inputs[0])).whole()


def check(config: MineConfig) -> None:
    read = OPTIONS_OF[config.what]
    for key in MineConfig.__struct_fields__:
        if key in ("what", "seed", *read) or getattr(config, key) == getattr(MineConfig(), key):
            continue
        others = [what for what, options in OPTIONS_OF.items() if key in options]
        raise UsageError(
            f"{key.replace('_', '-')} does nothing where {config.what} are mined",
            hint=f"it is for --what {' and '.join(others)}",
        )
