"""Parquet files, and Arrow files and streams (`.arrow`, `.feather`), read in groups of rows.

`datasets` writes Arrow streams, which have no index of their batches. A stream is read once to
count the batches, and again up to the wanted ones.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from tokmill import plugins
from tokmill.builds.source import MAX_ITEM
from tokmill.errors import TokmillError, UsageError
from tokmill.files import read_file, reading
from tokmill.headers import arrow_errors

MOST_ROWS = 8192
"""Most rows of a record batch."""


def is_parquet(path: str) -> bool:
    """Say whether a file is Parquet, by its first bytes or else its name."""
    head = read_file(path, 4)
    return head == b"PAR1" or (path.endswith(".parquet") and not head.startswith(b"ARRO"))


def open_table(path: str) -> TableFile:
    """Open a Parquet or Arrow file; raises `TokmillError` if it is damaged."""
    return ParquetFile(path) if is_parquet(path) else ArrowFile(path)


class TableFile:
    """The groups of rows of one file: row groups of Parquet, record batches of Arrow."""

    schema: Any
    """The Arrow schema."""
    rows: list[int]
    """Number of rows of each group."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._arrow = plugins.require("pyarrow")
        try:
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

    def rows_before(self, group: int) -> int:
        """Return the number of rows in the groups before one."""
        return sum(self.rows[:group])

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

    def groups(self, start: int, stop: int, size: int) -> list[int]:
        """Return the numbers of the groups of a run."""
        return [i for i, edge in enumerate(self._edges(size)[:-1]) if start <= edge < stop]

    def batches(self, groups: Sequence[int], names: Sequence[str], most: int) -> Iterator[Any]:
        """Yield the named columns of some groups, in record batches of about `most` bytes.

        Raises `TokmillError` if the file is damaged.
        """
        try:
            yield from self._batches([i for i in groups if i < len(self.rows)], list(names), most)
        except arrow_errors(self._arrow) as error:
            raise damaged(self.path, error) from None

    def _edges(self, size: int) -> list[int]:
        count = max(1, len(self.rows))
        return [size * i // count for i in range(count + 1)]

    def _read_layout(self) -> None:
        """Set `schema` and `rows`."""
        raise NotImplementedError

    def _batches(self, groups: list[int], names: list[str], most: int) -> Iterator[Any]:
        raise NotImplementedError


class ParquetFile(TableFile):
    """The row groups of one Parquet file."""

    def _read_layout(self) -> None:
        open_file = plugins.require("pyarrow.parquet").ParquetFile
        how = {"pre_buffer": False, "page_checksum_verification": True}
        self._file = open_file(self.path, **how)
        if _largest_column(self._file.metadata) > MAX_ITEM:
            # Read in pieces: slower, but the column is never whole in memory.
            self._file = open_file(self.path, buffer_size=1 << 20, **how)
        self.schema = self._file.schema_arrow
        meta = self._file.metadata
        self.rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]

    def _batches(self, groups: list[int], names: list[str], most: int) -> Iterator[Any]:
        for group in groups:
            size = self._file.metadata.row_group(group).total_byte_size
            rows = max(1, min(MOST_ROWS, most * self.rows[group] // max(size, 1)))
            yield from self._file.iter_batches(rows, row_groups=[group], columns=names)


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


def _largest_column(metadata: Any) -> int:
    """Return the compressed bytes of the largest column of a row group."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    sizes = [g.column(i).total_compressed_size for g in groups for i in range(g.num_columns)]
    return max(sizes, default=0)


def damaged(path: str, error: Exception) -> TokmillError:
    """Return the error for a file that pyarrow cannot read."""
    with reading(path) as file:
        known = file.read(6).startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"))
    lines = str(error).splitlines() or [type(error).__name__]
    return TokmillError(
        f"the file is damaged or no Parquet or Arrow file: {lines[0]}",
        where=path,
        hint="its writer was killed or its copy cut off: make or fetch it again"
        if known or path.endswith(".parquet")
        else f"it begins like neither: `tokmill inspect {shlex.quote(path)}` shows what it is",
    )
