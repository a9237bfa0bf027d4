"""Vectors of a store's records, rounded so that every sum over them is exact.

A vector is scaled to the length 2,048 and its parts are rounded to whole numbers. A product of two
of them, and each partial sum of it, is a whole number below 2^24, which float32 holds exactly. So a
matrix product is the same in any order of summation: for any number of threads, on any machine.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import sha256_file
from tokmill.builds.selection.overlay_values import open_arrays
from tokmill.store.schema import Array
from tokmill.store.store import Store

UNIT = 2048
"""Length of a rounded vector."""


class VectorTable:
    """The vectors of a store's records: a column of an overlay, or a numpy file.

    Args:
        store: the store.
        named: name of an overlay with one column of vectors, or the path of an .npy file with a
            row for each record.

    Raises `UsageError` if there are no such vectors, `TokmillError` if they do not fit the store.
    """

    def __init__(self, store: Store, named: str) -> None:
        self.path = Path(named)
        if self.path.suffix == ".npy":
            self.parts, self.digest = [_array(store, self.path)], _digest_of(self.path)
        else:
            overlay = Store(store.path, [named]).overlays[named]
            columns = [name for name, c in overlay.schema.items() if c.width and c.per == "record"]
            if len(columns) != 1:
                raise UsageError(
                    f"the overlay has {len(columns) or 'no'} columns of vectors",
                    where=str(overlay.path),
                    hint="`tokmill embed RUN STORE` makes an overlay with one",
                )
            self.path, self.digest = overlay.path, overlay.fingerprint
            self.parts = [overlay.shard(n)[columns[0]] for n in range(len(overlay.shards))]
        self.ends = np.cumsum([len(part) for part in self.parts])
        self.width = self.parts[0].shape[1] if self.parts else 0

    def units(self, records: Array) -> Array:
        """Return the rounded vectors of some records, float32 (n, width); of zeros zeros.

        Raises `TokmillError` for a vector that is not finite.
        """
        rows = np.zeros((len(records), self.width), np.float32)
        part = np.searchsorted(self.ends, records, side="right")
        for number in np.unique(part):
            here = part == number
            begin = self.ends[number] - len(self.parts[number])
            rows[here] = self.parts[number][records[here] - begin]
        bad = ~np.isfinite(rows).all(axis=1)
        if bad.any():
            raise TokmillError(
                f"the vector of record {int(records[bad][0])} is not finite",
                where=str(self.path),
                hint="make the vectors again without NaN and infinities",
            )
        return rounded(rows)


def rounded(vectors: Array) -> Array:
    """Return vectors (n, D) with length 2,048 and whole parts, float32; of zeros zeros."""
    # Scaled first, so that no square leaves the range of float64.
    large = np.abs(vectors).max(axis=1, keepdims=True, initial=0).astype(np.float64)
    scaled = vectors / np.where(large > 0, large, 1)
    length = np.sqrt((scaled * scaled).sum(axis=1, keepdims=True))
    result: Array = np.rint(scaled * (UNIT / np.where(length > 0, length, 1))).astype(np.float32)
    return result


def _array(store: Store, path: Path) -> Array:
    [array] = open_arrays(path, "vectors", "").values()
    if array.ndim != 2 or len(array) != len(store):
        raise UsageError(
            f"the array has the shape {array.shape}, and the store {len(store):,} records",
            where=str(path),
            hint="save a vector for each record: (records, width)",
        )
    return array


def _digest_of(path: Path) -> str:
    stat = path.stat()
    return _hashed(path, stat.st_ctime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _hashed(path: Path, changed: int, size: int) -> str:
    return sha256_file(path)


def similarity(left: Array, right: Array) -> Array:
    """Return the cosines of rounded vectors row by row, float64; exact but for the rounding."""
    result: Array = (left * right).sum(axis=1).astype(np.float64) / UNIT**2
    return result
