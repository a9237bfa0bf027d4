"""Find records that repeat an earlier one: equal to it, or near to a kept one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tokmill.builds.minhash import NearIndex, elements, minima
from tokmill.store.hashes import DIGEST, first_of_equals, row_digests, token_names
from tokmill.store.schema import ROLES, Array, Records, as_entries, has_entries
from tokmill.store.store import Store

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
