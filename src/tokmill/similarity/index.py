"""An index on disk: a file with the arrays of a dense or a sparse index, and what they are of.

It is a safetensors file, whose metadata hold the facts, and is mapped. One rename puts it in its
place, so a reader sees the old index or the new one.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import make_folder, path_from_text, path_to_text, reading, write_file
from tokmill.base.headers import loads_json, tensor_header
from tokmill.similarity import dense_index, sparse_index
from tokmill.similarity.dense_index import DenseIndex, damaged, dense_arrays
from tokmill.similarity.sparse_index import SparseIndex, sparse_arrays
from tokmill.similarity.vector_rows import is_sparse
from tokmill.store.schema import Array
from tokmill.store.store import Store

FORMAT = "tokmill.similarity-index"
VERSION = 3
ARRAYS = {"dense": dense_index.ARRAYS, "sparse": sparse_index.ARRAYS}
TYPES = {"<f2": "F16", "<f4": "F32", "<u4": "U32", "<i8": "I64", "<u8": "U64"}
"""Dtype of an array → its name in safetensors."""


class IndexFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an index says of itself."""

    version: int
    kind: Literal["dense", "sparse"]
    of: str
    """What the vectors are: the name of a baseline, or of a run."""
    store: str
    """The store's folder, relative to that of the index."""
    fingerprint: str
    """Fingerprint of the store."""
    records: int
    bounds: dict[str, int]
    """Kind of sparse vectors → its last column + 1."""
    graphs: list[str]
    """Files and folders of the graphs of the store's programs."""


class Index:
    """An index, opened for queries, with its store."""

    def __init__(self, path: Path | str) -> None:
        """Open an index; raises `TokmillError` if it is damaged, or its store has changed."""
        self.path = Path(path)
        self.facts, arrays = read_index(self.path)
        self.store = Store(self.path.parent / path_from_text(self.facts.store))
        if self.store.fingerprint != self.facts.fingerprint:
            raise TokmillError(
                "the index is stale: the store has changed since it was made: fingerprint "
                f"{self.facts.fingerprint[:12]} then, {self.store.fingerprint[:12]} now",
                where=str(self.path),
                hint=f"make it again: tokmill similarity index … {self.store.path} -o {self.path} "
                "--fresh",
            )
        self.rows: DenseIndex | SparseIndex
        if self.facts.kind == "dense":
            self.rows = DenseIndex(arrays, str(self.path))
        else:
            self.rows = SparseIndex(arrays, str(self.path))
        if not len(self.rows) == self.facts.records == len(self.store):
            raise damaged(str(self.path))
        if isinstance(self.rows, SparseIndex):
            ends = [0, *self.facts.bounds.values(), len(self.rows.column_begin) - 1]
            if ends != sorted(ends) or ("key" in arrays and ends[-2] != ends[-1]):
                raise damaged(str(self.path))

    def nearest(
        self,
        asked: int | tuple[Array, Array],
        most: int,
        *,
        exact: bool = False,
    ) -> tuple[Array, Array, list[list[float]]]:
        """Return the records nearest to one, their scores, and the share of each kind, if known.

        `asked`: a record, which is among those that are found; of a sparse index also a row of
        other programs, as (columns, values). `exact`: a sparse index scores every row.
        """
        if isinstance(self.rows, DenseIndex):
            assert isinstance(asked, int)
            rows, scores = self.rows.nearest(self.rows.vectors[asked], most)
            return rows, scores, [[] for _ in rows]
        query = asked if isinstance(asked, tuple) else self.rows.entries(asked)
        rows, scores = self.rows.nearest(query, most, exact=exact)
        shares = [self.rows.shares(int(row), query, self.facts.bounds) for row in rows]
        return rows, scores, shares


def is_index(path: Path) -> bool:
    if not path.is_file():
        return False
    with reading(path) as handle:
        try:
            return tensor_header(handle, path.stat().st_size).metadata.get("format") == FORMAT
        except ValueError:
            return False


def read_index(path: Path) -> tuple[IndexFacts, dict[str, Array]]:
    """Return what an index says of itself, and its arrays, mapped.

    Raises `TokmillError` if the file is none, is of another version, or is damaged.
    """
    if not is_index(path):
        what = "this is no index" if path.exists() else "there is no such index"
        raise TokmillError(what, where=str(path), hint="`tokmill similarity index` makes one")
    with reading(path) as handle:
        size = handle.seek(0, 2)
        whole: Any = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        header = tensor_header(whole, size)
        facts: IndexFacts = loads_json(header.metadata["facts"], IndexFacts)
    except (ValueError, KeyError) as error:
        raise TokmillError(
            f"the index is damaged: {error}",
            where=str(path),
            hint="make it again: tokmill similarity index … --fresh",
        ) from None
    if facts.version != VERSION:
        raise TokmillError(
            f"the index has the version {facts.version}",
            where=str(path),
            hint=f"this program reads version {VERSION}: make it again with --fresh",
        )
    begin = 8 + header.length
    wanted = ARRAYS[facts.kind]
    if header.tensors.keys() != wanted.keys():
        wanted = wanted | sparse_index.KEYED
    ends = [entry.data_offsets[1] for entry in header.tensors.values()]
    if header.tensors.keys() != wanted.keys() or begin + max(ends, default=0) != size:
        raise damaged(str(path))
    arrays = {}
    for name, entry in header.tensors.items():
        if entry.dtype != TYPES[wanted[name]]:
            raise damaged(str(path))
        first, last = entry.data_offsets
        dtype = np.dtype(wanted[name])
        flat = np.frombuffer(whole, dtype, (last - first) // dtype.itemsize, begin + first)
        arrays[name] = flat.reshape(entry.shape)
    return facts, arrays


def check_place(path: Path, *, fresh: bool) -> None:
    """Refuse a place where no index can be made: a folder, another file, an index that stands."""
    if path.is_dir():
        raise UsageError("this is a folder", where=str(path), hint="name a file: -o INDEX")
    if is_index(path) and not fresh:
        raise TokmillError(
            "there is an index already",
            where=str(path),
            hint="--fresh makes it again, or name another file",
        )
    if path.exists() and not is_index(path):
        raise UsageError("the file is no index", where=str(path), hint="name a new file")


def write_index(
    path: Path,
    store: Store,
    matrix: Any,
    *,
    of: str,
    bounds: Mapping[str, int] | None = None,
    keys: tuple[Array, Array] | None = None,
    graphs: list[Path] | None = None,
    fresh: bool = False,
) -> IndexFacts:
    """Write an index of a store's records, atomically; equal vectors give equal bytes.

    Args:
        path: the file.
        store: whose records the rows are of.
        matrix: a row a record, dense or CSR, finite.
        of: what the vectors are.
        bounds: of a CSR matrix: kind → its last column + 1, ascending.
        keys: of a CSR matrix: a key (u8) and a weight (f4) a column, for rows of other programs.
        graphs: of the store's programs.
        fresh: replace an index that stands there.
    """
    check_place(path, fresh=fresh)
    kind: Literal["dense", "sparse"] = "sparse" if is_sparse(matrix) else "dense"
    arrays = sparse_arrays(matrix) if kind == "sparse" else dense_arrays(matrix)
    if keys is not None:
        arrays |= dict(zip(sparse_index.KEYED, keys, strict=True))
    make_folder(path.absolute().parent)
    facts = IndexFacts(
        version=VERSION,
        kind=kind,
        of=of,
        store=path_to_text(os.path.relpath(store.path.resolve(), path.resolve().parent)),
        fingerprint=store.fingerprint,
        records=len(store),
        bounds=dict(bounds or {}),
        graphs=[path_to_text(os.path.abspath(one)) for one in graphs or []],
    )
    dtypes = ARRAYS[kind] | sparse_index.KEYED
    values = {name: np.ascontiguousarray(array, dtypes[name]) for name, array in arrays.items()}
    write_file(path, _chunks(facts, values))
    return facts


def _chunks(facts: IndexFacts, arrays: Mapping[str, Array]) -> Iterator[bytes | memoryview]:
    """Yield the header and the arrays, those of the widest values first: all are aligned."""
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    said = {"format": FORMAT, "facts": msgspec.json.encode(facts).decode()}
    header: dict[str, Any] = {"__metadata__": said}
    place = 0
    for name in order:
        array = arrays[name]
        offsets = [place, place := place + array.nbytes]
        kind = TYPES[array.dtype.str]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        if arrays[name].size:
            yield arrays[name].reshape(-1).view(np.uint8).data
