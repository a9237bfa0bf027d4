"""A digest for each record, computed in columns: to find equal records and to sample by content."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tokmill.store.schema import ROLES, Array, Records, Schema, Strings, as_entries
from tokmill.store.store import Store

# 0-dimensional arrays: for few values numpy's scalars would take twice the time.
_M1 = np.asarray(0xBF58476D1CE4E5B9, np.uint64)
_M2 = np.asarray(0x94D049BB133111EB, np.uint64)
_S30, _S27, _S31 = (np.asarray(bits, np.uint64) for bits in (30, 27, 31))
_SALTS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
DIGEST = np.dtype([("a", "<u8"), ("b", "<u8")])
MOST_TOKENS = 1 << 16
"""Tokens that are mixed at a time, some 48 bytes each; or one record."""


def mix(values: Array) -> Array:
    """Return the splitmix64 finaliser of uint64 values (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> _S30)) * _M1
    values = (values ^ (values >> _S27)) * _M2
    return values ^ (values >> _S31)


def token_values(batch: Records, name: str) -> Array:
    """Return a token column of a batch, flat, with phrases expanded."""
    phrases = batch.phrases
    if phrases is not None and name in phrases.table:
        return phrases.expanded(name)
    value = batch.columns[name]
    assert not isinstance(value, Strings)
    return value


def token_bits(batch: Records, names: Sequence[str]) -> Iterator[Array]:
    """Yield each number of the tokens, (tokens,); of a float its bits, of a vector all."""
    for name in names:
        value = token_values(batch, name)
        if value.dtype.kind == "f":
            value = value.view(f"<u{value.itemsize}")
        yield from value.T if value.ndim > 1 else [value]


def record_digests(batch: Records, names: Sequence[str]) -> Array:
    """Return a 128-bit digest of each record's tokens, as structured array (n,) of two uint64.

    A digest is two sums of mixed (token, position, column) values. Equal records have equal
    digests; among n different records the chance of a collision is about n² / 2^129.
    """
    result: np.ndarray[Any, Any] = np.zeros(len(batch), DIGEST)
    lengths = np.diff(batch.offsets)
    ends = np.arange(0, batch.offsets[-1] + MOST_TOKENS, MOST_TOKENS)
    cuts = np.unique(np.minimum(np.searchsorted(batch.offsets, ends), len(batch)))
    for number, tokens in enumerate(token_bits(batch, names)):
        for first, last in itertools.pairwise(cuts.tolist()):
            full = first + np.flatnonzero(lengths[first:last])
            start, stop = batch.offsets[[first, last]]
            begins = batch.offsets[full] - start
            here = tokens[start:stop].astype(np.uint64)
            position = np.arange(len(here), dtype=np.uint64)
            position -= np.repeat(begins, lengths[full]).astype(np.uint64)
            for part, salt in zip(("a", "b"), _SALTS, strict=True):
                column = np.uint64(int(salt) * (number + 1) & 0xFFFFFFFFFFFFFFFF)
                mixed = mix(here * salt + mix(position + column))
                result[part][full] += np.add.reduceat(mixed, begins)
    for part, salt in zip(("a", "b"), _SALTS, strict=True):
        result[part] = mix(result[part] + lengths.astype(np.uint64) * salt)
    return result


def row_digests(batch: Records, schema: Schema) -> Array:
    """Return the digest of each record's tokens; of a store without token columns, of its numbers.

    Such a store has entries, as `anchor`, `positive` and `negative`.
    """
    if not token_names(schema):
        batch = Records(np.arange(len(batch) + 1), batch.columns, batch.starts)
    return record_digests(batch, digested(schema))


def store_digests(store: Store, *, entries: bool = False) -> Array:
    """Return the digests of all records or entries of a store, in order (16 bytes each)."""
    read = ((batch, store.schema) for _, _, batch in store.batches(341 * len(ROLES)))
    parts = [row_digests(*(as_entries(*one)[:2] if entries else one)) for one in read]
    return np.concatenate(parts) if parts else np.zeros(0, DIGEST)


def token_names(schema: Schema) -> list[str]:
    """Return the token columns that the digest of a record covers: all but `border`."""
    return [name for name, c in schema.items() if c.per == "token" and name != "border"]


def digested(schema: Schema) -> list[str]:
    """Return the columns that `row_digests` covers."""
    numbers = [n for n, c in schema.items() if c.per == "record" and c.dtype != "utf8"]
    return token_names(schema) or numbers


def first_of_equals(digests: Array) -> Array:
    """Return for each record the number of the first record with an equal digest (int64)."""
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    return first[inverse.reshape(-1)].astype(np.int64)


def linked(count: int, *links: tuple[Array, Array]) -> Array:
    """Return the smallest number that each of `count` records is linked to, also through others.

    links: (records, as many records), each linked to the one at its place. int64 (count,).
    """
    label = np.arange(count)
    while True:
        before = label
        for left, right in links:
            least, label = np.minimum(label[left], label[right]), label.copy()
            np.minimum.at(label, left, least)
            np.minimum.at(label, right, least)
        label = label[label]
        if np.array_equal(label, before):
            return label
