"""Sources of overlays, and `build overlay`: columns from a numpy file, a shard at a time."""

import hashlib
import os
import shlex
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import machine_errors, open_file, read_file, sampled
from tokmill.base.headers import ZIP_ERRORS, array_header
from tokmill.builds.source import Hash, Item, Source
from tokmill.store.manifest import Overlay, Reference, ShardEntry
from tokmill.store.overlay import LOSS, check_mask, overlay_path
from tokmill.store.references import reference_to
from tokmill.store.schema import Array, Column, DType, Records, Schema, check_schema
from tokmill.store.store import Store

BLOCK = 4096
"""Records in a batch."""


class OverlaySource(Source):
    """Makes columns for the records of one store, which is its input.

    An item is named by the name and digest of its shard in the store. So after the store has grown,
    only the new shards are made.
    """

    version: ClassVar[int] = 1
    places = "record"
    has_tokenizer: ClassVar[bool] = False
    is_overlay: ClassVar[bool] = True
    is_bounded = False
    schema: Schema = {}

    def prepare(self) -> None:
        self.base = open_base(self.inputs)
        self._places = {shard_identity(entry): i for i, entry in enumerate(self.base.shards)}

    @classmethod
    def name_of(cls, config: Any) -> str:
        return config.name

    @classmethod
    def folder(cls, config: Any, inputs: Sequence[str]) -> Path:
        return overlay_path(open_base(inputs).path, cls.name_of(config))

    def item(self, number: int, more: str = "") -> Item:
        """Return the item of a shard; `more` is added to its name."""
        entry = self.base.shards[number]
        path = self.base.shard_file(number).absolute()
        with machine_errors("read", path):
            digest = sampled(path)[1]
        name = shard_identity(entry) + more
        return Item(name, str(path), 0, entry.bytes, digest, alone=True)

    def place(self, item: Item) -> tuple[int, str]:
        """Return the number of an item's shard, and the part `more` of its name."""
        *identity, more = [*item.name.split("/"), ""][:3]
        place = self._places.get("/".join(identity))
        if place is None:
            raise TokmillError(
                "the store has changed since the build was planned",
                where=str(self.base.path),
                hint="run the same command again: it uses the store as it is now",
            )
        return place, more

    def check_columns(self, hint: str) -> None:
        for column in self.schema:
            if column in self.base.schema:
                raise UsageError(
                    f"the store has a column {column!r} already",
                    where=str(self.base.path),
                    hint=hint,
                )

    def records(self, number: int, values: Mapping[str, Array]) -> Iterator[Records]:
        """Yield the columns of a shard, flat or (n, width), as records, a block at a time."""
        offsets = self.base.shard(number)["offsets"].astype(np.int64)
        for start in range(0, len(offsets) - 1, BLOCK):
            stop = min(start + BLOCK, len(offsets) - 1)
            tokens = slice(int(offsets[start]), int(offsets[stop]))
            columns: dict[str, Any] = {
                name: value[tokens if self.schema[name].per == "token" else slice(start, stop)]
                for name, value in values.items()
            }
            yield Records(
                offsets[start : stop + 1] - offsets[start],
                columns,
                np.arange(start, stop),
                done=stop / (len(offsets) - 1),
            )


def open_base(inputs: Sequence[str]) -> Store:
    """Open the store for which an overlay is made; it must be finished."""
    if len(inputs) != 1:
        raise UsageError(
            f"an overlay belongs to one store, not to {len(inputs) or 'none'}",
            hint="name the one store that gets the columns",
        )
    store = Store(Path(inputs[0])).whole()
    if isinstance(store.manifest.overlay, msgspec.Struct):
        raise UsageError(
            "this is an overlay itself",
            where=str(store.path),
            hint=f"name the store to which it belongs: {store.path.parent.parent}",
        )
    return store


def shard_identity(entry: ShardEntry) -> str:
    """Return name and digest of a shard, which change when its content changes."""
    return f"{entry.name}/{entry.sha256[:24]}"


Per = Literal["record", "token"]
NPY, ZIP = b"\x93NUMPY", b"PK\x03\x04"
LOOKED_AT = 1 << 22
"""Values that are read at a time."""


class ValuesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The values that become columns, and their names."""

    values: str = ""
    """The file, .npy or .npz: one row per record, or one value per token."""
    name: str = ""
    """Name of the overlay; by default the name of the file."""
    column: str = ""
    """Name of the column; by default the name of the overlay. For an .npz file: the array to use;
    by default all arrays, with their own names."""
    per: Literal["auto", "record", "token"] = "auto"
    """Whether there is a value per record or a value per token; auto: known from the length."""
    refer: tuple[str, ...] = ()
    """COLUMN=STORE: the values of the column are record numbers of that store."""


class ValuesSource(OverlaySource):
    """Columns from a numpy file; nothing is unpickled.

    Integers get the smallest type of a store that holds them, floats become float32. A second axis
    is the width of vectors.
    """

    Config: ClassVar[type[msgspec.Struct]] = ValuesConfig
    version: ClassVar[int] = 2
    config: ValuesConfig

    def prepare(self) -> None:
        super().prepare()
        config = self.config
        path = file_of(config).absolute()
        self.referred = split_references(config.refer)
        self.config = msgspec.structs.replace(
            config,
            values=str(path),
            refer=tuple(f"{column}={store}" for column, store in self.referred.items()),
        )
        self.arrays = open_arrays(path, self.name_of(config), config.column)
        self.schema = {}
        for name, array in self.arrays.items():
            where = f"{path}, {name}" if len(self.arrays) > 1 else str(path)
            per = per_of(self.base, len(array), config.per, where)
            width = array.shape[1] if array.ndim == 2 else 0
            ref = name if name in self.referred else None
            column = Column(smallest(path, name, array), per=per, width=width, ref=ref)
            if name == LOSS:
                check_mask(column, extremes(array), where)
            self.schema[name] = column
        check_schema(self.schema)
        self.check_columns("give the new one another name: --column")
        for column_name in self.referred:
            if column_name not in self.schema:
                raise UsageError(
                    f"refer: the file gives no column {column_name!r}",
                    where=str(path),
                    hint=nearest(column_name, self.schema),
                )
        self.overlay = Overlay(base=self.base.fingerprint)
        self.command = self._command()

    @classmethod
    def name_of(cls, config: Any) -> str:
        return str(config.name or file_of(config).stem)

    def identity(self) -> dict[str, Any]:
        """Return the columns in place of names and paths; the items have digests of the values."""
        return {"values": "", "name": "", "column": list(self.schema)}

    def references(self) -> dict[str, Reference]:
        """Return the stores to which columns refer; a number beyond their records is refused."""
        result: dict[str, Reference] = {}
        path = Path(self.config.values)
        for column, store in self.referred.items():
            result[column] = reference_to(store)
            _, high = extremes(self.arrays[column])
            if high >= result[column].records:
                raise UsageError(
                    f"{column} holds {high}, and the store {store} has the records 0 to "
                    f"{result[column].records - 1}",
                    where=str(path),
                    hint="records are numbered from 0, in the order of the store",
                )
        return result

    def items(self) -> Iterator[Item]:
        """Yield the shards of the store; a name includes the digest of the shard's values."""
        for number in range(len(self.base.shards)):
            yield self.item(number, f"/{self.digest_of(number)}")

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        number, planned = self.place(item)
        if self.digest_of(number) != planned:
            raise TokmillError(
                "the file has changed since the build was planned",
                where=self.config.values,
                hint="run the same command again with --yes",
            )
        digest.update(planned.encode())
        for values in self.part(number).values():
            for block in blocks(values):
                digest.update(block.tobytes())
        for batch in self.records(number, self.part(number)):
            for name, column in self.schema.items():
                batch.columns[name] = np.ascontiguousarray(batch.columns[name], column.numpy())
            yield batch

    def part(self, number: int) -> dict[str, Array]:
        before, here = self.base.shards[:number], self.base.shards[number]
        result = {}
        for name, array in self.arrays.items():
            unit = "tokens" if self.schema[name].per == "token" else "records"
            start = sum(getattr(entry, unit) for entry in before)
            result[name] = array[start : start + getattr(here, unit)]
        return result

    def digest_of(self, number: int) -> str:
        digest = hashlib.sha256()
        for name, values in self.part(number).items():
            column = self.schema[name]
            digest.update(f"{name} {values.dtype.str} {column.dtype} {column.per} ".encode())
            digest.update(f"{values.shape}".encode())
            for block in blocks(values):
                digest.update(block.tobytes())
        return digest.hexdigest()[:24]

    def _command(self) -> str:
        config = self.config
        words = ["tokmill", "build", "overlay", str(self.base.path.absolute())]
        words += ["--values", config.values, "--name", self.name_of(config)]
        words += ["--column", config.column] if config.column else []
        words += ["--per", config.per] if config.per != "auto" else []
        words += [word for refer in config.refer for word in ("--refer", refer)]
        return shlex.join([*words, "--yes"])


def split_references(refer: Sequence[str]) -> dict[str, str]:
    """Return column → absolute path of the store that it refers to, from COLUMN=STORE."""
    result: dict[str, str] = {}
    for text in refer:
        column, sign, store = text.partition("=")
        if not (column and sign and store) or column in result:
            raise UsageError(
                f"refer: {text!r} is not COLUMN=STORE, or names a column again",
                hint="--refer positive=STORE, once a column",
            )
        result[column] = os.path.abspath(store)
    return result


def blocks(values: Array) -> Iterator[Array]:
    rows = max(1, LOOKED_AT // max(1, values[:1].size))
    for start in range(0, len(values), rows):
        yield values[start : start + rows]


def file_of(config: Any) -> Path:
    """Return the file of values; raises `UsageError` where none is named."""
    if not config.values:
        raise UsageError(
            "no file of values was named", hint="--values FILE, an .npy or .npz file of numpy"
        )
    return Path(config.values)


def open_arrays(path: Path, name: str, column: str = "") -> dict[str, Array]:
    """Return column → array of a file, mapped; an .npy file has one, called `column` or `name`."""
    try:
        with machine_errors("read", path):
            if not path.is_file():
                what = "this is not a file" if path.exists() else "there is no such file"
                raise TokmillError(what, where=str(path), hint="check the path")
            head = read_file(path, 6)
        if head == NPY:
            result = {column or name: _mapped(path, 0)}
        elif head[:4] == ZIP:
            result = _members(path, column)
        else:
            raise TokmillError(
                "the file is neither .npy nor .npz",
                where=str(path),
                hint='numpy.save("values.npy", values) writes one',
            )
    except ZIP_ERRORS as error:
        raise TokmillError(
            f"the file is damaged: {error}", where=str(path), hint="write or copy it again"
        ) from None
    for key, array in result.items():
        if array.shape[:1] == (0,):
            raise TokmillError(
                f"{key} is empty: it has no values",
                where=str(path),
                hint="save a value for each record or each token",
            )
        if array.dtype.kind not in "biuf" or array.ndim not in (1, 2) or 0 in array.shape:
            raise TokmillError(
                f"{key} has dtype {array.dtype} and shape {array.shape}; columns are numbers, one "
                "a record or token, or a row of them",
                where=str(path),
                hint="save an array of numbers with one or two axes",
            )
    return result


def _members(path: Path, column: str) -> dict[str, Array]:
    result = {}
    with zipfile.ZipFile(path) as archive, open_file(path) as handle:
        entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        if column and column not in entries:
            raise UsageError(
                f"the file has no array {column!r}", where=str(path), hint=nearest(column, entries)
            )
        for name in [column] if column else entries:
            entry = entries[name]
            if entry.compress_type != zipfile.ZIP_STORED:
                raise TokmillError(
                    f"the array {name!r} is compressed, so it cannot be read in parts",
                    where=str(path),
                    hint="numpy.savez and numpy.save write arrays that can",
                )
            # A local header has 30 bytes; the last 4 are the lengths of name and extra field.
            if entry.header_offset < 0:
                raise ValueError(f"the array {name!r} is misplaced")
            handle.seek(entry.header_offset + 26)
            lengths = [int.from_bytes(handle.read(2), "little") for _ in range(2)]
            result[name] = _mapped(path, entry.header_offset + 30 + sum(lengths))
    return result


def _mapped(path: Path, start: int) -> Array:
    """Map the array whose .npy form begins at a byte of a file.

    Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    """
    with open_file(path) as handle:
        handle.seek(start)
        shape, fortran, dtype = array_header(handle)
        place = handle.tell()
    if dtype.hasobject:
        raise TokmillError(
            "the array is pickled, and nothing is unpickled",
            where=str(path),
            hint="save numbers: numpy.asarray(values, numpy.float32)",
        )
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", place, shape, "F" if fortran else "C")


def per_of(base: Store, length: int, per: Literal["auto", "record", "token"], where: str) -> Per:
    """Return whether an array of some length has a value per record or per token of a store."""
    counts: dict[Per, int] = {"record": base.records, "token": base.tokens}
    if per != "auto":
        counts = {per: counts[per]}
    fitting = [kind for kind, count in counts.items() if count == length]
    if len(fitting) == 1:
        return fitting[0]
    size = f"the store has {base.records:,} records and {base.tokens:,} tokens"
    if fitting:
        raise UsageError(
            f"{length:,} values may be one per record or one per token: {size}",
            where=where,
            hint="say which: --per record or --per token",
        )
    one = "" if per == "auto" else f", so --per {per} does not fit"
    raise UsageError(
        f"the array has {length:,} rows; {size}{one}",
        where=where,
        hint="a column has a row per record, or a value per token, in the order of the store",
    )


def smallest(path: Path, name: str, array: Array) -> DType:
    """Return the smallest type of a store that holds an array's numbers; reads them once."""
    if array.dtype.kind == "b" or array.dtype == np.uint8:
        return "u1"
    if array.dtype.kind == "f":
        if array.dtype.itemsize > 4:
            low, high = extremes(array)
            if max(-low, high) > float(np.finfo(np.float32).max):
                raise TokmillError(
                    f"{name} holds {low if -low > high else high}, which no float32 holds",
                    where=str(path),
                    hint="scale the values, or take their logarithms",
                )
        return "f4"
    low, high = extremes(array)
    if low < 0:
        return "i8"
    fitting: list[tuple[int, DType]] = [(8, "u1"), (16, "u2"), (32, "u4"), (64, "u8")]
    return next(dtype for bits, dtype in fitting if high < 1 << bits)


def extremes(array: Array) -> tuple[Any, Any]:
    """Return (smallest, largest) of 0 and the finite values of an array."""
    low = high = 0
    for block in blocks(array):
        if block.dtype.kind == "f":
            block = block[np.isfinite(block)]
        if block.size:
            low, high = min(low, block.min().item()), max(high, block.max().item())
    return low, high
