"""Stores as Parquet of token ids: one row per record, a list column `input_ids`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.formats import exports
from tokmill.formats.notes import exporting
from tokmill.store.schema import Array
from tokmill.store.store import Store

GROUP_TOKENS = 4 << 20


class ParquetExport:
    """One Parquet file: `input_ids` (list of uint16, uint32 above 65,536 ids) and record columns.

    Strings become `string`, vectors fixed-size lists. A row group holds about 4 Mi tokens.
    """

    Config: ClassVar[type[msgspec.Struct]] = exports.ExportOptions

    def __init__(self, config: exports.ExportOptions) -> None:
        self.config = config

    def write(self, store: Store, out: Path) -> dict[str, Any]:
        """Write `out` (or `out/tokens.parquet`) and return files, tokens, bytes and rows."""
        exports.check_column(store, self.config)
        path = exports.output_file(out, ".parquet")
        with exporting(
            store, "parquet", self.config, path.parent, path.name, files=[path], named=out
        ) as export:
            export.put(path, self._chunks(store))
        return exports.summary([path], store.tokens, rows=store.records)

    def _chunks(self, store: Store) -> Iterator[bytes]:
        arrow = plugins.require("pyarrow")
        parquet = plugins.require("pyarrow.parquet")
        dtype = exports.wide_dtype(store, self.config.column)
        beside = {n: c for n, c in store.schema.items() if c.per == "record"}
        if "input_ids" in beside:
            raise TokmillError(
                "the store has a record column 'input_ids'",
                where=str(store.path),
                hint="build the store without keeping a field of this name",
            )
        sink = exports.Sink()
        writer: Any = None
        for ids, number, first, last in exports.blocks(store, self.config.column, GROUP_TOKENS):
            shard = store.shard(number)
            offsets = shard["offsets"][first : last + 1].astype(np.int64)
            columns = {
                "input_ids": arrow.ListArray.from_arrays(
                    (offsets - offsets[0]).astype(np.int32),
                    arrow.array(ids.astype(dtype, copy=False)),
                )
            }
            for name, column in beside.items():
                if column.dtype == "utf8":
                    text = shard.text(name, first, last)
                    columns[name] = _strings(*text.written_out(), f"{store.path}, {name!r}")
                    continue
                values = arrow.array(shard[name][first:last].reshape(-1))
                if column.width:
                    values = arrow.FixedSizeListArray.from_arrays(values, column.width)
                columns[name] = values
            table = arrow.table(columns)
            if writer is None:
                writer = parquet.ParquetWriter(
                    sink, table.schema, compression="zstd", write_page_checksum=True
                )
            writer.write_table(table, row_group_size=max(1, len(table)))
            yield sink.take()
        if writer is None:
            raise TokmillError(
                "the store holds no records",
                where=str(store.path),
                hint="look at it with `tokmill inspect`: was anything built?",
            )
        writer.close()
        yield sink.take()


def _strings(data: Array, offsets: Array, where: str) -> Any:
    arrow = plugins.require("pyarrow")
    flat = np.ascontiguousarray(data[int(offsets[0]) : int(offsets[-1])])
    buffers = [None, arrow.py_buffer(offsets - offsets[0]), arrow.py_buffer(flat)]
    found = arrow.Array.from_buffers(arrow.large_string(), len(offsets) - 1, buffers)
    try:
        found.validate(full=True)
    except arrow.ArrowInvalid:
        raise TokmillError(
            "a string has a lone surrogate, which Parquet cannot hold",
            where=where,
            hint="build the store again without keeping this field",
        ) from None
    return found.cast(arrow.string())
