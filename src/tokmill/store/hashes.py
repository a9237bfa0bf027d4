"""A digest a record, in columns: to find equal records and to draw by content."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokmill.store.schema import PHRASE_BIT, Array, Records
from tokmill.store.store import Store
from tokmill.store.strings import Strings

# Arrays without an axis: with numpy's scalars a few values would cost twice the time.
_M1 = np.asarray(0xBF58476D1CE4E5B9, np.uint64)
_M2 = np.asarray(0x94D049BB133111EB, np.uint64)
_S30, _S27, _S31 = (np.asarray(bits, np.uint64) for bits in (30, 27, 31))
_SALTS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
DIGEST = np.dtype([("a", "<u8"), ("b", "<u8")])


def mix(values: Array) -> Array:
    """Return the splitmix64 finaliser of uint64 values (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> _S30)) * _M1
    values = (values ^ (values >> _S27)) * _M2
    mixed: Array = values ^ (values >> _S31)
    return mixed


def token_values(batch: Records, name: str) -> Array:
    """Return a token column of a batch, flat, phrases written out."""
    phrases = batch.phrases
    if phrases is None or name not in phrases.table:
        value = batch.columns[name]
        assert not isinstance(value, Strings)
        return value
    ids = (phrases.ids & ~PHRASE_BIT).astype(np.int64)
    begins = phrases.table_offsets[ids]
    lengths = phrases.table_offsets[ids + 1] - begins
    flat = np.repeat(begins - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
    values: Array = phrases.table[name][flat]
    return values


def record_digests(batch: Records, names: list[str]) -> Array:
    """Return a 128-bit digest of each record's tokens, as structured array (n,) of two uint64.

    Two sums of mixed (token, position, column) values: equal records have equal digests, and n
    different ones collide with a chance of about n² / 2^129.
    """
    n = len(batch)
    result: np.ndarray[Any, Any] = np.zeros(n, DIGEST)
    lengths = np.diff(batch.offsets)
    full = np.flatnonzero(lengths)
    begins = batch.offsets[:-1][full]
    position = np.arange(int(batch.offsets[-1]), dtype=np.uint64)
    position -= np.repeat(batch.offsets[:-1], lengths).astype(np.uint64)
    for number, name in enumerate(names):
        tokens = token_values(batch, name).astype(np.uint64)
        for part, salt in zip(("a", "b"), _SALTS, strict=True):
            column = np.uint64(int(salt) * (number + 1) & 0xFFFFFFFFFFFFFFFF)
            mixed = mix(tokens * salt + mix(position + column))
            if len(full):
                result[part][full] += np.add.reduceat(mixed, begins)
    for part, salt in zip(("a", "b"), _SALTS, strict=True):
        result[part] = mix(result[part] + lengths.astype(np.uint64) * salt)
    return result


def store_digests(store: Store) -> Array:
    """Return the digests of all records of a store, in order (16 bytes a record)."""
    parts = [record_digests(batch, token_names(store)) for _, _, batch in store.batches(1024)]
    return np.concatenate(parts) if parts else np.zeros(0, DIGEST)


def token_names(store: Store) -> list[str]:
    """Return the token columns that make a record what it is."""
    return [name for name in store.token_columns if name != "border"]


def first_of_equals(digests: Array) -> Array:
    """Return for each record the number of the first one with an equal digest (int64)."""
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    return first[inverse.reshape(-1)].astype(np.int64)
