"""A digest for each record, computed in columns: to find equal records and to sample by content."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokmill.store.schema import Array, Records, Schema
from tokmill.store.store import Store
from tokmill.store.strings import Strings

# 0-dimensional arrays: for few values numpy's scalars would take twice the time.
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
    """Return a token column of a batch, flat, with phrases expanded."""
    phrases = batch.phrases
    if phrases is not None and name in phrases.table:
        return phrases.expanded(name)
    value = batch.columns[name]
    assert not isinstance(value, Strings)
    return value


def record_digests(batch: Records, names: list[str]) -> Array:
    """Return a 128-bit digest of each record's tokens, as structured array (n,) of two uint64.

    A digest is two sums of mixed (token, position, column) values. Equal records have equal
    digests; among n different records the chance of a collision is about n² / 2^129.
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


def row_digests(batch: Records, schema: Schema) -> Array:
    """Return the digest of each record's tokens; of a store without token columns, of its numbers.

    Such a store has entries, as `anchor`, `positive` and `negative`.
    """
    names = token_names(schema)
    if names:
        return record_digests(batch, names)
    n = len(batch)
    parts: list[Array] = [np.zeros((n, 0), np.uint64)]
    for name, column in schema.items():
        value = batch.columns.get(name)
        if column.per == "record" and value is not None and not isinstance(value, Strings):
            bits = value.view(np.uint32) if value.dtype.kind == "f" else value
            parts.append(bits.reshape(n, -1).astype(np.uint64))
    values = np.concatenate(parts, axis=1)
    ends = np.arange(n + 1) * values.shape[1]
    return record_digests(Records(ends, {"value": values.ravel()}, ends[:-1]), ["value"])


def store_digests(store: Store) -> Array:
    """Return the digests of all records of a store, in order (16 bytes a record)."""
    parts = [row_digests(batch, store.schema) for _, _, batch in store.batches(1024)]
    return np.concatenate(parts) if parts else np.zeros(0, DIGEST)


def token_names(schema: Schema) -> list[str]:
    """Return the token columns that the digest of a record covers: all but `border`."""
    return [name for name, c in schema.items() if c.per == "token" and name != "border"]


def first_of_equals(digests: Array) -> Array:
    """Return for each record the number of the first record with an equal digest (int64)."""
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    return first[inverse.reshape(-1)].astype(np.int64)
