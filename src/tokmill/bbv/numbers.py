"""Decimal numbers in bytes to integers, thousands at a time."""

from __future__ import annotations

import numpy as np

from tokmill.store.schema import Array

PAD = 24
"""Bytes that must lie before the first number."""
EIGHT = np.uint64(8)
MOST = (1 << 64) - 1


def parse_numbers(text: Array, begins: Array, ends: Array) -> Array:
    """Return the numbers at `text[begin:end]` (uint8 digits) as uint64.

    A number lies at least `PAD` bytes behind the beginning of `text`. Eight digits are read as one
    64-bit word and added up in three multiplications (the well-known method of Johnny Lee).

    Raises `OverflowError` with the place of a number that has more than 64 bits.
    """
    # A word that begins at each byte; numpy reads it unaligned.
    words: Array = np.ndarray((len(text) - 7,), "<u8", text, strides=(1,))
    lengths = ends - begins
    numbers = _eight(words, ends, np.minimum(lengths, 8))
    long = np.flatnonzero(lengths > 8)
    if len(long):
        upper, rest = ends[long] - 8, lengths[long] - 8
        numbers[long] += _eight(words, upper, np.minimum(rest, 8)) * np.uint64(10**8)
        longer = np.flatnonzero(rest > 8)
        if len(longer):
            long, upper, rest = long[longer], upper[longer] - 8, rest[longer] - 8
            top = _eight(words, upper, np.minimum(rest, 8))
            numbers[long] += top * np.uint64(10**16)
            for i in long[(rest > 3) | (top > 999)]:
                numbers[i] = _by_python(text, int(begins[i]), int(ends[i]))
    return numbers


def _eight(words: Array, ends: Array, lengths: Array) -> Array:
    """Return the value of the last `lengths` (1 to 8) digits before `ends`."""
    shift = ((8 - lengths) << 3).astype(np.uint64)
    word = words[ends - 8] & np.uint64(0x0F0F0F0F0F0F0F0F)
    word = (word >> shift) << shift
    word = (word * np.uint64(10 * 2**8 + 1)) >> EIGHT & np.uint64(0x00FF00FF00FF00FF)
    word = (word * np.uint64(100 * 2**16 + 1)) >> np.uint64(16) & np.uint64(0x0000FFFF0000FFFF)
    result: Array = (word * np.uint64(10_000 * 2**32 + 1)) >> np.uint64(32)
    return result


def _by_python(text: Array, begin: int, end: int) -> int:
    digits = text[begin:end].tobytes().lstrip(b"0") or b"0"
    if len(digits) > 20 or (number := int(digits)) > MOST:
        raise OverflowError(begin)
    return number
