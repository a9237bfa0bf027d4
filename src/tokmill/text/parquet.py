"""Parquet and Arrow files: one record a row, documents from its columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.build.source import MAX_ITEM, Hash, InputFile, Item
from tokmill.errors import TokmillError, UsageError, nearest
from tokmill.store.schema import Drop
from tokmill.text.blocks import MAX_RECORD
from tokmill.text.documents import DocumentSource
from tokmill.text.encoders import utf8_buffer
from tokmill.text.prepare import Documents, FieldOptions, join_fields, select

ROWS = 2048


class ParquetConfig(FieldOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of Parquet and Arrow files."""


class ParquetSource(DocumentSource):
    """Parquet files by row group, Arrow files and streams by record batch.

    An item is a run of row groups; `start` and `stop` are their share of the file's bytes, and a
    record's place in its item is its row. A row group above 64 MiB of text is cut into parts.
    """

    Config: ClassVar[type[msgspec.Struct]] = ParquetConfig
    suffixes = (".parquet", ".arrow", ".feather", ".ipc")
    config: ParquetConfig

    def cut(self, file: InputFile) -> Iterator[Item]:
        """Yield runs of row groups of at most 64 MiB (or one that is larger)."""
        path = str(file.path.absolute())
        groups = _Groups(path)
        edges = [file.size * i // groups.count for i in range(groups.count + 1)]
        start = 0
        for i in range(1, len(edges)):
            if i == groups.count or edges[i + 1] - edges[start] > MAX_ITEM:
                yield Item(file.name, path, edges[start], edges[i], file.digest)
                start = i

    def documents(self, item: Item, digest: Hash) -> Iterator[Documents]:
        """Yield the documents of an item's rows."""
        pyarrow = plugins.require("pyarrow")
        groups = _Groups(item.path)
        size = Path(item.path).stat().st_size
        edges = [size * i // groups.count for i in range(groups.count + 1)]
        mine = [i for i in range(groups.count) if item.start <= edges[i] < item.stop]
        names = [*self.config.fields, *self.config.keep]
        present = [name for name in dict.fromkeys(names) if name in groups.names]
        if not set(present) & set(self.config.fields):
            raise UsageError(
                f"the file has none of the fields {', '.join(map(repr, self.config.fields))}",
                where=item.path,
                hint=f"its columns are {', '.join(groups.names)}; choose with --field",
            )
        for name in self.config.fields:
            if name in present and not _is_text(pyarrow, groups.type(name)):
                raise UsageError(
                    f"the column {name!r} holds {groups.type(name)}, not text",
                    where=item.path,
                    hint=nearest(name, [n for n in groups.names if n != name]),
                )
        row, taken, part = groups.rows_before(mine[0]) if mine else 0, 0, 0
        for batch in groups.batches(mine, present):
            table = {name: batch.column(i) for i, name in enumerate(present)}
            texts_in = [
                table[name].to_pylist() if name in table else [None] * len(batch)
                for name in self.config.fields
            ]
            texts, reasons = join_fields(texts_in, self.config)
            starts = np.arange(row, row + len(batch), dtype=np.int64)
            row += len(batch)
            kept = {
                name: [_as_text(value) for value in table[name].to_pylist()]
                if name in table
                else [""] * len(batch)
                for name in self.config.keep
            }
            # The content is the text itself: how Parquet packs it may differ.
            content, ends = utf8_buffer(texts)
            digest.update(np.diff(ends).tobytes())
            digest.update(content.data)
            taken += len(content)
            starts = np.arange(row, row + len(batch), dtype=np.int64)
            row += len(batch)
            kept = {
                name: [_as_text(value) for value in table[name].to_pylist()]
                if name in table
                else [""] * len(batch)
                for name in self.config.keep
            }
            # The content is the text itself: how Parquet packs it may differ.
            content = [*texts, *(value for values in kept.values() for value in values)]
            joined = "\0".join(content).encode("utf-8", "surrogatepass")
            taken += len(joined)
            if part >= item.parts_done:
                digest.update(joined)
            for values in kept.values():
                digest.update(msgspec.json.encode(values))
            drops: list[Drop] = []
            for i, text in enumerate(texts):
                if len(text) > MAX_RECORD // 4 and len(text.encode()) > MAX_RECORD:
                    reasons[i], texts[i] = "too long", ""
            found = select(Documents(texts, starts, drops, kept), reasons)
            found.drops = [Drop(d.offset, d.reason, d.reason == "too long") for d in found.drops]
            found.ends_part = taken >= (part + 1) * MAX_ITEM
            if part >= item.parts_done:
                yield found
            part += found.ends_part


class _Groups:
    """Row groups of a Parquet file or record batches of an Arrow file, one way to read both."""

    def __init__(self, path: str) -> None:
        pyarrow = plugins.require("pyarrow")
        self.path = path
        self._parquet: Any = None
        try:
            if path.endswith(".parquet") or _magic(path) == b"PAR1":
                self._parquet = plugins.require("pyarrow.parquet").ParquetFile(path)
                self._schema = self._parquet.schema_arrow
                self.count = self._parquet.metadata.num_row_groups
            else:
                source = pyarrow.memory_map(path)
                ipc = plugins.require("pyarrow.ipc")
                try:
                    self._reader = ipc.open_file(source)
                    self.count = self._reader.num_record_batches
                except pyarrow.ArrowInvalid:
                    self._reader = ipc.open_stream(source)
                    self.count = 1
                self._schema = self._reader.schema
        except (pyarrow.ArrowException, OSError) as error:
            raise TokmillError(
                f"the file is no Parquet or Arrow file: {str(error).splitlines()[0]}", where=path
            ) from None
        self.count = max(1, self.count)
        self.names = list(self._schema.names)

    def type(self, name: str) -> Any:
        """Return a column's Arrow type."""
        return self._schema.field(name).type

    def rows_before(self, group: int) -> int:
        """Return the number of rows in the groups before one."""
        if self._parquet is not None:
            meta = self._parquet.metadata
            return sum(meta.row_group(i).num_rows for i in range(group))
        if not hasattr(self._reader, "get_batch"):
            return 0
        return sum(len(self._reader.get_batch(i)) for i in range(group))

    def batches(self, groups: list[int], names: list[str]) -> Iterator[Any]:
        """Yield record batches of at most 2,048 rows with the named columns."""
        pyarrow = plugins.require("pyarrow")
        try:
            if self._parquet is not None:
                if self._parquet.metadata.num_row_groups == 0:
                    return
                yield from self._parquet.iter_batches(ROWS, row_groups=groups, columns=names)
                return
            numbers = groups if hasattr(self._reader, "get_batch") else [0]
            whole = (
                (self._reader.get_batch(i) for i in numbers)
                if hasattr(self._reader, "get_batch")
                else iter(self._reader)
            )
            for batch in whole:
                chosen = batch.select(names)
                for start in range(0, len(chosen), ROWS):
                    yield chosen.slice(start, ROWS)
        except (pyarrow.ArrowException, OSError) as error:
            raise TokmillError(
                f"the file is damaged: {str(error).splitlines()[0]}", where=self.path
            ) from None


def _magic(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(4)


def _is_text(pyarrow: Any, kind: Any) -> bool:
    types = pyarrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value, enc_hook=str).decode()
