"""Parquet files, and Arrow files and streams (`.arrow`, `.feather`), read in groups of rows.

`datasets` writes Arrow streams, which have no index of their batches. A stream is read once to
count the batches, and again up to the wanted ones.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.bounds import bounded
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import address_of, machine_errors
from tokmill.base.headers import arrow_errors
from tokmill.base.remote import open_input, size_of
from tokmill.builds.source import MAX_ITEM
from tokmill.store.schema import Array

MOST_ROWS = 8192
"""Most rows of a record batch."""


def open_table(path: str) -> TableFile:
    """Open a Parquet or Arrow file; raises `TokmillError` if it is damaged."""
    with machine_errors("read", path), open_input(path) as file:
        head = file.read(4)
    if head == b"PAR1" or (path.endswith(".parquet") and not head.startswith(b"ARRO")):
        return ParquetFile(path)
    if address_of(path):
        hint = "copy the file to a disk first; of addresses, Parquet is read"
        raise UsageError("an Arrow file is read whole, not by ranges", where=path, hint=hint)
    return ArrowFile(path)


class TableFile:
    """The groups of rows of one file: row groups of Parquet, record batches of Arrow."""

    schema: Any
    rows: list[int]
    """Number of rows of each group."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._arrow = plugins.require("pyarrow")
        try:
            with bounded(path):
                self._read_layout()
            # Names in a damaged file may not be UTF-8.
            self.names: list[str] = list(self.schema.names)
        except arrow_errors(self._arrow) as error:
            raise damaged(path, error) from None

    def kind(self, name: str) -> Any:
        """Return the type of a column; raises `UsageError` if several have this name."""
        if (count := self.names.count(name)) > 1:
            raise UsageError(
                f"the file has {count} columns {name!r}",
                where=self.path,
                hint="give each a name of its own",
            )
        return self.schema.field(name).type

    def runs(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield runs of groups of at most 64 MiB, or of one larger group, as byte ranges.

        `size` is the size of the file; the ranges are as if all groups had the same size.
        """
        edges = self._edges(size)
        start = 0
        for i in range(1, len(edges)):
            if i == len(edges) - 1 or edges[i + 1] - edges[start] > MAX_ITEM:
                yield edges[start], edges[i]
                start = i

    def read(
        self, start: int, stop: int, names: Sequence[str], most: int
    ) -> Iterator[tuple[Any, Array, float]]:
        """Yield the rows of a run of groups: columns, the numbers of the rows, the share so far.

        Raises as `batches`.
        """
        edges = self._edges(size_of(self.path))
        groups = [i for i, edge in enumerate(edges[:-1]) if start <= edge < stop]
        row = first = sum(self.rows[: groups[0]]) if groups else 0
        last = sum(self.rows[: groups[-1] + 1]) if groups else 0
        for batch in self.batches(groups, names, most):
            starts = np.arange(row, row + len(batch), dtype=np.int64)
            row += len(batch)
            yield batch, starts, (row - first) / max(1, last - first)

    def batches(self, groups: Sequence[int], names: Sequence[str], most: int) -> Iterator[Any]:
        """Yield the named columns of some groups, in record batches of about `most` bytes."""
        steps = self._batches([i for i in groups if i < len(self.rows)], list(names), most)
        try:
            while True:
                with bounded(self.path):
                    batch = next(steps, None)
                if batch is None:
                    return
                yield batch
        except arrow_errors(self._arrow) as error:
            raise damaged(self.path, error) from None

    def _edges(self, size: int) -> list[int]:
        count = max(1, len(self.rows))
        return [size * i // count for i in range(count + 1)]

    def _read_layout(self) -> None:
        raise NotImplementedError

    def _batches(self, groups: list[int], names: list[str], most: int) -> Iterator[Any]:
        raise NotImplementedError


class ParquetFile(TableFile):
    """The row groups of one Parquet file."""

    def _read_layout(self) -> None:
        # Read in pieces, so that a column of a row group is never whole in memory.
        self._file = plugins.require("pyarrow.parquet").ParquetFile(
            open_input(self.path, ahead=False) if address_of(self.path) else self.path,
            buffer_size=1 << 20,
            pre_buffer=False,
            page_checksum_verification=True,
        )
        self.schema = self._file.schema_arrow
        # Metadata of columns are not read: pyarrow aborts the process if they are damaged.
        meta = self._file.metadata
        self.rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]

    def _batches(self, groups: list[int], names: list[str], most: int) -> Iterator[Any]:
        for group in groups:
            size = self._file.metadata.row_group(group).total_byte_size
            rows = max(1, min(MOST_ROWS, most * self.rows[group] // max(size, 1)))
            for batch in self._file.iter_batches(rows, row_groups=[group], columns=names):
                # pyarrow takes a name with a dot for the path to a part of a column too.
                yield batch.select(names)


class ArrowFile(TableFile):
    """The record batches of one Arrow file or stream."""

    def _read_layout(self) -> None:
        reader = self._open()
        self.schema = reader.schema
        if hasattr(reader, "get_batch"):
            batches: Any = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = reader
        self.rows = [len(batch) for batch in batches]

    def _batches(self, groups: list[int], names: list[str], most: int) -> Iterator[Any]:
        for batch in self._wanted(groups):
            chosen = batch.select(names)
            chosen.validate(full=True)
            rows = max(1, min(MOST_ROWS, most * len(chosen) // max(chosen.nbytes, 1)))
            for start in range(0, len(chosen), rows):
                yield chosen.slice(start, rows)

    def _wanted(self, wanted: list[int]) -> Iterator[Any]:
        # Not mapped: a damaged offset beyond the end of the file would crash the process.
        reader = self._open(mapped=False)
        if hasattr(reader, "get_batch"):
            yield from map(reader.get_batch, wanted)
            return
        for number, batch in enumerate(reader):
            if number in wanted:
                yield batch
            if not wanted or number >= wanted[-1]:
                return

    def _open(self, *, mapped: bool = True) -> Any:
        ipc = plugins.require("pyarrow.ipc")
        open_ = self._arrow.memory_map if mapped else self._arrow.OSFile
        try:
            return ipc.open_file(open_(self.path))
        except self._arrow.ArrowInvalid:
            return ipc.open_stream(open_(self.path))


def damaged(path: str, error: Exception) -> TokmillError:
    with open_input(path) as file:
        is_known = file.read(6).startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"))
    lines = str(error).splitlines() or [type(error).__name__]
    return TokmillError(
        f"the file is damaged or no Parquet or Arrow file: {lines[0]}",
        where=path,
        hint="its writer was killed or its copy cut off: make or fetch it again"
        if is_known or path.endswith(".parquet")
        else f"it begins like neither: `tokmill inspect {shlex.quote(path)}` shows what it is",
    )
