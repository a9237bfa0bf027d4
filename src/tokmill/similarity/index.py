"""An index on disk: arrays of a dense or a sparse index, and what they are of.

A folder with a file an array and `index.json`, which names them and is written last, so that a
reader sees the old index or the new one. Arrays are mapped.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from tokmill.errors import TokmillError, UsageError
from tokmill.files import (
    inside,
    is_lock,
    is_private,
    lock_of,
    machine_errors,
    open_file,
    path_from_text,
    path_to_text,
    read_file,
    reading,
    remove,
    remove_leftovers,
    write_file,
    writing,
)
from tokmill.headers import array_header, loads_json, refused
from tokmill.similarity import dense_index, sparse_index
from tokmill.similarity.dense_index import DenseIndex, damaged, dense_arrays
from tokmill.similarity.rows import is_sparse
from tokmill.similarity.sparse_index import SparseIndex, sparse_arrays
from tokmill.store.schema import Array
from tokmill.store.store import Store

FILE = "index.json"
FORMAT = "tokmill.similarity-index"
VERSION = 2
ARRAYS = {"dense": dense_index.ARRAYS, "sparse": sparse_index.ARRAYS}


OWN = {*ARRAYS["dense"].items(), *ARRAYS["sparse"].items(), *sparse_index.KEYED.items()}
"""Name and dtype of each array."""
NAMED = re.compile(r"\w+-[0-9a-f]{8}\.npy")
"""How the file of an array is called: the array, and the first digits of its digest."""


class IndexFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an index says of itself."""

    format: str
    version: int
    kind: Literal["dense", "sparse"]
    of: str
    """What the vectors are: the name of a baseline, or of a run."""
    store: str
    """The store's folder, relative to the index."""
    fingerprint: str
    """Of the store."""
    records: int
    files: dict[str, str]
    """Array → its file."""
    bounds: dict[str, int]
    """Of sparse vectors: kind → its last column + 1."""
    graphs: list[str]
    """Files and folders of the graphs of the store's programs."""


class Index:
    """An index, opened for queries, with its store."""

    def __init__(self, path: Path | str) -> None:
        """Open an index; raises `TokmillError` if it is damaged, or its store has changed."""
        self.path = Path(path)
        self.facts = read_facts(self.path)
        self.store = Store(self.path / path_from_text(self.facts.store))
        if self.store.fingerprint != self.facts.fingerprint:
            raise TokmillError(
                "the index is stale: the store has changed since it was made: fingerprint "
                f"{self.facts.fingerprint[:12]} then, {self.store.fingerprint[:12]} now",
                where=str(self.path),
                hint=f"make it again: tokmill similarity index … {self.store.path} -o {self.path} "
                "--fresh",
            )
        wanted = ARRAYS[self.facts.kind]
        keyed = sparse_index.KEYED.keys() <= self.facts.files.keys()
        if keyed:
            wanted = wanted | sparse_index.KEYED
        if self.facts.files.keys() != wanted.keys():
            raise damaged(str(self.path))
        arrays = {
            name: _mapped(inside(self.path, self.facts.files[name]), dtype)
            for name, dtype in wanted.items()
        }
        self.rows: DenseIndex | SparseIndex
        if self.facts.kind == "dense":
            self.rows = DenseIndex(arrays, str(self.path))
        else:
            self.rows = SparseIndex(arrays, str(self.path))
        if not len(self.rows) == self.facts.records == len(self.store):
            raise damaged(str(self.path))
        if isinstance(self.rows, SparseIndex):
            ends = [0, *self.facts.bounds.values(), len(self.rows.column_begin) - 1]
            if ends != sorted(ends) or (keyed and ends[-2] != ends[-1]):
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
        other programs, as (columns, values).
        """
        if isinstance(self.rows, DenseIndex):
            assert isinstance(asked, int)
            rows, scores = self.rows.nearest(self.rows.vector(asked), most, exact=exact)
            return rows, scores, [[] for _ in rows]
        query = asked if isinstance(asked, tuple) else self.rows.entries(asked)
        rows, scores = self.rows.nearest(query, most, exact=exact)
        shares = [self.rows.shares(int(row), query, self.facts.bounds) for row in rows]
        return rows, scores, shares


def is_index(path: Path) -> bool:
    """Say whether a folder is an index."""
    return (path / FILE).is_file()


def read_facts(path: Path) -> IndexFacts:
    """Return what an index says of itself; raises `TokmillError` if it is none."""
    with machine_errors("read", path / FILE):
        if not is_index(path):
            what = "the folder is no index" if path.is_dir() else "there is no such index"
            raise TokmillError(what, where=str(path), hint="`tokmill similarity index` makes one")
    hint = "make the index again: tokmill similarity index … --fresh"
    with refused("the file cannot be read", path / FILE, hint=hint):
        facts: IndexFacts = loads_json(read_file(path / FILE), IndexFacts)
    if facts.format != FORMAT or facts.version != VERSION:
        raise TokmillError(
            f"the index has the format {facts.format!r}, version {facts.version}",
            where=str(path / FILE),
            hint=f"this program reads {FORMAT!r}, version {VERSION}: make it again with --fresh",
        )
    return facts


def check_place(path: Path, *, fresh: bool) -> None:
    """Refuse a place where no index can be made: a file, another folder, an index that stands."""
    if path.exists() and not path.is_dir():
        raise UsageError("this is a file", where=str(path), hint="name a folder: -o INDEX")
    if is_index(path) and not fresh:
        raise TokmillError(
            "there is an index already",
            where=str(path),
            hint="--fresh makes it again, or name another folder",
        )
    if path.is_dir() and not is_index(path) and not all(map(_is_own, path.iterdir())):
        raise UsageError(
            "the folder is not empty, and no index", where=str(path), hint="name a new folder"
        )


def _is_own(path: Path) -> bool:
    """Say whether a file is what a writer that was ended leaves: an array, a lock."""
    if is_private(path.name) or (path == lock_of(path.with_name(FILE)) and is_lock(path)):
        return True
    if not NAMED.fullmatch(path.name) or path.is_symlink() or not path.is_file():
        return False
    try:
        with open_file(path) as handle:
            found = array_header(handle)[2].str
        return (path.name.partition("-")[0], found) in OWN
    except (OSError, ValueError, EOFError):
        return False


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
    """Write an index of a store's records to a folder, atomically.

    Args:
        path: the folder.
        store: whose records the rows are of.
        matrix: a row a record, dense or CSR, finite.
        of: what the vectors are.
        bounds: of a CSR matrix: kind → its last column + 1, ascending.
        keys: of a CSR matrix: a key (u8) and a weight (f4) a column, for rows of other programs.
        graphs: of the store's programs.
        fresh: replace an index that stands there.

    Raises `MachineError` if another process writes one there.
    """
    check_place(path, fresh=fresh)
    with writing(path / FILE):
        try:
            check_place(path, fresh=fresh)
            return _write(path, store, matrix, of, bounds or {}, keys, graphs or [])
        finally:
            _tidy(path)


def _tidy(path: Path) -> None:
    """Remove the arrays that no index names, and what killed writers left."""
    remove_leftovers(path)
    kept: set[str] = set()
    if is_index(path):
        try:
            kept = set(read_facts(path).files.values())
        except TokmillError:
            # An index by another version: nobody knows what is its own.
            return
    for file in list(path.iterdir()):
        if file.name not in kept and not is_lock(file) and _is_own(file):
            remove(file)


def _write(
    path: Path,
    store: Store,
    matrix: Any,
    of: str,
    bounds: Mapping[str, int],
    keys: tuple[Array, Array] | None,
    graphs: list[Path],
) -> IndexFacts:
    """Write the arrays, and then the file that names them."""
    kind: Literal["dense", "sparse"] = "sparse" if is_sparse(matrix) else "dense"
    arrays = sparse_arrays(matrix) if kind == "sparse" else dense_arrays(matrix)
    if keys is not None:
        arrays |= dict(zip(sparse_index.KEYED, keys, strict=True))
    files = {}
    for name, values in arrays.items():
        data = _npy(values, (ARRAYS[kind] | sparse_index.KEYED)[name])
        digest = hashlib.sha256(data[0])
        digest.update(data[1])
        files[name] = f"{name}-{digest.hexdigest()[:8]}.npy"
        write_file(path / files[name], data, sync=False)
    facts = IndexFacts(
        format=FORMAT,
        version=VERSION,
        kind=kind,
        of=of,
        store=path_to_text(os.path.relpath(store.path.resolve(), path.resolve())),
        fingerprint=store.fingerprint,
        records=len(store),
        files=files,
        bounds=dict(bounds),
        graphs=[path_to_text(os.path.abspath(one)) for one in graphs],
    )
    write_file(path / FILE, msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n")
    return facts


def _npy(values: Array, dtype: str) -> list[bytes | memoryview]:
    """Return an array as an .npy file: its head and its values."""
    values = np.ascontiguousarray(values, dtype)
    head = io.BytesIO()
    described = {"descr": dtype, "fortran_order": False, "shape": values.shape}
    np.lib.format.write_array_header_1_0(head, described)
    return [head.getvalue(), values.reshape(-1).view(np.uint8).data]


def _mapped(path: Path, dtype: str) -> Array:
    """Map an array of an index; raises `TokmillError` if it has another type, or is cut off."""
    try:
        with reading(path) as handle:
            shape, fortran, found = array_header(handle)
            place = handle.tell()
            if found.str != dtype or fortran or len(shape) not in (1, 2):
                raise ValueError(f"it holds {found} of shape {shape}")
            if 0 in shape:
                return np.zeros(shape, dtype)
            return np.memmap(path, dtype, "r", place, shape)
    except (ValueError, EOFError) as error:
        raise TokmillError(
            f"the index is damaged: {error}",
            where=str(path),
            hint="make it again: tokmill similarity index … --fresh",
        ) from None
