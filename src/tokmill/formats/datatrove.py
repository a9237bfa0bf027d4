"""datatrove's token files: `NAME.ds`, `NAME.ds.index`, `NAME.ds.metadata`.

The .ds holds little-endian uint16 ids (uint32 above 65,536 ids), the .index the cumulative ends of
the documents in tokens (uint64), the .metadata three lines of text: `tokenizer|bytes of an id`, the
number of tokens, and that number for people. Source of the format: datatrove,
`src/datatrove/pipeline/tokens/tokenizer.py`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import machine_errors, read_file, reading, remove
from tokmill.formats import exports
from tokmill.formats.indexed import Index, IndexedSource
from tokmill.formats.notes import exporting
from tokmill.formats.tokens import TokenOptions
from tokmill.store.schema import Array
from tokmill.store.store import Store

CHECKED = 1 << 20
MOST_METADATA = 1 << 16
"""Bytes of a .metadata that are read; it has three short lines."""


class DatatroveIndex(Index):
    """A .ds.index file, mapped."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        index = path.with_name(path.name + ".index")
        with reading(index) as file:
            length = file.seek(0, 2)
            if length % 8:
                raise self._damaged(f"{length} bytes are no whole number of uint64")
            self._ends: Array = np.zeros(0, "<u8")
            if length:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._ends = np.frombuffer(data, "<u8")
        self.documents = len(self._ends)
        self.tokens = int(self._ends[-1]) if length else 0
        told, stated = _metadata(path)
        if stated not in (None, self.tokens):
            raise TokmillError(
                f"it says {stated} tokens, the index has {self.tokens}",
                where=f"{path}.metadata",
                hint="the files do not belong together: fetch or make them again",
            )
        wide = told or (2 if size == 2 * self.tokens else 4)
        if size != wide * self.tokens:
            swapped = size in [int(self._ends[-1:].byteswap().sum()) * width for width in (2, 4)]
            what = f"{told}" if told else "2 or 4"
            raise TokmillError(
                f"the index promises {self.tokens} ids of {what} bytes, the file has {size} bytes",
                where=str(path),
                hint="the index is big-endian: its bytes are swapped"
                if swapped
                else "one of the two was cut off, or they do not belong together",
            )
        self.dtype = np.dtype(f"<u{wide}")

    def _damaged(self, what: str) -> TokmillError:
        return TokmillError(
            f"the index is damaged: {what}",
            where=f"{self.path}.index",
            hint="fetch or make it again",
        )

    def starts(self, first: int, last: int) -> Array:
        """Return the tokens at which documents first … last begin."""
        starts = np.zeros(last - first + 1, np.int64)
        starts[first == 0 :] = self._ends[max(first - 1, 0) : last].astype(np.int64)
        if (np.diff(starts) < 0).any():
            raise self._damaged(f"documents {first} to {last} do not follow one another")
        return starts

    def check(self) -> None:
        for at in range(0, self.documents, CHECKED):
            self.starts(at, min(at + CHECKED, self.documents))


def _metadata(path: Path) -> tuple[int | None, int | None]:
    """Return the bytes of an id and the number of tokens from the .metadata, None without one."""
    metadata = path.with_name(path.name + ".metadata")
    if not metadata.is_file():
        return None, None
    lines = read_file(metadata, MOST_METADATA).splitlines() or [b""]
    size, number = lines[0].rpartition(b"|")[2].strip(), b"".join(lines[1:2]).strip()
    if size not in (b"2", b"4"):
        raise TokmillError(
            f"its first line does not end in |2 or |4: {lines[0][:60]!r}",
            where=str(metadata),
            hint="the folder of a .ds file has .ds.index and .ds.metadata, as datatrove wrote them",
        )
    if number and not (number.isdigit() and len(number) < 20):
        raise TokmillError(
            f"its second line is no number of tokens: {number[:60]!r}",
            where=str(metadata),
            hint="datatrove writes it as digits; make or fetch the file again",
        )
    return int(size), int(number) if number else None


class DatatroveSource(IndexedSource):
    """datatrove files, named by the .ds or by a folder. A loss mask (.ds.loss) is not read."""

    Config: ClassVar[type[msgspec.Struct]] = TokenOptions
    token_suffix, companions = ".ds", (".ds.index", ".ds.metadata")

    def index_path(self, path: Path) -> Path:
        return path.with_name(path.name + ".index")

    def index(self, path: Path) -> DatatroveIndex:
        with machine_errors("read", path):
            size = path.stat().st_size
        return DatatroveIndex(path, size)


class DatatroveOptions(
    exports.ExportOptions, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """Options of datatrove files."""

    name: str = "tokens_00000_unshuffled"
    """Name of the files, where OUT is a folder."""
    tokenizer: str | None = None
    """Name of the tokenizer in the metadata; otherwise the vocabulary's file."""


class DatatroveExport:
    """One `.ds` file with its index and metadata, one document a record."""

    Config: ClassVar[type[msgspec.Struct]] = DatatroveOptions

    def __init__(self, config: DatatroveOptions) -> None:
        self.config = config

    def write(self, store: Store, out: Path) -> dict[str, Any]:
        """Write `out` (or `out/NAME.ds`) and its two companions; return files, tokens, bytes."""
        config = self.config
        exports.check_column(store, config)
        vocabulary = store.vocabularies.get(store.schema[config.column].vocab or "")
        name = config.tokenizer or (vocabulary.file if vocabulary else "unknown")
        if "|" in name or "\n" in name:
            raise UsageError(
                f"tokenizer = {name!r}: datatrove parts its metadata at |",
                hint="--tokenizer NAME takes a name without |",
            )
        dtype = exports.wide_dtype(store, config.column)
        data = exports.output_file(out, ".ds", config.name)
        index, metadata = (data.with_name(data.name + s) for s in (".index", ".metadata"))
        # The index is the commit: while the .ds is being replaced there is none.
        files = [data, index, metadata]
        with exporting(
            store, "datatrove", config, data.parent, data.name, files=files, named=out
        ) as export:
            if not export.stands(data):
                remove(index)
            export.put(data, exports.raw(exports.pieces(store, config.column, dtype)))
            lines = [f"{name}|{dtype.itemsize}", str(store.tokens), _readable(store.tokens)]
            export.put(metadata, "\n".join(lines))
            export.put(index, exports.raw(_ends(store)))
        return exports.summary(files, store.tokens, documents=store.records, dtype=dtype.name)


def _ends(store: Store) -> Iterator[Array]:
    base = 0
    for lengths in exports.lengths(store):
        ends = base + np.cumsum(lengths)
        yield ends.astype("<u8")
        base = int(ends[-1]) if len(ends) else base


def _readable(tokens: int) -> str:
    """Return a number of tokens as datatrove writes it for people: three digits and a unit."""
    power = int(math.log10(tokens)) if tokens else 0
    unit = ("", "k", "M", "G", "T", "P")[power // 3]
    return f"{tokens / 1000 ** (power // 3):.{2 - power % 3}f} {unit}T"
