"""The order of rows, computed without stored state: keyed permutations and keyed random numbers.

A permutation of 0 … n - 1 is a Feistel network on the next even number of bits, repeated until the
value is below n (cycle walking; Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains").
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any
from weakref import WeakMethod

import numpy as np

from tokmill.base.errors import UsageError
from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array

ROUNDS = 6
"""With 4 rounds, permutations of few numbers are visibly uneven."""
BLOCK = 4096
"""Positions that are computed at once; a batch is then a slice."""
_GOLDEN = np.asarray(0x9E3779B97F4A7C15, np.uint64)


def kept(method: Callable[..., Any], most: int) -> Any:
    """Return a method that keeps its last results, but not its object: stores close at once."""
    weak = WeakMethod(method)
    return lru_cache(maxsize=most)(lambda *arguments: weak()(*arguments))  # type: ignore[misc]


def key(*parts: int | Array) -> Array:
    """Return one uint64 from several integers or uint64 arrays (which broadcast)."""
    numbers = next((i for i, part in enumerate(parts) if not isinstance(part, int)), len(parts))
    state = _key_of(parts[:numbers])
    for part in parts[numbers:]:
        state = _extend(state, np.atleast_1d(np.asarray(part, np.uint64)))
    return state


@lru_cache(maxsize=256)
def _key_of(parts: tuple[int, ...]) -> Array:
    """Return the key of integers (1,); cached, as seeds and epochs repeat."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = _extend(state, np.asarray([part & 0xFFFFFFFFFFFFFFFF], np.uint64))
    state.flags.writeable = False
    return state


def _extend(state: Array, value: Array) -> Array:
    return mix((state + _GOLDEN) ^ mix(value + _GOLDEN))


def permute(positions: Array, n: int | Array, *keys: int | Array, inverse: bool = False) -> Array:
    """Return the images of `positions` under keyed permutations of 0 … n - 1 (int64, any shape).

    `inverse`: the positions of which they are the images.

    `n` and the keys are one number for all positions, or arrays with one value per position; then
    each position has its own permutation. Every n is at least 1, every position below its n.
    """
    values = np.asarray(positions, np.uint64).ravel().copy()
    sizes = np.asarray(n, np.uint64).ravel()
    # frexp's exponent is the number of bits; exact below 2^53.
    half = np.maximum(1, (np.frexp((sizes - np.uint64(1)).astype(np.float64))[1] + 1) // 2)
    half = half.astype(np.uint64)
    mask = (np.uint64(1) << half) - np.uint64(1)
    rounds = list(key(*keys, n, np.arange(ROUNDS, dtype=np.uint64)[:, None]))
    rounds = rounds[::-1] if inverse else rounds
    walking = np.arange(len(values))
    while len(walking):
        block = values[walking]
        left, right = block >> half, block & mask
        for round_key in rounds:
            if inverse:
                left, right = right ^ (mix(left + round_key) & mask), left
            else:
                left, right = right, left ^ (mix(right + round_key) & mask)
        block = (left << half) | right
        values[walking] = block
        again = block >= sizes
        walking = walking[again]
        if len(sizes) > 1:
            half, mask, sizes = half[again], mask[again], sizes[again]
        rounds = [part[again] if len(part) > 1 else part for part in rounds]
    return values.astype(np.int64).reshape(np.shape(positions))


class Order:
    """The rows of a source, epoch after epoch; each epoch has another order.

    Number n is position p = n mod N of epoch e = n div N. An epoch reads one group of rows after
    the other. The keys and the epoch permute the groups; the keys, the epoch and the group's number
    permute the rows of a group. A single group needs only the permutation of its rows.
    """

    def __init__(self, groups: Array, *keys: int, shuffle: bool = True) -> None:
        self.groups, self.keys, self.shuffle = groups, keys, shuffle
        self.count = int(groups.sum())
        self.first = np.cumsum(groups) - groups
        # The last results are cached; they depend only on the arguments.
        self.block = kept(self._make_block, 4)
        self._epoch = kept(self._make_epoch, 2)

    def rows(self, start: int, stop: int) -> tuple[Array, Array]:
        """Return (epoch, row) of the numbers start … stop - 1; both int64."""
        parts = [self.block(epoch, block)[a:b] for epoch, block, a, b in self.parts(start, stop)]
        return np.arange(start, stop) // self.count, np.concatenate([*parts, np.zeros(0, np.int64)])

    def numbers(self, epoch: int, rows: Array) -> Array:
        """Return the numbers that some rows have in an epoch (int64): the inverse of `rows`."""
        if not self.shuffle:
            place = rows
        elif len(self.groups) == 1:
            place = permute(rows, self.count, *self.keys, epoch, inverse=True)
        else:
            group = np.searchsorted(self.first, rows, side="right") - 1
            group_at, ends = self._epoch(epoch)
            place = rows - self.first[group]
            sizes = self.groups[group]
            place = permute(place, sizes, *self.keys, epoch, group, inverse=True)
            place += (ends - self.groups[group_at])[np.argsort(group_at)[group]]
        return epoch * self.count + place

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (epoch, block, first place in it, last place + 1) through start … stop - 1."""
        while start < stop:
            epoch, position = divmod(start, self.count)
            block, place = divmod(position, BLOCK)
            size = min(stop - start, BLOCK - place, self.count - position)
            yield epoch, block, place, place + size
            start += size

    def _make_block(self, epoch: int, block: int) -> Array:
        """Return the rows at the positions of a block of an epoch (int64)."""
        position = np.arange(block * BLOCK, min((block + 1) * BLOCK, self.count))
        if not self.shuffle:
            return position
        if len(self.groups) == 1:
            return permute(position, self.count, *self.keys, epoch)
        group_at, ends = self._epoch(epoch)
        place = np.searchsorted(ends, position, side="right")
        group = group_at[place]
        position -= ends[place] - self.groups[group]
        if group[0] == group[-1]:
            # One permutation: with numbers as keys it costs less than with arrays.
            number = int(group[0])
            rows = permute(position, int(self.groups[number]), *self.keys, epoch, number)
        else:
            rows = permute(position, self.groups[group], *self.keys, epoch, group)
        rows += self.first[group]
        return rows

    def _make_epoch(self, epoch: int) -> tuple[Array, Array]:
        """Return the groups in the order of an epoch, and the cumulative number of their rows."""
        count = len(self.groups)
        order = permute(np.arange(count), count, *self.keys, epoch)
        return order, np.cumsum(self.groups[order])


def shard_groups(count: int, k: int, seed: int) -> list[Array]:
    """Return which of `count` shards are read together: numbers (int64), `k` a group.

    The grouping depends only on the seed, so every epoch has the same number of rows. k = 0: one
    group of all shards. In a group, shards are in the order of the store.
    """
    if k < 0:
        raise UsageError(f"{k} shards cannot be mixed at a time", hint="0 mixes all")
    everything = np.arange(count)
    if k == 0 or k >= count:
        return [everything]
    order = permute(everything, count, seed)
    return [np.sort(order[start : start + k]) for start in range(0, count, k)]
