"""Candidates: pairs of functions that are worth comparing, a few for each function."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.features.bags import nearest_rows, sketch
from tokmill.x86.image.image import distinct

WIDTH = 256
RARE = 4
"""A feature is rare if at most so many functions of a program have it."""
FEW = 8192
"""If the smaller program has at most so many functions, more candidates are taken."""


@dataclass(slots=True)
class Pairs:
    """n pairs (row of A, row of B), ascending, each once."""

    rows: int
    columns: int
    key: Array
    """(n,) i8: row · columns + column."""

    @property
    def i(self) -> Array:
        """(n,) rows of A."""
        return self.key // max(self.columns, 1)

    @property
    def j(self) -> Array:
        """(n,) rows of B."""
        return self.key % max(self.columns, 1)

    def __len__(self) -> int:
        return len(self.key)


def pairs_of(rows: int, columns: int, *parts: tuple[Array, Array]) -> Pairs:
    keys = [i.astype(np.int64) * columns + j for i, j in parts]
    return Pairs(rows, columns, distinct(np.zeros(0, np.int64), *keys))


def near(kinds: Iterable[tuple[Any, Any]], shape: tuple[Array, Array]) -> list[tuple[Array, Array]]:
    """Return pairs (i, j) of similar functions, by all features and by rare ones.

    Args:
        kinds: CSR matrices of weighted TF-IDF of both programs, with the same columns, for each
            kind of feature; only one kind is held at a time.
        shape: counts of both (F, s) f4, compared by distance.
    """
    rows, columns = len(shape[0]), len(shape[1])
    dense = _by_distance(*shape)
    # One table of each side from the start: of large programs it is hundreds of megabytes.
    width = WIDTH + dense[0].shape[1]
    one, other = (np.zeros((size, width), np.float32) for size in (rows, columns))
    rare_pairs = []
    for seed, (left, right) in enumerate(kinds):
        one[:, :WIDTH] += sketch(left, WIDTH, seed)
        other[:, :WIDTH] += sketch(right, WIDTH, seed)
        rare_pairs.append(rare(left, right))
    one[:, WIDTH:], other[:, WIDTH:] = dense
    k = 16 if min(rows, columns) <= FEW else 8
    return [*both_ways(one, other, k), *rare_pairs]


def both_ways(a: Array, b: Array, k: int) -> list[tuple[Array, Array]]:
    """Return the pairs (i, j) of each row and the k nearest of the other table."""
    back_j, back_i = nearest_rows(b, a, k)
    return [nearest_rows(a, b, k), (back_i, back_j)]


def rare(a: Any, b: Any) -> tuple[Array, Array]:
    """Return the pairs that share a column which few rows of both have."""
    uses_a = np.bincount(a.indices, minlength=a.shape[1])
    uses_b = np.bincount(b.indices, minlength=b.shape[1])
    kept = np.flatnonzero((uses_a > 0) & (uses_a <= RARE) & (uses_b > 0) & (uses_b <= RARE))
    if not len(kept):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    both = (a[:, kept] @ b[:, kept].T).tocoo()
    return both.row.astype(np.int64), both.col.astype(np.int64)


def _by_distance(a: Array, b: Array, weight: float = 0.1) -> tuple[Array, Array]:
    scale = np.float32(np.sqrt(2 * weight))
    one, other = np.ones((len(a), 1), np.float32), np.ones((len(b), 1), np.float32)
    far_a = -weight * (a**2).sum(1, keepdims=True)
    far_b = -weight * (b**2).sum(1, keepdims=True)
    return (
        np.concatenate([a * scale, one, far_a], 1).astype(np.float32),
        np.concatenate([b * scale, far_b, other], 1).astype(np.float32),
    )
