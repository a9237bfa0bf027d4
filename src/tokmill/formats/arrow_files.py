"""Arrow files and streams (`.arrow`, `.feather`): record batches, mapped and not loaded.

`datasets` writes the form of a stream, which has no list of its batches; it is walked once to count
them, and again to the ones that are wanted.
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
            raise self._broken(error) from None

    @property
    def count(self) -> int:
        """Number of record batches, 1 at least."""
        return max(1, len(self.rows))

    def rows_before(self, batch: int) -> int:
        """Return the number of rows in the batches before one."""
        return sum(self.rows[:batch])

    def batches(self, numbers: Sequence[int], names: Sequence[str], most: int) -> Iterator[Any]:
        """Yield the named columns of some batches, in parts of about `most` bytes.

        Raises `TokmillError` where the file is damaged.
        """
        try:
            for batch in self._wanted(numbers):
                chosen = batch.select(list(names))
                chosen.validate(full=True)
                rows = max(1, min(8192, most * len(chosen) // max(chosen.nbytes, 1)))
                for start in range(0, len(chosen), rows):
                    yield chosen.slice(start, rows)
        except arrow_errors(self._arrow) as error:
            raise self._broken(error) from None

    def _wanted(self, numbers: Sequence[int]) -> Iterator[Any]:
        # Not mapped: a damaged place would end the process where it leads out of the file.
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

    def _broken(self, error: Exception) -> TokmillError:
        lines = str(error).splitlines() or [type(error).__name__]
        return TokmillError(
            f"the file is damaged or no Parquet or Arrow file: {lines[0]}",
            where=self.path,
            hint="its writer was killed or its copy cut off: make or fetch it again"
            if self._is_arrow()
            else f"it begins like neither: `tokmill inspect {shlex.quote(self.path)}` says what "
            "it is",
        )

    def _is_arrow(self) -> bool:
        """Return whether the file begins as Arrow files, or their streams, do."""
        with machine_errors("read", self.path), open(self.path, "rb") as file:
            return file.read(6).startswith((b"ARROW1", b"\xff\xff\xff\xff"))
