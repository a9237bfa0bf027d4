"""One file of records: a safetensors file whose bytes depend on its content alone.

Arrays are ordered by descending item size, after a header padded to 64 bytes, so each array is
aligned. The safetensors library reads the file, and so does numpy alone.
Format of the container: 8 bytes little-endian header length, JSON header, data.
"""

import hashlib
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokmill.base.bounds import cut_short
from tokmill.base.errors import TokmillError
from tokmill.base.files import reading, write_file
from tokmill.base.headers import tensor_header, tensor_header_bytes
from tokmill.store.manifest import FORMAT
from tokmill.store.schema import (
    PHRASE_BIT,
    Array,
    Phrases,
    Records,
    Schema,
    Strings,
    borders,
    has_phrases,
    phrase_columns,
    ranges,
)
from tokmill.store.shards.column_buffers import ColumnBuffers, Offsets, Part, StringColumn, pieces

SUFFIX = ".safetensors"
TYPES = {"u1": "U8", "u2": "U16", "u4": "U32", "u8": "U64", "i8": "I64", "f4": "F32", "f8": "F64"}
DTYPES = {name: np.dtype("<" + short) for short, name in TYPES.items()}
OFFSETS = {"offsets": "", "phrase_offsets": "phrase", "table_offsets": "table."}
"""Array of offsets → the array that it divides ("": tokens; "table.": all such arrays); offsets of
strings are called NAME.offsets."""


class ShardWriter:
    """Collects the records of one shard and then writes it.

    `limits` maps a column to the number of its ids; an id out of range is refused. Above 32 MiB the
    columns are kept in a file in the folder `scratch` (`tokmill.store.shards.column_buffers`).
    """

    def __init__(self, schema: Schema, limits: dict[str, int], scratch: Path | None = None) -> None:
        self.schema, self.limits = schema, limits
        self.buffers = ColumnBuffers(scratch)
        """Name in the file → values; for offsets, the lengths between them."""
        self.strings = {
            name: StringColumn(name, self.buffers)
            for name, column in schema.items()
            if column.dtype == "utf8"
        }
        self.phrase_ids: dict[bytes, int] = {}
        self.table: dict[str, list[Array]] = {name: [] for name in phrase_columns(schema)}
        self.table_lengths: list[Array] = []
        self._growing: object = None
        self._numbers = np.zeros(0, np.int64)
        """Row of the growing table → row of the shard's table; -1: not met yet."""
        self.ranges: dict[str, tuple[float, float]] = {}
        self.records = self.tokens = 0

    def add(self, batch: Records, item: int) -> None:
        n = len(batch)
        tokens = int(batch.offsets[-1] - batch.offsets[0]) if n else 0
        self.buffers.add("offsets", np.diff(batch.offsets))
        self.records += n
        self.tokens += tokens
        self.buffers.add("item", np.full(n, item, "<u4"))
        self.buffers.add("start", np.asarray(batch.starts, "<u8"))
        if batch.phrases is not None:
            self._add_phrases(batch.phrases)
        for name, column in self.schema.items():
            if column.phrase:
                continue
            value = batch.columns[name]
            expected = tokens if column.per == "token" else n
            if len(value) != expected:
                raise ValueError(f"column {name}: {len(value)} values for {expected}")
            if isinstance(value, Strings):
                self.strings[name].add(value)
                continue
            self._check(name, value)
            self.buffers.add(name, np.ascontiguousarray(value, column.numpy()))

    def _check(self, name: str, value: Array) -> None:
        if value.dtype.kind == "f":
            # JSON has neither NaN nor infinity.
            value = value[np.isfinite(value)]
        if not value.size:
            return
        low, high = value.min().item(), value.max().item()
        self._check_range(name, low, high)
        before = self.ranges.get(name, (low, high))
        self.ranges[name] = (min(low, before[0]), max(high, before[1]))

    def _check_range(self, name: str, low: float, high: float) -> None:
        column = self.schema[name]
        limit = self.limits.get(name)
        if limit is None and column.dtype in ("u1", "u2", "u4"):
            limit = 1 << (8 * column.numpy().itemsize)
        if limit is not None and (low < 0 or high >= limit):
            raise TokmillError(
                f"column {name!r} holds the id {high if high >= limit else low}, "
                f"but its ids are 0 to {limit - 1}",
                hint="the vocabulary does not belong to this data",
            )

    def _add_phrases(self, phrases: Phrases) -> None:
        plain = phrases.ids & ~PHRASE_BIT
        count = len(phrases.table_offsets) - 1
        if phrases.growing is None or phrases.growing is not self._growing:
            self._growing, self._numbers = phrases.growing, np.zeros(0, np.int64)
        row_of_phrase = np.full(count, -1)
        row_of_phrase[: len(self._numbers)] = self._numbers
        rows = row_of_phrase[plain]
        if len(rows) and rows.min() < 0:
            # In the order of first use, so that the table does not depend on the batches.
            new = plain[rows < 0]
            first = np.empty(count, np.int64)
            first[new[::-1]] = np.arange(len(new))[::-1]
            new = new[first[new] == np.arange(len(new))]
            row_of_phrase[new] = self._add_rows(phrases, new.astype(np.int64))
            rows = row_of_phrase[plain]
        self._numbers = row_of_phrase
        self.buffers.add("phrase", rows.astype("<u4") | (phrases.ids & PHRASE_BIT))
        self.buffers.add("phrase_offsets", np.diff(phrases.offsets))

    def _add_rows(self, phrases: Phrases, rows: Array) -> Array:
        """Return rows of another table as rows of the shard's table; missing ones are added."""
        start, stop = phrases.table_offsets[rows], phrases.table_offsets[rows + 1]
        lengths = stop - start
        identities = _row_bytes(start, lengths, phrases.table, self.schema)
        before = len(self.phrase_ids)
        numbers = [self.phrase_ids.setdefault(row, len(self.phrase_ids)) for row in identities]
        result = np.asarray(numbers, np.int64)
        # New rows get ascending numbers; two rows of the other table may be equal.
        fresh = np.flatnonzero(result >= before)
        fresh = fresh[np.unique(result[fresh], return_index=True)[1]]
        lengths = lengths[fresh]
        flat = ranges(start[fresh], lengths)
        for name, parts in self.table.items():
            part = np.ascontiguousarray(phrases.table[name][flat], self.schema[name].numpy())
            self._check(name, part)
            parts.append(part)
        self.table_lengths.append(lengths)
        return result

    def write(self, path: Path) -> tuple[int, str]:
        """Write the shard and return its size in bytes and its sha256."""
        tensors: dict[str, tuple[str, list[int], Sequence[Part]]] = {}
        buffers = self.buffers

        def put(name: str, dtype: str, parts: Sequence[Part], width: int = 0) -> None:
            length = sum(part.nbytes for part in parts) // DTYPES[TYPES[dtype]].itemsize
            shape = [length // width, width] if width else [length]
            tensors[name] = (dtype, shape, parts)

        put("offsets", "u8", [Offsets(buffers.get("offsets"))])
        put("item", "u4", buffers.get("item"))
        put("start", "u8", buffers.get("start"))
        if has_phrases(self.schema):
            put("phrase", "u4", buffers.get("phrase"))
            put("phrase_offsets", "u8", [Offsets(buffers.get("phrase_offsets"))])
            put("table_offsets", "u8", [Offsets(self.table_lengths)])
            for name, parts in self.table.items():
                put(f"table.{name}", self.schema[name].dtype, parts)
        for name, column in self.schema.items():
            if name in self.strings:
                for array in self.strings[name].arrays():
                    put(*array)
            elif not column.phrase:
                put(name, column.dtype, buffers.get(name), column.width)
        return write_tensors(path, tensors)


def _row_bytes(
    start: Array, lengths: Array, table: dict[str, Array], schema: Schema
) -> list[bytes]:
    """Return the bytes of each row of a table, in the dtypes of the shard, to compare rows.

    Rows of the same length are processed together, as rows of a matrix.
    """
    row_bytes = np.empty(len(lengths), object)
    for length in np.unique(lengths).tolist():
        here = np.flatnonzero(lengths == length)
        place = start[here, None] + np.arange(length)
        cells = [
            np.ascontiguousarray(values[place], schema[name].numpy()).view(np.uint8)
            for name, values in table.items()
        ]
        matrix = np.concatenate(cells, axis=1)
        row_bytes[here] = [row.tobytes() for row in matrix]
    return row_bytes.tolist()


def write_tensors(
    path: Path, tensors: dict[str, tuple[str, list[int], Sequence[Part]]]
) -> tuple[int, str]:
    """Write name → (dtype, shape, parts) as a safetensors file; return size and sha256."""
    order = sorted(tensors, key=lambda name: (-DTYPES[TYPES[tensors[name][0]]].itemsize, name))
    named = [(name, TYPES[tensors[name][0]], tensors[name][1]) for name in order]
    text = tensor_header_bytes(named, {"format": "tokmill-shard", "version": str(FORMAT)})
    digest = hashlib.sha256()
    total = 0

    def chunks() -> Iterator[bytes | memoryview]:
        nonlocal total
        small = bytearray(text)
        for name in order:
            for part in pieces(tensors[name][2]):
                data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
                small += data if len(data) < 1 << 16 else b""
                if len(small) > 1 << 20 or len(data) >= 1 << 16:
                    digest.update(small)
                    total += len(small)
                    yield bytes(small)
                    small.clear()
                if len(data) >= 1 << 16:
                    digest.update(data)
                    total += len(data)
                    yield data
        digest.update(small)
        total += len(small)
        yield bytes(small)

    write_file(path, chunks(), sync=False)
    return total, digest.hexdigest()


class Shard:
    """A shard mapped into memory; arrays are views of the map, made on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path) as handle:
            size = handle.seek(0, 2)
            if size < 8:
                raise self.damaged(f"it is {size} bytes long")
            self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            whole: Any = self._map
            header = tensor_header(whole, size)
            self._tensors = {
                name: (DTYPES[entry.dtype], entry.shape, *entry.data_offsets)
                for name, entry in header.tensors.items()
            }
        except ValueError as error:
            raise self.damaged(str(error)) from error
        except KeyError as error:
            raise self.damaged(f"it holds the type {error}, which no column has") from error
        self._size, self._data = size, 8 + header.length
        end = max((entry[3] for entry in self._tensors.values()), default=0)
        if self._data + end != size:
            raise self.damaged(f"{size} bytes, but its header says {self._data + end}")
        self._arrays: dict[str, Array] = {}
        self._ends: dict[str, Array] = {}
        self._tokens: int | None = None

    def damaged(self, what: str) -> TokmillError:
        return TokmillError(
            f"the shard is damaged: {what}",
            where=str(self.path),
            hint="`tokmill store validate STORE` finds all damage, and says what helps",
        )

    def check_size(self) -> None:
        """Raise `MachineError` if the file was cut: the rest of its last page reads as zeros."""
        if (size := self._map.size()) < self._size:
            raise cut_short(self.path, size)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Array:
        """Return a stored array (read-only view)."""
        if name not in self._arrays:
            try:
                dtype, shape, start, stop = self._tensors[name]
                count = (stop - start) // dtype.itemsize
                flat = np.frombuffer(self._map, dtype, count, self._data + start)
                self._arrays[name] = flat.reshape(shape)
                if name in OFFSETS or name.endswith(".offsets"):
                    self._check_offsets(name)
            except (KeyError, ValueError) as error:
                raise self.damaged(f"the array {name!r} is missing or misplaced") from error
        return self._arrays[name]

    def _check_offsets(self, name: str) -> None:
        """Refuse offsets that descend or lead out of the array that they divide."""
        offsets = self._arrays[name]
        divided = OFFSETS.get(name, name.removesuffix(".offsets"))
        names = [n for n in self._tensors if n.startswith(divided)] if divided == "table." else []
        lengths = [self._tensors[n][1][0] for n in names or [divided] if n in self._tensors]
        good = offsets.ndim == 1 and len(offsets) > 0 and bool((offsets[1:] >= offsets[:-1]).all())
        if name == "offsets" and self._tokens is not None:
            lengths = [self._tokens]
        if not good or offsets[0] or any(offsets[-1] != length for length in lengths):
            del self._arrays[name]
            raise self.damaged(f"{name!r} descends, or leads out of the file")

    def check_lengths(self, records: int, tokens: int, schema: Schema) -> None:
        """Refuse a shard whose header does not fit the manifest and its schema."""
        self._tokens = tokens
        wanted: dict[str, list[int]] = {"offsets": [records + 1], "item": [records]}
        wanted |= {"start": [records], "phrase_offsets": [records + 1]}
        for name, column in schema.items():
            if column.dtype == "utf8":
                coded = f"{name}.values" in self._tensors
                wanted[name if coded else f"{name}.offsets"] = [records + (not coded)]
            elif not column.phrase:
                length = tokens if column.per == "token" else records
                wanted[name] = [length, column.width] if column.width else [length]
        for name, shape in wanted.items():
            if name in self._tensors and list(self._tensors[name][1]) != shape:
                raise self.damaged(
                    f"{name!r} has the shape {list(self._tensors[name][1])}, not {shape}"
                )
            if name in schema and name in self._tensors:
                dtype = self._tensors[name][0]
                is_text = schema[name].dtype == "utf8"
                if dtype.kind != "u" if is_text else dtype != schema[name].numpy():
                    raise self.damaged(f"{name!r} holds {dtype}, not {schema[name].dtype}")

    def lay(self, name: str, values: Array) -> None:
        self._arrays[name] = values

    def __len__(self) -> int:
        return len(self["offsets"]) - 1

    def text(self, name: str, start: int, stop: int) -> Strings:
        """Return a `utf8` column of the records start … stop - 1, in either form.

        Raises `TokmillError` if a string is not in its table.
        """
        if f"{name}.values" not in self._tensors:
            ends = self[f"{name}.offsets"][start : stop + 1].astype(np.int64)
            return Strings.flat(self[name][int(ends[0]) : int(ends[-1])], ends - ends[0])
        if name not in self._ends:
            self._ends[name] = self[f"{name}.values.offsets"].astype(np.int64)
        offsets = self._ends[name]
        numbers = self[name][start:stop]
        if numbers.size and int(numbers.max()) >= len(offsets) - 1:
            raise self.damaged(f"it uses strings of {name!r} that are not in its table")
        return Strings(numbers, self[f"{name}.values"], offsets)

    def strings(self, name: str, start: int, stop: int) -> list[str]:
        """Return the strings of a `utf8` column for some records."""
        try:
            return self.text(name, start, stop).decoded()
        except UnicodeDecodeError as error:
            raise self.damaged(f"a string of {name!r} is not UTF-8") from error

    def phrase_tokens(self, record: int, start: int, stop: int, columns: list[str]) -> list[Array]:
        """Return token columns of a part of a record that is stored as phrases.

        Raises `TokmillError` if a phrase is not in the table, or the phrases have too few tokens.
        """
        try:
            values = self._phrase_tokens(record, start, stop, columns)
        except (IndexError, ValueError) as error:
            raise self.damaged("it uses phrases that are not in its table") from error
        if values and len(values[0]) != stop - start:
            raise self.damaged("its phrases have other numbers of tokens than its records")
        return values

    def _phrase_tokens(self, record: int, start: int, stop: int, columns: list[str]) -> list[Array]:
        offsets, table = self["phrase_offsets"], self["table_offsets"]
        raw = self["phrase"][int(offsets[record]) : int(offsets[record + 1])]
        ids = (raw & ~PHRASE_BIT).astype(np.int64)
        ends = np.cumsum((table[ids + 1] - table[ids]).astype(np.int64))
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, stop, side="left")) + 1
        ids, raw, ends = ids[first:last], raw[first:last], ends[first:last]
        begins = table[ids].astype(np.int64)
        lengths = table[ids + 1].astype(np.int64) - begins
        cut = start - int(ends[0] - lengths[0]) if len(ends) else 0
        window = slice(cut, cut + stop - start)
        flat = ranges(begins, lengths)[window]
        return [
            borders(raw, lengths)[window] if name == "border" else self[f"table.{name}"][flat]
            for name in columns
        ]

    def records(self, start: int, stop: int, schema: Schema) -> Records:
        """Return the records start … stop - 1 as a batch (views where possible)."""
        offsets = self["offsets"][start : stop + 1].astype(np.int64)
        tokens = slice(int(offsets[0]), int(offsets[-1]))
        columns: dict[str, Array | Strings] = {}
        for name, column in schema.items():
            if column.phrase:
                continue
            if column.dtype == "utf8":
                columns[name] = self.text(name, start, stop)
            else:
                columns[name] = self[name][tokens if column.per == "token" else slice(start, stop)]
        phrases = None
        if has_phrases(schema):
            ends = self["phrase_offsets"][start : stop + 1].astype(np.int64)
            ids = self["phrase"][int(ends[0]) : int(ends[-1])]
            if len(ids) and int((ids & ~PHRASE_BIT).max()) >= len(self["table_offsets"]) - 1:
                raise self.damaged("it uses phrases that are not in its table")
            phrases = Phrases(
                ids=ids,
                offsets=ends - ends[0],
                table_offsets=self["table_offsets"].astype(np.int64),
                table={name: self[f"table.{name}"] for name in phrase_columns(schema)},
                growing=self,
            )
        starts = self["start"][start:stop].astype(np.int64)
        return Records(offsets - offsets[0], columns, starts, phrases=phrases)
