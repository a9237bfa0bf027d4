"""Random numbers that are hashes of a seed and of what they are for: equal on every machine."""

from __future__ import annotations

import hashlib

import numpy as np

from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array


def salt_of(*words: object) -> np.uint64:
    """Return a salt for draws of one kind, such as ("positive", seed)."""
    text = "\0".join(map(str, words))
    return np.uint64(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def drawn(salt: np.uint64, *numbers: Array | int) -> Array:
    """Return a uint64 for each tuple of whole numbers (arrays that broadcast, or scalars)."""
    value = np.asarray(salt)
    for number in numbers:
        value = mix(value ^ mix(np.asarray(number).astype(np.uint64)))
    return value


def below(values: Array, limits: Array | int) -> Array:
    """Return whole numbers below `limits` (1 … 2^32), from uint64 that are evenly spread; int64."""
    high = values >> np.uint64(32)
    return ((high * np.asarray(limits).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
