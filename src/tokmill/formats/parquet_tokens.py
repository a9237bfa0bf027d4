"""Parquet of token ids: one row per record, a list column `input_ids`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.builds.scan import InputFile, find_files
from tokmill.builds.source import Hash, Item
from tokmill.formats.arrow_files import open_table
from tokmill.formats.datasets_folders import expanded
from tokmill.formats.parquet_export import ParquetExport
from tokmill.formats.tokens import IdType, TokenOptions, TokenSource, store_dtype
from tokmill.store.schema import Array, Column, Records, Schema
from tokmill.store.shards.strings import Strings

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NUMBERS: dict[str, Any] = {
    "bool": "u1", "uint8": "u1", "uint16": "u2", "uint32": "u4", "uint64": "u8",
    "int8": "i8", "int16": "i8", "int32": "i8", "int64": "i8", "float": "f4", "halffloat": "f4",
}  # fmt: skip


class ParquetTokensOptions(TokenOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of Parquet files of token ids."""

    column: str = "input_ids"
    """List column of ids."""
    split: str = ""
    """The split of a folder of `datasets.save_to_disk`; by default `train`, or the only one."""
    keep: tuple[str, ...] = ()
    """Other columns to keep: strings, integers, 32-bit floats."""


class ParquetTokensSource(TokenSource):
    """Parquet files of token ids: a record is a row.

    An item is a run of row groups of at most 64 MiB (or one that is larger); `start` and `stop`
    are their share of the file's bytes, a record's place is its row.
    """

    Config: ClassVar[type[msgspec.Struct]] = ParquetTokensOptions
    places = "row"
    suffixes = (".parquet", ".arrow", ".feather", ".ipc")
    config: ParquetTokensOptions

    def found(self) -> list[InputFile]:
        """Return the files; for folders of datasets, the files with their rows."""
        inputs, left = expanded(self.inputs, self.config.split)
        found = find_files(inputs, self.suffixes, choice=self.config)
        self.left_out = {**found.left_out, **left}
        return found.files

    def files(self) -> Iterator[tuple[InputFile, _Rows]]:
        """Yield the files, opened; their columns must fit the options and one another."""
        first: tuple[Path, dict[str, str]] | None = None
        for file in self.found():
            rows = _Rows(file.path, self.config)
            kinds = {name: rows.kinds[name] for name in self.config.keep}
            if first is not None and first[1] != kinds:
                raise TokmillError(
                    f"its columns {kinds} differ from {first[1]} in {first[0]}",
                    where=str(file.path),
                    hint="build them apart, or --keep fewer",
                )
            first = first or (file.path, kinds)
            yield file, rows

    def file_dtype(self) -> IdType:
        """Return the widest dtype of the files, 32 bits at most."""
        return store_dtype([rows.dtype for _, rows in self.files()])

    def kept(self) -> Schema:
        """Return the columns of `keep`."""
        if not self.config.keep:
            return {}
        _, rows = next(self.files())
        return {
            name: Column("utf8" if kind == "utf8" else NUMBERS[kind], per="record")
            for name, kind in rows.kinds.items()
        }

    def items(self) -> Iterator[Item]:
        for file, rows in self.files():
            path = str(file.path.absolute())
            for start, stop in rows.table.runs(file.size):
                yield Item(file.name, path, start, stop, file.digest)

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        """Yield the rows of an item's row groups."""
        path = Path(item.path)
        rows = _Rows(path, self.config)
        names = list(dict.fromkeys((self.config.column, *self.config.keep)))
        # One digest a column: a digest over all columns would depend on the blocks.
        beside = [hashlib.sha256() for _ in range(1 + 2 * len(self.config.keep))]
        block = self.resources.block_bytes
        for batch, starts, done in rows.table.read(item.start, item.stop, names, block):
            row = int(starts[0]) if len(starts) else 0
            ids, offsets = rows.lists(batch, row)
            beside[0].update(np.ascontiguousarray(np.diff(offsets), "<i8").tobytes())
            digest.update(np.ascontiguousarray(ids, ids.dtype.newbyteorder("<")).tobytes())
            columns: dict[str, Array | Strings] = {
                "token": self.checked(ids, _row_of(path, offsets, row))
            }
            for number, name in enumerate(self.config.keep):
                columns[name] = value = rows.values(batch, name, row)
                parts = [value] if isinstance(value, np.ndarray) else value.end_to_end()
                for part, hashed in zip(parts, beside[1 + 2 * number :], strict=False):
                    hashed.update(part.tobytes())
            yield Records(offsets, columns, starts, done=done)
        for hashed in beside:
            digest.update(hashed.digest())


def _row_of(path: Path, offsets: Array, row: int) -> Any:
    return lambda i: f"{path}, row {row + int(np.searchsorted(offsets, i, side='right')) - 1}"


class _Rows:
    """A Parquet file's list column and the columns beside it, as flat arrays."""

    def __init__(self, path: Path, config: ParquetTokensOptions) -> None:
        self.arrow = plugins.require("pyarrow")
        self.path, self.config = path, config
        self.table = open_table(str(path))
        names = self.table.names
        for name in (config.column, *config.keep):
            if name not in names:
                raise UsageError(
                    f"the file has no column {name!r}",
                    where=str(path),
                    hint=f"{nearest(name, names)}; --column names the ids, text is read by "
                    "`tokmill build parquet`",
                )
        kind = self.table.kind(config.column)
        types = self.arrow.types
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        inner = str(kind.value_type) if is_list else ""
        if inner not in INTEGERS:
            raise UsageError(
                f"the column {config.column!r} holds {kind}, not lists of integers",
                where=str(path),
                hint="--column names another one; for text use `tokmill build parquet`",
            )
        self.dtype = np.dtype(inner)
        self.kinds = {name: self._kind(self.table.kind(name), name) for name in config.keep}

    def _kind(self, kind: Any, name: str) -> str:
        types = self.arrow.types
        if types.is_string(kind) or types.is_large_string(kind):
            return "utf8"
        if str(kind) not in NUMBERS:
            raise UsageError(
                f"the column {name!r} holds {kind}, which no store column can hold",
                where=str(self.path),
                hint="strings, booleans, integers and floats of 32 bits can be kept",
            )
        return str(kind)

    def lists(self, batch: Any, row: int) -> tuple[Array, Array]:
        """Return the ids of a batch's rows, flat, and their offsets (int64)."""
        column = batch.column(self.config.column)
        self._refuse_nulls(column, self.config.column, row)
        if self.arrow.types.is_fixed_size_list(column.type):
            column = column.cast(self.arrow.list_(column.type.value_type))
        offsets = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        ids = column.values.slice(offsets[0], offsets[-1] - offsets[0])
        self._refuse_nulls(ids, self.config.column, row)
        return ids.to_numpy(zero_copy_only=False), offsets - offsets[0]

    def values(self, batch: Any, name: str, row: int) -> Array | Strings:
        """Return a column beside the ids in the store's dtype; a missing string is empty."""
        column = batch.column(name)
        if self.kinds[name] != "utf8":
            self._refuse_nulls(column, name, row)
            dtype = Column(NUMBERS[self.kinds[name]]).numpy()
            value: Array = column.to_numpy(zero_copy_only=False).astype(dtype)
            return value
        text = column.fill_null("").cast(self.arrow.large_string())
        try:
            text.validate(full=True)
        except self.arrow.ArrowInvalid:
            raise TokmillError(
                f"the column {name!r} holds strings that are no UTF-8",
                where=f"{self.path}, rows from {row}",
                hint="leave the column out, or mend it before the import",
            ) from None
        data, bounds = text.buffers()[2], text.buffers()[1]
        offsets = np.frombuffer(bounds, "<i8", len(text) + 1, 8 * text.offset)
        flat = np.frombuffer(data or b"", np.uint8)[offsets[0] : offsets[-1]]
        return Strings.flat(flat, offsets - offsets[0])

    def _refuse_nulls(self, column: Any, name: str, row: int) -> None:
        if column.null_count:
            raise TokmillError(
                f"{column.null_count} values of the column {name!r} are missing",
                where=f"{self.path}, rows from {row}",
                hint="drop those rows, or fill them, before the import",
            )


__all__ = ["ParquetExport", "ParquetTokensSource"]
