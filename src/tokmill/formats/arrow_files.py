"""Arrow files and streams (`.arrow`, `.feather`), and what they share with Parquet files.

`datasets` writes Arrow streams, which have no index of their batches. A stream is read once to
count the batches, and again up to the wanted ones.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from tokmill import plugins
from tokmill.errors import TokmillError
from tokmill.files import machine_errors
from tokmill.headers import arrow_errors


def is_parquet(path: str) -> bool:
    """Say whether a file is Parquet, by its first bytes or else its name."""
    with open(path, "rb") as file:
        head = file.read(4)
    return head == b"PAR1" or (path.endswith(".parquet") and not head.startswith(b"ARRO"))


class ArrowFile:
    """The record batches of one file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._arrow = plugins.require("pyarrow")
        self._ipc = plugins.require("pyarrow.ipc")
        try:
            reader = self._open()
            self.schema = reader.schema
            self.names: list[str] = list(self.schema.names)
            if hasattr(reader, "get_batch"):
                batches: Any = map(reader.get_batch, range(reader.num_record_batches))
            else:
                batches = reader
            self.rows = [len(batch) for batch in batches]
        except arrow_errors(self._arrow) as error:
            raise damaged(self.path, error) from None

    @property
    def count(self) -> int:
        """Number of record batches, 1 at least."""
        return max(1, len(self.rows))

    def rows_before(self, batch: int) -> int:
        """Return the number of rows in the batches before one."""
        return sum(self.rows[:batch])

    def batches(self, numbers: Sequence[int], names: Sequence[str], most: int) -> Iterator[Any]:
        """Yield the named columns of some batches, in parts of about `most` bytes.

        Raises `TokmillError` if the file is damaged.
        """
        try:
            for batch in self._wanted(numbers):
                chosen = batch.select(list(names))
                chosen.validate(full=True)
                rows = max(1, min(8192, most * len(chosen) // max(chosen.nbytes, 1)))
                for start in range(0, len(chosen), rows):
                    yield chosen.slice(start, rows)
        except arrow_errors(self._arrow) as error:
            raise damaged(self.path, error) from None

    def _wanted(self, numbers: Sequence[int]) -> Iterator[Any]:
        # Not mapped: a damaged offset beyond the end of the file would crash the process.
        reader = self._open(mapped=False)
        wanted = [number for number in numbers if number < len(self.rows)]
        if hasattr(reader, "get_batch"):
            yield from map(reader.get_batch, wanted)
            return
        for number, batch in enumerate(reader):
            if number in wanted:
                yield batch
            if not wanted or number >= wanted[-1]:
                return

    def _open(self, *, mapped: bool = True) -> Any:
        open_ = self._arrow.memory_map if mapped else self._arrow.OSFile
        try:
            return self._ipc.open_file(open_(self.path))
        except self._arrow.ArrowInvalid:
            return self._ipc.open_stream(open_(self.path))


def damaged(path: str, error: Exception) -> TokmillError:
    """Return the error for a file that pyarrow cannot read."""
    with machine_errors("read", path), open(path, "rb") as file:
        known = file.read(6).startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"))
    lines = str(error).splitlines() or [type(error).__name__]
    return TokmillError(
        f"the file is damaged or no Parquet or Arrow file: {lines[0]}",
        where=path,
        hint="its writer was killed or its copy cut off: make or fetch it again"
        if known or path.endswith(".parquet")
        else f"it begins like neither: `tokmill inspect {shlex.quote(path)}` shows what it is",
    )
