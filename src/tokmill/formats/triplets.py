"""Pickles of triplets of intervals: (blocks, weights) of anchor, positive and negative.

A file is a list of tuples (anchor blocks, anchor weights, positive blocks, positive weights,
negative blocks, negative weights), and with CPI also (…, CPI of the anchor, of the positive, of the
negative). Blocks are numbers, or vectors (numpy arrays or lists of numbers). Source of the format:
SemanticBBV, `pre_processing/asm_bbv_dataset.py` and `asm_bbv_cpi_dataset.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import msgspec
import numpy as np

from tokmill.builds.scan import FolderOptions, find_files
from tokmill.builds.source import MAX_ITEM, Frozen, Hash, Item, Request, Resources, Source
from tokmill.errors import TokmillError, UsageError
from tokmill.files import machine_errors
from tokmill.store.schema import Array, Column, Drops, Records, Schema
from tokmill.unpickle import Pickle, array_of

MEMBERS = 3
BLOCKS = 1 << 16
"""Blocks in a batch, about."""
SIZES = {2 * MEMBERS: False, 3 * MEMBERS: True}
"""Parts of an entry → whether it has a CPI for each member."""


class TripletsConfig(FolderOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of pickles of triplets."""

    width: int | None = None
    """Numbers of a block's vector, 0 if blocks are numbers; by default as in the first entry."""
    cpi: bool | None = None
    """Whether entries have CPI; by default as in the first entry."""


class TripletsSource(Source):
    """Pickles of triplets: three records an entry, in the order anchor, positive, negative.

    Columns: `block` (a number) or `vector`, and `weight`, a value a token; `entry` (number in the
    file), `role` (0 anchor, 1 positive, 2 negative) and, if the file has it, `cpi`. A record's
    place is the number of its entry. No code in a file is run. An entry of which a member has no
    blocks is left out.
    """

    Config: ClassVar[type[msgspec.Struct]] = TripletsConfig
    version: ClassVar[int] = 1
    has_tokenizer: ClassVar[bool] = False
    places = "record"
    suffixes = (".pkl", ".pickle")

    def __init__(
        self,
        config: Any,
        inputs: Sequence[str],
        vocabularies: Mapping[str, Frozen],
        resources: Resources,
    ) -> None:
        self.config: TripletsConfig = config
        self.inputs = list(inputs)

    @classmethod
    def freeze(cls, config: Any, request: Request) -> dict[str, Frozen]:
        """Return no vocabulary."""
        if request.tokenizer is not None or request.roles:
            raise UsageError("triplets have no tokenizer", hint="leave it out")
        return {}

    @classmethod
    def resolve(cls, config: Any, request: Request) -> Any:
        """Return the options with what the first entry of the first file has."""
        if config.width is None or config.cpi is None:
            for file in find_files(request.inputs, cls.suffixes, choice=config).files:
                for number, entry in Pickle(file.path).entries():
                    first = Entry(file.path, number, entry)
                    width = first.width if config.width is None else config.width
                    cpi = first.has_cpi if config.cpi is None else config.cpi
                    return msgspec.structs.replace(config, width=width, cpi=cpi)
            config = msgspec.structs.replace(config, width=config.width or 0, cpi=bool(config.cpi))
        if config.width < 0:
            raise UsageError(f"width = {config.width}", hint="0 for numbers of blocks")
        return config

    @cached_property
    def schema(self) -> Schema:
        """The columns of the store."""
        width = self.config.width or 0
        block = {"vector": Column("f4", width=width)} if width else {"block": Column("u8")}
        cpi = {"cpi": Column("f4", per="record")} if self.config.cpi else {}
        return {
            **block,
            "weight": Column("f4"),
            "entry": Column("u8", per="record"),
            "role": Column("u1", per="record"),
            **cpi,
        }

    def identity(self) -> dict[str, Any]:
        """Return nothing: width and CPI are in the schema."""
        return {}

    def items(self) -> Iterator[Item]:
        """Yield the files whole, as a pickle can only be read from its beginning."""
        found = find_files(self.inputs, self.suffixes, choice=self.config)
        self.left_out = found.left_out
        for file in found.files:
            yield Item(file.name, str(file.path.absolute()), 0, file.size, file.digest)

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        """Yield the entries of a file, in parts of 64 MiB."""
        path, part = Path(item.path), 0
        pickle = Pickle(path)
        budget = pickle.budget()
        entries: list[Entry] = []
        empty: list[int] = []
        with machine_errors("read", path), open(path, "rb") as raw:
            for number, value in pickle.entries():
                entry = Entry(path, number, value)
                entry.check(self.config.width or 0, bool(self.config.cpi))
                budget.take(16 + sum(8 * len(weights) for weights in entry.weights))
                if all(len(weights) for weights in entry.weights):
                    entries.append(entry)
                else:
                    empty.append(entry.number)
                ends_part = pickle.position >= (part + 1) * MAX_ITEM
                if ends_part or sum(one.size for one in entries) > BLOCKS:
                    if part < item.parts_done:
                        raw.seek(pickle.position)
                    else:
                        _digest(raw, pickle.position, digest)
                        made = self._records(entries, empty, ends_part)
                        made.done = min(1.0, pickle.position / max(1, item.size))
                        yield made
                    part += ends_part
                    entries, empty = [], []
            check_end(pickle, item.size)
            if part >= item.parts_done:
                _digest(raw, item.stop, digest)
                made = self._records(entries, empty, ends_part=False)
                made.done = 1.0
                yield made

    def _records(self, entries: list[Entry], empty: list[int], ends_part: bool) -> Records:
        width, name = self.config.width or 0, "vector" if self.config.width else "block"
        blocks = [part for entry in entries for part in entry.blocks]
        weights = [part for entry in entries for part in entry.weights]
        nothing = np.zeros((0, width) if width else 0, self.schema[name].numpy())
        number = np.asarray([entry.number for entry in entries], np.int64)
        columns: dict[str, Any] = {
            name: np.concatenate([nothing, *blocks]).astype(nothing.dtype),
            "weight": np.concatenate([np.zeros(0), *weights]).astype("<f4"),
            "entry": np.repeat(number, MEMBERS).astype("<u8"),
            "role": np.tile(np.arange(MEMBERS, dtype="u1"), len(entries)),
        }
        if self.config.cpi:
            columns["cpi"] = np.asarray([entry.cpi for entry in entries], "<f4").ravel()
        return Records(
            np.cumsum([0, *map(len, weights)]),
            columns,
            np.repeat(number, MEMBERS),
            [Drops(np.asarray(empty, np.int64), "a member has no blocks", False)] if empty else (),
            ends_part=ends_part,
        )


class Entry:
    """One entry of a file, checked: blocks and weights of each member as arrays.

    Raises `TokmillError` for anything else.
    """

    def __init__(self, path: Path, number: Any, value: Any) -> None:
        self.path, self.number = path, number
        if not isinstance(number, int):
            raise self.unfit("the file is a dict, not a list")
        if not isinstance(value, tuple | list) or len(value) not in SIZES:
            held = f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else value
            raise self.unfit(f"{str(held)[:60]} is no tuple of 6 or 9")
        self.has_cpi = SIZES[len(value)]
        self.blocks = [self._blocks(value[2 * i]) for i in range(MEMBERS)]
        self.weights = [self._numbers(value[2 * i + 1]) for i in range(MEMBERS)]
        self.cpi = self._numbers(list(value[2 * MEMBERS :]))
        for blocks, weights in zip(self.blocks, self.weights, strict=True):
            if len(blocks) != len(weights):
                raise self.unfit(f"{len(blocks)} blocks and {len(weights)} weights")
        widths = {block.shape[1] if block.ndim > 1 else 0 for block in self.blocks if len(block)}
        if len(widths) > 1:
            raise self.unfit(f"vectors of {', '.join(map(str, sorted(widths)))} numbers")
        self.width = widths.pop() if widths else 0
        self.size = sum(block.size for block in self.blocks)

    def check(self, width: int, has_cpi: bool) -> None:
        """Refuse an entry of another kind than the first; `width` of the vectors, or 0."""
        if self.size and self.width != width:
            raise self.unfit(f"blocks of {self.width or 'no'} numbers, not of {width or 'no'}")
        if self.has_cpi != has_cpi:
            raise self.unfit("CPI in some entries, not in all")
        if not self.size and width:
            self.blocks = [block.reshape(0, width) for block in self.blocks]

    def unfit(self, why: str) -> TokmillError:
        """Return the error of this entry."""
        return TokmillError(
            f"no triplet of intervals: {why}",
            where=f"{self.path}, entry {self.number}",
            hint="`tokmill inspect` shows what the file holds",
        )

    def _numbers(self, value: Any) -> Array:
        """Return a flat array of finite numbers below the largest float32."""
        array = array_of(value)
        if array is None and isinstance(value, list | tuple):
            if not all(type(one) in (int, float) for one in value):
                raise self.unfit("weights or CPI that are no numbers")
            if any(isinstance(one, int) and abs(one) >= 1 << 64 for one in value):
                raise self.unfit("a number of more than 64 bits")
            array = np.asarray(value, np.float64)
        if array is None or array.ndim != 1 or array.dtype.kind not in "iuf":
            raise self.unfit(f"{type(value).__name__} in place of a list of numbers")
        with np.errstate(over="ignore"):
            if not np.isfinite(array.astype(np.float32)).all():
                raise self.unfit("a number that is not finite, or that no float32 holds")
        return array

    def _blocks(self, value: Any) -> Array:
        """Return the blocks of a member: numbers (n,), or vectors (n, width)."""
        array = array_of(value)
        if array is None and isinstance(value, list | tuple):
            if all(type(one) is int for one in value):
                if any(not 0 <= one < 1 << 64 for one in value):
                    raise self.unfit("numbers of blocks are from 0 on, of 64 bits at most")
                return np.asarray(value, np.uint64)
            parts = [self._numbers(one) for one in value]
            if len({len(part) for part in parts}) > 1 or not len(parts[0]):
                raise self.unfit("vectors of several lengths, or of none")
            array = np.stack(parts)
        if array is None or array.ndim not in (1, 2) or array.dtype.kind not in "iuf":
            raise self.unfit(f"{type(value).__name__} in place of a list of blocks")
        if array.ndim == 1 and (array.dtype.kind == "f" or array.min(initial=0) < 0):
            raise self.unfit("numbers of blocks are whole and from 0 on")
        if array.ndim == 2 and not array.shape[1]:
            raise self.unfit("vectors of no numbers")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise self.unfit("a vector that is not finite")
        return array


def check_end(pickle: Pickle, size: int) -> None:
    """Refuse bytes after a pickle, which would be lost."""
    if pickle.stop != size:
        raise TokmillError(
            f"{size - pickle.stop:,} bytes follow the pickle, perhaps another one",
            where=f"{pickle.path}, byte {pickle.stop:,}",
            hint="write each into a file of its own",
        )


def _digest(raw: BinaryIO, stop: int, digest: Hash) -> None:
    """Update `digest` with the file's bytes up to a place."""
    while data := raw.read(min(1 << 20, stop - raw.tell())):
        digest.update(data)
