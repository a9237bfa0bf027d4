"""Parquet and Arrow files: one record per row, documents from its columns."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from tokmill import plugins
from tokmill.base.errors import UsageError, nearest
from tokmill.base.files import place_of
from tokmill.builds.scan import LOG, InputFile, Inputs
from tokmill.builds.source import MAX_ITEM, Hash, Item
from tokmill.formats.arrow_files import open_table
from tokmill.store.schema import Array, each_drop
from tokmill.text.documents import DocumentSource
from tokmill.text.encoding.encoders import utf8_buffer
from tokmill.text.jsonl import as_text
from tokmill.text.make_document import Documents, FieldOptions, join_fields, select
from tokmill.text.record_blocks import MAX_RECORD

BATCH = 2 << 20
"""Bytes of a batch of rows, about."""


class ParquetConfig(FieldOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of Parquet and Arrow files."""


class ParquetSource(DocumentSource):
    """Parquet files by row group, Arrow files and streams by record batch.

    An item is a run of row groups; `start` and `stop` are their share of the file's bytes, and a
    record's place in its item is its row. A row group above 64 MiB of text is cut into parts.
    """

    Config: ClassVar[type[msgspec.Struct]] = ParquetConfig
    places = "row"
    suffixes = (".parquet", ".arrow", ".feather", ".ipc")
    config: ParquetConfig

    def find(self) -> Inputs:
        """Return the files; folders with more than their rows, as of `datasets`, are refused."""
        found = super().find()
        if LOG in found.left_out and not self.config.glob:
            raise UsageError(
                "a table of Delta, Hudi or Iceberg lies there: its log says which files are read",
                where=", ".join(self.inputs),
                hint="name these files, such as DeltaTable(FOLDER).file_uris()",
            )
        named = set(() if self.config.glob else map(Path, self.inputs))
        for path in (file.path for file in found.files):
            cache = path.name.startswith("cache-") or (named and path not in named)
            if cache and (path.parent / "state.json").is_file():
                raise UsageError(
                    "this is a folder of `datasets.save_to_disk`",
                    where=str(path.parent),
                    hint="name the data-*.arrow files of one split",
                )
        return found

    def cut(self, file: InputFile) -> Iterator[Item]:
        """Yield runs of row groups of at most 64 MiB (or one that is larger)."""
        path = place_of(file.path)
        for start, stop in open_table(path).runs(file.size):
            yield Item(file.name, path, start, stop, file.digest)

    def documents(self, item: Item, digest: Hash) -> Iterator[Documents]:
        pyarrow = plugins.require("pyarrow")
        table = open_table(item.path)
        names = [*self.config.fields, *self.config.keep]
        present = [name for name in dict.fromkeys(names) if name in table.names]
        if not set(present) & set(self.config.fields):
            raise UsageError(
                f"the file has none of the fields {', '.join(map(repr, self.config.fields))}",
                where=item.path,
                hint=f"its columns are {', '.join(table.names)}; choose with --field"
                + "; ids are read as a .bin file (docs/formats.md)" * ("input_ids" in table.names),
            )
        kinds = {name: table.kind(name) for name in present}
        for name in self.config.fields:
            if name in present and not _is_text(pyarrow, kinds[name]):
                texts = [n for n in table.names if _is_text(pyarrow, table.kind(n))]
                what = f"the column {name!r} holds {kinds[name]}, not text"
                raise UsageError(what, where=item.path, hint=nearest(name, texts))
        taken = part = 0
        for batch, starts, done in table.read(item.start, item.stop, present, BATCH):
            columns = {name: batch.column(i) for i, name in enumerate(present)}
            documents = self._prepared(columns, starts)
            documents.done = done
            content, places = utf8_buffer(documents.texts)
            taken += len(content)
            if part >= item.parts_done:
                # The content is the text itself, not its compression.
                digest.update(places.tobytes())
                digest.update(content.data)
                digest.update(msgspec.json.encode([documents.kept, [*each_drop(documents.drops)]]))
            documents.ends_part = taken >= (part + 1) * MAX_ITEM
            if part >= item.parts_done:
                yield documents
            part += documents.ends_part

    def _prepared(self, columns: Mapping[str, Any], starts: Array) -> Documents:
        kept = {
            name: _kept(name, columns[name]) if name in columns else [""] * len(starts)
            for name in self.config.keep
        }
        refused = [""] * len(starts)
        values = [
            _strings(columns[name], refused) if name in columns else [None] * len(starts)
            for name in self.config.fields
        ]
        texts, reasons = join_fields(values, self.config)
        for i, text in enumerate(texts):
            if len(text) > MAX_RECORD // 4 and len(text.encode()) > MAX_RECORD:
                refused[i] = "too long"
        reasons = [a or b for a, b in zip(refused, reasons, strict=True)]
        result = select(Documents(texts, starts, [], kept), reasons)
        result.drops = [
            some._replace(rejected=some.reason in ("too long", "utf8")) for some in result.drops
        ]
        return result


def _strings(column: Any, refused: list[str]) -> list[str | None]:
    """Return a column's strings; a string that is not UTF-8 becomes None, noted in `refused`."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        pyarrow = plugins.require("pyarrow")
        result: list[str | None] = []
        for i, raw in enumerate(column.cast(pyarrow.large_binary()).to_pylist()):
            try:
                result.append(None if raw is None else raw.decode())
            except UnicodeDecodeError:
                refused[i] = "utf8"
                result.append(None)
        return result


def _is_text(pyarrow: Any, kind: Any) -> bool:
    types = pyarrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    kinds = (types.is_null, types.is_string, types.is_large_string, types.is_string_view)
    return any(is_kind(kind) for is_kind in kinds)


def _kept(name: str, column: Any) -> list[str]:
    """Return the values of a column as text: strings and times as they are, others as JSON.

    A duration is the number of its units.
    """
    pyarrow = plugins.require("pyarrow")
    types = pyarrow.types
    end = ""
    try:
        column = column.dictionary_decode() if types.is_dictionary(column.type) else column
        if types.is_duration(column.type):
            column = column.cast(pyarrow.int64())
        elif types.is_temporal(column.type) or types.is_decimal(column.type):
            # Python's own types hold neither nanoseconds nor years after 9999.
            # It asks the machine for zones, so times in UTC are cast without one.
            if types.is_timestamp(column.type) and column.type.tz == "UTC":
                column, end = column.cast(pyarrow.timestamp(column.type.unit)), "Z"
            column = column.cast(pyarrow.string())
        return [as_text(value) + end * (value is not None) for value in column.to_pylist()]
    except (ValueError, OverflowError, NotImplementedError, UnicodeDecodeError) as error:
        raise UsageError(
            f"values of the column {name!r} ({column.type}) cannot be kept as text: {error}",
            hint="leave it out of --keep, or write it in another type",
        ) from None
