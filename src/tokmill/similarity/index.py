"""An index on disk: the vectors of a store's records, mapped; a query is compared with all of them.

It is a safetensors file, whose metadata hold the facts. One rename puts it in its place, so a
reader sees the old index or the new one.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import make_folder, path_from_text, path_to_text, reading, write_file
from tokmill.base.headers import loads_json, tensor_header, tensor_header_bytes
from tokmill.similarity.vector_rows import Rows
from tokmill.store.schema import Array
from tokmill.store.store import Store

FORMAT = "tokmill.similarity-index"
VERSION = 4
ARRAY, DTYPE, TYPE = "vector", "<f4", "F32"
"""Name, dtype, and dtype in safetensors of the array."""
BLOCK = 1 << 15
"""Rows at a time."""
DIGITS = 9
"""Tolerance of a score: products of equal rows differ in their last bits."""


class IndexFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an index says of itself."""

    version: int
    of: str
    """What the vectors are: the name of a run or a file."""
    store: str
    """The store's folder, relative to that of the index."""
    fingerprint: str
    records: int


class Index:
    """An index, opened for queries, with its store."""

    def __init__(self, path: Path | str) -> None:
        """Open an index; raises `TokmillError` if it is damaged, or its store has changed."""
        self.path = Path(path)
        self.facts, self.vectors = read_index(self.path)
        self.store = Store(self.path.parent / path_from_text(self.facts.store))
        if self.store.fingerprint != self.facts.fingerprint:
            raise TokmillError(
                "the index is stale: the store has changed since it was made: fingerprint "
                f"{self.facts.fingerprint[:12]} then, {self.store.fingerprint[:12]} now",
                where=str(self.path),
                hint=f"make it again: tokmill similarity index … {self.store.path} -o {self.path}",
            )
        if not len(self.vectors) == self.facts.records == len(self.store):
            raise _damaged(self.path)

    def nearest(self, query: Array, most: int) -> tuple[Array, Array]:
        """Return the rows nearest to a vector and their cosines, at most `most`, the nearest first.

        Rows that tie come in their order. Zeros are near to nothing. Products in float32 find the
        candidates: for d numbers they are wrong by less than d · 2e-7.
        """
        query = query.astype(np.float64)
        length = float(np.sqrt(query @ query))
        if not length:
            return np.zeros(0, np.int64), np.zeros(0)
        query = query / length
        row, score = np.zeros(0, np.int64), np.zeros(0)
        for start in range(0, len(self.vectors), BLOCK):
            block = self.vectors[start : start + BLOCK]
            near = block @ query.astype(np.float32)
            if not np.isfinite(near).all():
                raise _damaged(self.path)
            place = max(len(near) - most, 0)
            few = np.flatnonzero(near >= np.partition(near, place)[place] - 4e-7 * len(query))
            cosines = block[few].astype(np.float64) @ query
            row, score = np.append(row, start + few), np.append(score, cosines)
            row, score = best_of(row, score, most)
        return row, score


def best_of(row: Array, score: Array, most: int) -> tuple[Array, Array]:
    """Return the rows with the largest scores, the largest first; of equal ones the lower row."""
    score = score.round(DIGITS)
    if len(row) > most:
        least = np.partition(score, len(row) - most)[len(row) - most]
        kept = score >= least
        row, score = row[kept], score[kept]
    order = np.lexsort((row, -score))[:most]
    return row[order], score[order]


def is_index(path: Path) -> bool:
    if not path.is_file():
        return False
    with reading(path) as handle:
        try:
            return tensor_header(handle, path.stat().st_size).metadata.get("format") == FORMAT
        except ValueError:
            return False


def read_index(path: Path) -> tuple[IndexFacts, Array]:
    """Return what an index says of itself, and its vectors (n, d) f4 of length 1 or 0, mapped."""
    if not is_index(path):
        what = "this is not an index" if path.exists() else "there is no such index"
        raise TokmillError(what, where=str(path), hint="`tokmill similarity index` makes one")
    with reading(path) as handle:
        size = handle.seek(0, 2)
        whole: Any = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        header = tensor_header(whole, size)
        facts: IndexFacts = loads_json(header.metadata["facts"], IndexFacts)
    except (ValueError, KeyError) as error:
        raise _damaged(path, str(error)) from None
    if facts.version != VERSION:
        raise _damaged(path, f"it has the version {facts.version}, and {VERSION} is read")
    entry = header.tensors.get(ARRAY)
    begin = 8 + header.length
    if entry is None or len(header.tensors) > 1 or entry.dtype != TYPE or len(entry.shape) != 2:
        raise _damaged(path)
    first, last = entry.data_offsets
    if first or begin + last != size:
        raise _damaged(path)
    return facts, np.frombuffer(whole, DTYPE, last // 4, begin).reshape(entry.shape)


def check_place(path: Path) -> None:
    """Refuse a place where no index can be made: a folder, or another file."""
    if path.is_dir():
        raise UsageError("this is a folder", where=str(path), hint="name a file: -o INDEX")
    if path.exists() and not is_index(path):
        raise UsageError("the file is not an index", where=str(path), hint="name a new file")


def write_index(path: Path, store: Store, matrix: Array, *, of: str) -> IndexFacts:
    """Write an index of a store's records, atomically; equal vectors give equal bytes."""
    check_place(path)
    make_folder(path.absolute().parent)
    facts = IndexFacts(
        version=VERSION,
        of=of,
        store=path_to_text(os.path.relpath(store.path.resolve(), path.resolve().parent)),
        fingerprint=store.fingerprint,
        records=len(store),
    )
    write_file(path, _chunks(facts, matrix))
    return facts


def _chunks(facts: IndexFacts, matrix: Array) -> Iterator[bytes | memoryview]:
    metadata = {"format": FORMAT, "facts": msgspec.json.encode(facts).decode()}
    yield tensor_header_bytes([(ARRAY, TYPE, matrix.shape)], metadata)
    unit = Rows(matrix)
    for start in range(0, len(matrix), BLOCK):
        rows = np.arange(start, min(start + BLOCK, len(matrix)))
        yield unit.take(rows).astype(DTYPE).tobytes()


def _damaged(path: Path, why: str = "its array does not fit") -> TokmillError:
    return TokmillError(
        f"the index is damaged: {why}",
        where=str(path),
        hint="make it again: tokmill similarity index",
    )
