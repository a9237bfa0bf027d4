"""The ids of headerless token files and llm.c shards, and documents that continue in other files.

Writers of shards cut a corpus at a number of tokens, so a document may begin in `X_000000.bin` and
end in `X_000001.bin`, or later. Source of the format: llm.c, `dev/data/data_common.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.base.files import reading
from tokmill.builds.scan import InputFile
from tokmill.formats.tokens import read_exactly
from tokmill.store.schema import Array

MAX_RECORD = 64 << 20
SEARCH = 1 << 20
NUMBERED = re.compile(r"(.*?)([0-9]+)", re.DOTALL)


class IdRange(NamedTuple):
    """The ids of a file: first byte, dtype, number."""

    header: int
    dtype: np.dtype[Any]
    tokens: int


class Ids:
    """The ids of an open file, by their numbers."""

    def __init__(self, file: BinaryIO, path: Path, id_range: IdRange) -> None:
        self.file, self.path = file, path
        self.header, self.dtype, self.tokens = id_range

    def __getitem__(self, part: slice) -> Array:
        """Return the ids first … last - 1."""
        start, stop = (
            self.header + place * self.dtype.itemsize for place in (part.start, part.stop)
        )
        return np.frombuffer(read_exactly(self.file, start, stop, self.path), self.dtype)

    def behind(self, place: int, separator: int, most: int | None = None) -> int:
        """Return the place after the first separator at or after `place`; without one the end.

        Raises `TokmillError` if there is none within `most` ids (64 MiB), but more ids follow.
        """
        at = place
        limit = min(
            self.tokens, place + (MAX_RECORD // self.dtype.itemsize if most is None else most)
        )
        while at < limit:
            ids = self[at : min(at + SEARCH, limit)]
            found = np.flatnonzero(ids == separator)
            if len(found):
                return at + int(found[0]) + 1
            at += len(ids)
        if limit < self.tokens:
            raise TokmillError(
                f"no document ends within 64 MiB: the id {separator} does not occur",
                where=f"{self.path}, byte {self.byte(place)}",
                hint="is separator_id right? --record-tokens 1048576 cuts records by number",
            )
        return self.tokens

    def byte(self, place: int) -> int:
        return self.header + place * self.dtype.itemsize

    def documents(
        self, first: int, last: int, separator: int, block_bytes: int
    ) -> Iterator[tuple[int, Array, Array]]:
        """Yield (first id, ids, offsets) of whole documents in first … last - 1."""
        step = max(1, block_bytes // self.dtype.itemsize)
        pending: list[Array] = []
        begin, held = first, 0
        for at in range(first, last, step):
            ids = self[at : min(at + step, last)]
            ends = np.flatnonzero(ids == separator) + 1
            if at + len(ids) == last and not (len(ends) and ends[-1] == len(ids)):
                ends = np.append(ends, len(ids))
            if not len(ends):
                pending.append(ids)
                held += len(ids)
                continue
            cut = int(ends[-1])
            yield (
                begin,
                np.concatenate([*pending, ids[:cut]]),
                np.concatenate([[0], ends + held]).astype(np.int64),
            )
            pending, held, begin = [ids[cut:]], len(ids) - cut, at + cut

    def even(
        self, first: int, last: int, record: int, block_bytes: int
    ) -> Iterator[tuple[int, Array, Array]]:
        """Yield (first id, ids, offsets) of records of equal length; the last may be shorter."""
        step = max(1, block_bytes // self.dtype.itemsize // record) * record
        for at in range(first, last, step):
            ids = self[at : min(at + step, last)]
            yield at, ids, np.append(np.arange(0, len(ids), record), len(ids)).astype(np.int64)


@dataclass(slots=True, eq=False)
class Place:
    """The position of a file among the shards of its corpus."""

    file: InputFile
    id_range: IdRange
    continues: bool
    """Its first tokens belong to a document that began in an earlier file."""
    is_open: bool
    """Its last document has no end in this file."""
    next: Place | None
    """The file that continues it."""

    @property
    def alone(self) -> bool:
        """Whether its records do not depend on other files."""
        return not self.continues and not (self.is_open and self.next)

    def rest(self, separator: int) -> list[tuple[Path, int, Array]]:
        """Return (path, first byte, ids) of the parts of its last document in later files."""
        found: list[tuple[Path, int, Array]] = []
        left = MAX_RECORD // self.id_range.dtype.itemsize
        after = self.next if self.is_open and self.id_range.tokens else None
        while after is not None:
            path = after.file.path
            with reading(path) as handle:
                ids = Ids(handle, path, after.id_range)
                end = ids.behind(0, separator, left)
                found.append((path, after.id_range.header, ids[0:end]))
            left -= end
            if end and found[-1][2][-1] == separator:
                break
            after = after.next
        return found


def in_order(files: Iterable[InputFile]) -> list[InputFile]:
    """Return files ordered by folder, name and the number that ends the name."""
    return sorted(files, key=lambda file: (*_numbered(PurePath(file.name)), file.name))


def places(
    files: Sequence[InputFile], id_range: Callable[[Path], IdRange], separator: int
) -> list[Place]:
    """Return the position of each file; `files` are in order.

    A file continues another if both are in the same folder, their names differ only in the number
    at the end, the numbers are consecutive, and headers and dtypes are equal.
    """
    found: list[Place] = []
    for file in files:
        shape = id_range(file.path)
        before = found[-1] if found else None
        if before is not None and not _follow(before.file.path, file.path):
            before = None
        if before is not None and before.id_range[:2] != shape[:2]:
            before = None
        continues = before is not None and before.is_open
        is_open = _last(file.path, shape) != separator if shape.tokens else continues
        found.append(Place(file, shape, continues, is_open, None))
        if before is not None:
            before.next = found[-1]
    return found


def _follow(one: Path, other: Path) -> bool:
    folder, name, number = _numbered(one)
    return number >= 0 and _numbered(other) == (folder, name, number + 1)


def _numbered(path: PurePath) -> tuple[str, str, int]:
    """Return folder, name and number of a file; -1: its name ends in none."""
    found = NUMBERED.fullmatch(path.stem)
    if found is None:
        return str(path.parent), path.stem, -1
    return str(path.parent), found[1], int(found[2])


def _last(path: Path, id_range: IdRange) -> int:
    with reading(path) as handle:
        return int(Ids(handle, path, id_range)[id_range.tokens - 1 : id_range.tokens][0])
