"""Near duplicates: MinHash signatures of records, and an index of the kept records.

The similarity of two records is the Jaccard similarity of their sets of shingles (Broder 1997). A
signature keeps 8 bits of each minimum (Li and König 2010). Signatures are compared only for records
that share a band of minima.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from tokmill.base.errors import UsageError
from tokmill.store.checks.hashes import (
    DIGEST,
    first_of_equals,
    mix,
    record_digests,
    row_digests,
    token_bits,
    token_names,
)
from tokmill.store.schema import PHRASE_BIT, ROLES, Array, Phrases, Records, as_entries, has_entries
from tokmill.store.store import Store

HASHES = 128
LOWEST = 0.5
"""Lowest threshold; below it nearly all pairs of records would have to be compared."""
MISSED = 0.001
"""Share of the pairs exactly at the threshold that may have no band in common."""
AT_A_TIME = 1 << 16
"""Shingles that are hashed at a time."""
PAIRS = 1 << 13
"""Pairs that are compared at a time: 2 MiB of signatures."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)
_ODD = mix(np.arange(1, HASHES + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)


def rows_of_a_band(threshold: float) -> int:
    """Return the largest number of minima in a band with which 99.9 % of the pairs share a band.

    The probability that two records of similarity s share one of the 128 // r bands of r minima is
    1 - (1 - s^r)^(128 // r). Raises `UsageError` for a threshold below 0.5 or above 1.
    """
    if not LOWEST <= threshold <= 1:
        raise UsageError(
            f"near_unique = {threshold} is not a threshold",
            hint=f"a similarity from {LOWEST} to 1; 0.9 is usual",
        )
    rows = range(1, HASHES + 1)
    return max(r for r in rows if (1 - threshold**r) ** (HASHES // r) <= MISSED)


def elements(batch: Records, names: list[str]) -> tuple[Array, Array]:
    """Return the elements of shingles: a hash of each phrase, or of each token without phrases.

    Returns (hashes uint64, flat; offsets int64, records + 1). With phrases, only the columns in
    their table are hashed; else all columns `names`.
    """
    phrases = batch.phrases
    if phrases is None:
        hashes = np.zeros(int(batch.offsets[-1]), np.uint64)
        for number, values in enumerate(token_bits(batch, names), 1):
            salt = np.uint64(int(_GOLDEN) * number & 0xFFFFFFFFFFFFFFFF)
            hashes += mix(values.astype(np.uint64) + salt)
        return hashes, batch.offsets
    used, where = np.unique(phrases.ids & ~PHRASE_BIT, return_inverse=True)
    table = phrases.table_offsets
    ends = np.cumsum(table[used.astype(np.int64) + 1] - table[used])
    each = Phrases(used, np.arange(len(used) + 1), table, phrases.table)
    rows = Records(np.concatenate([[0], ends]), {}, np.zeros(len(used), np.int64), phrases=each)
    digests = record_digests(rows, [name for name in names if name in phrases.table])["a"]
    return digests[where.reshape(-1)], phrases.offsets


def minima(hashes: Array, offsets: Array, shingle: int) -> Array:
    """Return the minimum of each of 128 hash functions over a record's shingles.

    A shingle is `shingle` consecutive elements; a shorter record is one shingle, and an empty one
    has none. Returns uint64 (records, 128).
    """
    lengths = np.diff(offsets)
    place = np.arange(len(hashes)) - np.repeat(offsets[:-1], lengths)
    left = np.repeat(lengths, lengths) - place
    shingles = np.zeros(len(hashes), np.uint64)
    for i in range(min(shingle, int(lengths.max(initial=0)))):
        inside = np.flatnonzero(left > i)
        # A polynomial, so that the order of the elements matters.
        shingles[inside] = shingles[inside] * _GOLDEN + hashes[inside + i]
    whole = (left >= shingle) | (place == 0)
    shingles = mix(shingles[whole])
    counts = np.maximum(lengths - shingle + 1, 1)[lengths > 0]
    begins = np.cumsum(counts) - counts
    least = np.empty((HASHES, len(counts)), np.uint64)
    parts = np.flatnonzero(np.diff(begins // AT_A_TIME)) + 1
    for first, last in pairwise([0, *parts.tolist(), len(counts)] if len(counts) else []):
        here = begins[first:last]
        some = shingles[here[0] : here[-1] + counts[last - 1]]
        hashed = np.empty_like(some)
        for i in range(HASHES):
            np.multiply(some, _ODD[i], out=hashed)
            np.minimum.reduceat(hashed, here - here[0], out=least[i, first:last])
    result = np.full((len(lengths), HASHES), ~np.uint64(0))
    result[lengths > 0] = least.T
    return result


class NearIndex:
    """The records kept so far; finds which new records are near to none of them.

    It holds 128 bytes and 8 bytes a band for each kept record (256 bytes at 0.9).
    """

    def __init__(self, threshold: float) -> None:
        self.rows = rows_of_a_band(threshold)
        self.bands = HASHES // self.rows
        # Two different minima have equal 8 bits once in 256 times.
        self.needed = HASHES * (threshold + (1 - threshold) / 256)
        self.count = 0
        self._signatures = np.zeros((1024, HASHES), np.uint8)
        self._runs: list[Array] = []

    def add(self, least: Array) -> Array:
        """Add records, given their `minima`; return which of them are kept (bool).

        A record is kept unless an earlier kept record is at least as near as the threshold.
        """
        signatures = (mix(least) & np.uint64(0xFF)).astype(np.uint8)
        keys = self._keys(least)
        kept = np.ones(len(least), bool)
        for run in self._runs:
            for row, _ in self._near(signatures, keys, kept, run, self._signatures):
                kept[row] = False
        # Drop equal records first: they share all bands, and many of them would make many pairs.
        left = np.flatnonzero(kept)
        _, first = np.unique(signatures[left].view(f"V{HASHES}"), return_index=True)
        kept[:] = False
        kept[left[first]] = True
        self._drop_near(signatures, keys, kept)
        self._keep(signatures[kept], keys[kept])
        return kept

    def _keys(self, least: Array) -> Array:
        """Return 32-bit keys of bands, in the upper half of uint64 (records, bands)."""
        banded = least[:, : self.rows * self.bands].reshape(-1, self.bands, self.rows)
        keys = np.broadcast_to(np.arange(self.bands, dtype=np.uint64), banded.shape[:2])
        for i in range(self.rows):
            keys = mix(keys * _GOLDEN + banded[:, :, i])
        return keys & ~_LOW

    def _near(
        self, signatures: Array, keys: Array, wanted: Array, run: Array, others: Array
    ) -> Iterator[tuple[Array, Array]]:
        """Yield near pairs (record, other) of wanted records and the records of a sorted run."""
        rows = np.flatnonzero(wanted)
        query = keys[rows].reshape(-1)
        order = np.argsort(query)
        query, rows = query[order], np.repeat(rows, self.bands)[order]
        begin = np.searchsorted(run, query)
        many = np.searchsorted(run, query | _LOW, side="right") - begin
        hit = np.flatnonzero(many)
        rows, begin, many = rows[hit], begin[hit], many[hit]
        cuts = np.flatnonzero(np.diff(np.cumsum(many) // PAIRS)) + 1
        for part in np.split(np.arange(len(hit)), cuts):
            count = many[part]
            first = np.cumsum(count) - count
            place = np.repeat(begin[part] - first, count) + np.arange(int(count.sum()))
            for start in range(0, len(place), PAIRS):
                some = slice(start, start + PAIRS)
                a = np.repeat(rows[part], count)[some]
                b = (run[place[some]] & _LOW).astype(np.int64)
                equal = signatures.take(a, 0) == others.take(b, 0)
                near = equal.sum(1, dtype=np.uint8) >= self.needed
                yield a[near], b[near]

    def _drop_near(self, signatures: Array, keys: Array, kept: Array) -> None:
        """Drop the records of a batch that are near to an earlier kept record of the batch."""
        run = self._run(keys[kept], np.flatnonzero(kept))
        near = [np.zeros((2, 0), np.int64)]
        for row, twin in self._near(signatures, keys, kept, run, signatures):
            near.append(np.stack([row, twin])[:, twin < row])
        later, earlier = np.concatenate(near, axis=1)
        decided = np.ones(len(kept), bool)
        decided[later] = False
        while len(later):
            gone = later[decided[earlier] & kept[earlier]]
            kept[gone] = False
            decided[gone] = True
            open_ = ~decided[later] & ~(decided[earlier] & ~kept[earlier])
            later, earlier = later[open_], earlier[open_]
            # A record in no open pair is kept.
            decided[:] = True
            decided[later] = False

    def _keep(self, signatures: Array, keys: Array) -> None:
        count = self.count + len(signatures)
        if count > len(self._signatures):
            grown = np.zeros((max(count, len(self._signatures) * 3 // 2), HASHES), np.uint8)
            grown[: self.count] = self._signatures[: self.count]
            self._signatures = grown
        self._signatures[self.count : count] = signatures
        self._runs.append(self._run(keys, np.arange(self.count, count)))
        self.count = count
        # Each run is more than twice as long as the next, so there are few runs and few merges.
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            last = self._runs.pop()
            merged = np.concatenate([self._runs.pop(), last])
            merged.sort(kind="stable")
            self._runs.append(merged)

    def _run(self, keys: Array, numbers: Array) -> Array:
        return np.sort((keys | numbers.astype(np.uint64)[:, None]).reshape(-1))


EQUAL, NEAR, LEFT_OUT = 1, 2, 3
REPEATS = {EQUAL: "duplicate", NEAR: "near duplicate"}
BATCH_RECORDS, BATCH_TOKENS = 1024, 1 << 20
Keep = Callable[[Records], Array]
"""Returns which records of a batch are compared (bool)."""


def batches(store: Store, place: int) -> Iterator[tuple[int, Records]]:
    """Yield (first record within the shard, records) of one shard; entries are not cut."""
    shard = store.shard(place)
    offsets = shard["offsets"].astype(np.int64)
    start, count = 0, len(shard)
    size = len(ROLES) if has_entries(store.schema) else 1
    while start < count:
        fitting = int(np.searchsorted(offsets, offsets[start] + BATCH_TOKENS, side="right")) - 1
        stop = min(max(fitting, start + 1), start + BATCH_RECORDS, count)
        stop = start + -(-(stop - start) // size) * size
        yield start, shard.records(start, stop, store.schema)
        start = stop


def find_repeats(
    stores: Sequence[Store], keep: Keep, equal: bool, near: float, shingle: int
) -> Array:
    """Return a uint8 for each record of all stores, in order: EQUAL, NEAR, LEFT_OUT or 0.

    With `equal`, a record is EQUAL if an earlier one has the same tokens. With `near` above 0, it
    is NEAR if its similarity to an earlier kept one is at least that. Only the records that `keep`
    selects are compared; an entry of several records is compared as a whole. Memory: 1 byte a
    record, 16 bytes more with `equal`, and `NearIndex`.
    """
    size = len(ROLES) if has_entries(stores[0].schema) else 1
    index = NearIndex(near) if near else None
    digests, codes = [np.zeros(0, DIGEST)], [np.zeros(0, np.uint8)]
    for store in stores:
        for place in range(len(store.shards)):
            for _, batch in batches(store, place):
                entries, schema, begins = as_entries(batch, store.schema)
                kept = keep(batch)[begins]
                codes.append(np.where(kept, 0, LEFT_OUT).astype(np.uint8))
                if equal:
                    digests.append(row_digests(entries, schema)[kept])
                if index is not None:
                    here = np.flatnonzero(kept)
                    least = minima(*elements(entries, token_names(schema)), shingle)[here]
                    codes[-1][here[~index.add(least)]] = NEAR
    every = np.concatenate(codes)
    if equal:
        first = first_of_equals(np.concatenate(digests))
        chosen = np.flatnonzero(every != LEFT_OUT)
        every[chosen[first != np.arange(len(first))]] = EQUAL
    return np.repeat(every, size)
