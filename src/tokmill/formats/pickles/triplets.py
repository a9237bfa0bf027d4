"""Pickles of triplets of intervals: (blocks, weights) of anchor, positive and negative.

A file is a list of tuples (anchor blocks, anchor weights, positive blocks, positive weights,
negative blocks, negative weights), and with CPI also (…, CPI of the anchor, of the positive, of the
negative). Blocks are numbers, or vectors (numpy arrays or lists of numbers). Source of the format:
SemanticBBV, `pre_processing/asm_bbv_dataset.py` and `asm_bbv_cpi_dataset.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.unpickle import Pickle, array_of
from tokmill.builds.scan import FolderOptions, find_files
from tokmill.builds.source import GatheredFiles, Request
from tokmill.store.checks.hashes import record_digests
from tokmill.store.manifest import Reference
from tokmill.store.references import reference_to
from tokmill.store.schema import ROLE, ROLES, Array, Column, Drops, Records, Schema

MEMBERS = len(ROLES)
REFERENCE = "blocks"
BLOCKS = 1 << 16
"""Blocks in a batch, about."""
SIZES = {2 * MEMBERS: False, 3 * MEMBERS: True}
"""Parts of an entry → whether it has a CPI for each member."""


class TripletsConfig(FolderOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of pickles of triplets."""

    width: Annotated[int, Meta(ge=0)] | None = None
    """Dimensions of a block's vector, 0 for block numbers; by default as in the first entry."""
    cpi: bool | None = None
    """Whether entries have CPI; by default as in the first entry."""
    vectors: Literal["f4", "f8"] | None = None
    """f4 or f8: type of the vectors' numbers; by default as in the first entry."""
    weights: Literal["u8", "f8"] | None = None
    """u8 or f8: whole numbers from 0 on, or any; by default as in the first entry."""
    blocks: str = ""
    """Store whose record numbers the block numbers are; needed for training."""


class TripletsSource(GatheredFiles):
    """Pickles of triplets: three records an entry, in the order anchor, positive, negative.

    Columns: `block` (a number) or `vector`, and `weight`, a value a token; `role` (0 anchor, 1
    positive, 2 negative), `content` (equal for members with equal blocks and weights) and, if the
    file has it, `cpi`. A record's place is the number of its entry. Numbers are kept as they are,
    or refused. No code in a file is run. An entry of which a member has no blocks is left out.
    """

    Config: ClassVar[type[msgspec.Struct]] = TripletsConfig
    version: ClassVar[int] = 3
    has_tokenizer: ClassVar[bool] = False
    places = "record"
    suffixes = (".pkl", ".pickle")
    config: TripletsConfig

    def prepare(self) -> None:
        blocks = str(Path(self.config.blocks).absolute()) if self.config.blocks else ""
        self.config = msgspec.structs.replace(self.config, blocks=blocks)
        if blocks and self.config.width:
            raise UsageError("the blocks are vectors, and no numbers", hint="leave --blocks out")
        self.blocks = reference_to(blocks) if blocks else None
        self.block = "vector" if self.config.width else "block"

    @classmethod
    def resolve(cls, config: Any, request: Request) -> Any:
        """Return the options with what the first entry has whose members have blocks."""
        kinds = {"width": 0, "cpi": False, "vectors": "f4", "weights": "f8"}
        for file in find_files(request.inputs, cls.suffixes, choice=config).files:
            pickle = Pickle(file.path)
            entries = (Entry(pickle, *one) for one in pickle.entries())
            if first := next((one for one in entries if one.filled), None):
                kinds = first.kinds
                break
        open_ = {key: value for key, value in kinds.items() if getattr(config, key) is None}
        return msgspec.structs.replace(config, **open_)

    @cached_property
    def schema(self) -> Schema:
        config = self.config
        numbers = Column("u8", ref=REFERENCE if self.blocks else None)
        vectors = Column(config.vectors or "f4", width=config.width or 0)
        cpi = {"cpi": Column("f8", per="record")} if config.cpi else {}
        return {
            self.block: vectors if config.width else numbers,
            "weight": Column(config.weights or "f8"),
            "role": ROLE,
            "content": Column("u8", per="record"),
            **cpi,
        }

    def identity(self) -> dict[str, Any]:
        """Return no name of the store of blocks: the plan has its fingerprint."""
        return {"blocks": None}

    def references(self) -> dict[str, Reference]:
        return {REFERENCE: self.blocks} if self.blocks else {}

    def gather(self, path: Path) -> _Entries:
        return _Entries(path, self)

    def records(self, entries: list[Entry], empty: list[int]) -> Records:
        """Return entries as records; `empty`: the numbers of those that are left out."""
        blocks = [part for entry in entries for part in entry.blocks]
        weights = [part for entry in entries for part in entry.weights]
        width = self.config.width
        nothing = np.zeros((0, width) if width else 0, self.schema[self.block].numpy())
        number = np.asarray([entry.number for entry in entries], np.int64)
        offsets = np.cumsum([0, *map(len, weights)])
        columns: dict[str, Any] = {
            self.block: np.concatenate([nothing, *blocks]),
            "weight": np.concatenate([np.zeros(0, self.schema["weight"].numpy()), *weights]),
            "role": np.tile(np.arange(MEMBERS, dtype="u1"), len(entries)),
        }
        digests = record_digests(Records(offsets, columns, offsets[:-1]), [self.block, "weight"])
        # A task reads them as int64.
        columns["content"] = digests["a"] >> np.uint64(1)
        if self.config.cpi:
            columns["cpi"] = np.asarray([entry.cpi for entry in entries], "<f8").ravel()
        return Records(
            offsets,
            columns,
            np.repeat(number, MEMBERS),
            [Drops(np.asarray(empty, np.int64), "a member has no blocks", False)] if empty else (),
        )


class _Entries:
    def __init__(self, path: Path, source: TripletsSource) -> None:
        self.path, self.source = path, source
        self.entries: list[Entry] = []
        self.empty: list[int] = []

    def positions(self) -> Iterator[int]:
        pickle, config, blocks = Pickle(self.path), self.source.config, self.source.blocks
        budget = pickle.budget()
        for number, value in pickle.entries():
            entry = Entry(pickle, number, value)
            entry.check(config, blocks.records if blocks else 1 << 64)
            budget.take(16 + sum(8 * len(weights) for weights in entry.weights))
            if entry.filled:
                self.entries.append(entry)
            else:
                self.empty.append(entry.number)
            yield pickle.position

    def is_full(self, size: int) -> bool:
        return sum(one.size for one in self.entries) > BLOCKS

    def records(self) -> Records:
        result = self.source.records(self.entries, self.empty)
        self.entries, self.empty = [], []
        return result


class Entry:
    """One entry of a file, checked: blocks and weights of each member as arrays."""

    def __init__(self, pickle: Pickle, number: Any, value: Any) -> None:
        self.path, self.number = pickle.path, 0 if pickle.holds is dict else number
        if pickle.holds is dict:
            raise self.unfit("the file is a dict, not a list")
        if not isinstance(value, tuple | list) or len(value) not in SIZES:
            many = f" of {len(value)}" if hasattr(value, "__len__") else ""
            raise self.unfit(f"{type(value).__name__}{many} is not a tuple of 6 or 9")
        has_cpi = SIZES[len(value)]
        self.blocks = [self._blocks(value[2 * i]) for i in range(MEMBERS)]
        self.weights = [self._numbers(value[2 * i + 1]) for i in range(MEMBERS)]
        self.cpi = self._numbers(list(value[2 * MEMBERS :]))
        for blocks, weights in zip(self.blocks, self.weights, strict=True):
            if len(blocks) != len(weights):
                raise self.unfit(f"{len(blocks)} blocks and {len(weights)} weights")
        widths = {block.shape[1] if block.ndim > 1 else 0 for block in self.blocks if len(block)}
        if len(widths) > 1:
            raise self.unfit(f"vectors of {', '.join(map(str, sorted(widths)))} numbers")
        self.filled = all(len(weights) for weights in self.weights)
        self.size = sum(block.size for block in self.blocks)
        narrow = all(np.can_cast(block.dtype, np.float32) for block in self.blocks)
        whole = all(one.dtype.kind in "iu" and one.min(initial=0) >= 0 for one in self.weights)
        self.kinds: dict[str, Any] = {
            "width": widths.pop() if widths else 0,
            "cpi": has_cpi,
            "vectors": "f4" if narrow else "f8",
            "weights": "u8" if whole else "f8",
        }

    def check(self, config: TripletsConfig, records: int) -> None:
        """Refuse an entry of another kind than the first, and numbers that cannot be kept.

        `records`: number of records of the store of blocks.
        """
        width, own = config.width, self.kinds["width"]
        if self.size and own != width:
            raise self.unfit(f"blocks of {own or 'no'} numbers, not of {width or 'no'}")
        if self.kinds["cpi"] != config.cpi:
            raise self.unfit("CPI in some entries, not in all")
        if width:
            self.blocks = [self._exact(one, config.vectors, "vectors") for one in self.blocks]
        elif any((one >= records).any() for one in self.blocks):
            raise self.unfit(f"a block beyond the {records:,} records of {config.blocks}")
        self.weights = [self._exact(one, config.weights, "weights") for one in self.weights]
        self.cpi = self._exact(self.cpi, "f8", "cpi")

    def unfit(self, why: str, hint: str = "") -> TokmillError:
        return TokmillError(
            f"no triplet of intervals: {why}",
            where=f"{self.path}, entry {self.number}",
            hint=hint or "`tokmill inspect` shows what the file holds",
        )

    def _exact(self, array: Array, dtype: str | None, option: str) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            result = array.astype(dtype)
        if result.dtype != array.dtype:
            # Python compares integers with floats exactly.
            for old, new in zip(array.ravel().tolist(), result.ravel().tolist(), strict=True):
                if old != new:
                    raise self.unfit(
                        f"{old} in {option}, which {dtype} does not hold exactly",
                        "types for all entries: --weights u8 or f8, --vectors f4 or f8",
                    )
        return result

    def _numbers(self, value: Any) -> Array:
        array = array_of(value)
        if array is None and isinstance(value, list | tuple):
            kinds = {type(one) for one in value}
            if kinds - {int, float}:
                raise self.unfit("weights or CPI that are not numbers")
            whole = np.int64 if min(value, default=0) < 0 else np.uint64
            try:
                array = np.asarray(value, np.float64 if float in kinds else whole)
            except OverflowError:
                raise self.unfit("numbers of more than 64 bits") from None
            if len(kinds) > 1 and array.tolist() != list(value) and np.isfinite(array).all():
                raise self.unfit("fractions, and a whole number that no float holds")
        if array is None or array.ndim != 1 or array.dtype.kind not in "iuf":
            raise self.unfit(f"{type(value).__name__} in place of a list of numbers")
        if not np.isfinite(array).all():
            raise self.unfit("a number that is not finite")
        return array

    def _blocks(self, value: Any) -> Array:
        """Return the blocks of a member: numbers (n,), or vectors (n, width)."""
        array = array_of(value)
        if array is None and isinstance(value, list | tuple):
            if all(type(one) is int for one in value):
                array = self._numbers(value)
            else:
                parts = [self._numbers(one) for one in value]
                if len({len(part) for part in parts}) > 1 or not len(parts[0]):
                    raise self.unfit("vectors of several lengths, or of none")
                if len({part.dtype for part in parts}) > 1:
                    parts = [self._exact(part, "f8", "vectors") for part in parts]
                array = np.stack(parts)
        if array is None or array.ndim not in (1, 2) or array.dtype.kind not in "iuf":
            raise self.unfit(f"{type(value).__name__} in place of a list of blocks")
        if array.ndim == 1 and (array.dtype.kind == "f" or array.min(initial=0) < 0):
            raise self.unfit("numbers of blocks are whole and from 0 on")
        if array.ndim == 2 and not array.shape[1]:
            raise self.unfit("vectors of no numbers")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise self.unfit("a vector that is not finite")
        return array if array.ndim > 1 else array.astype(np.uint64)
