"""Instructions to bytes in bulk: what the rules `bytes` have in place of templates of tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.tokens.byte_rules import ByteRules
from tokmill.x86.tokens.canonical import LONGEST
from tokmill.x86.tokens.index import KeyIndex
from tokmill.x86.tokens.rules import BYTE, not_decoded
from tokmill.x86.tokens.templates import MOST_KEYS, Table, Templates
from tokmill.x86.tokens.vocabulary import SPECIALS, Vocabularies


class ByteTemplates:
    """What `tokmill.x86.tokens.templates.Templates` is to other rules, of bytes.

    Every different instruction is a template; its tokens are its bytes.
    """

    def __init__(self, bits: int = 64) -> None:
        self.bits = bits
        self.index = KeyIndex()
        self._clear()

    def _clear(self) -> None:
        self.growing = object()
        """Replaced whenever the cache is emptied (`Phrases.growing`)."""
        self.index.clear()
        self.offsets: Array = np.zeros(1, np.int64)
        self.ids: Array = np.zeros(0, np.uint16)

    def table(self) -> Table:
        """Return the tokens of the templates so far, as `Templates.table`."""
        return Table(self.offsets, {BYTE: self.ids})

    def numbers(
        self, code: Array, lengths: Array, address_of: Callable[[int], int] | None = None
    ) -> Array:
        """Return the template of each instruction, u4 (n), as `Templates.numbers`.

        Raises `DecodeError` for lengths that no instruction has.
        """
        if len(self.index) > MOST_KEYS:
            self._clear()
        ends = np.cumsum(lengths, dtype=np.int64)
        if len(code) != (ends[-1] if len(ends) else 0):
            raise ValueError(f"{len(code)} bytes of code, but {ends[-1:].sum()} of instructions")
        if not len(lengths):
            return np.zeros(0, np.uint32)
        wrong = np.flatnonzero((lengths < 1) | (lengths > LONGEST))
        if len(wrong):
            row = int(wrong[0])
            place = int(ends[row]) - int(lengths[row])
            address = address_of(row) if address_of else place
            raise not_decoded(code[place : int(ends[row])].tobytes(), address, self.bits)
        keys = _keys(code, lengths, ends)
        low, high = keys[:, 0].copy(), keys[:, 1].copy()
        numbers = self.index.find(low, high)
        missing = np.flatnonzero(numbers < 0)
        if len(missing):
            # The last byte of a key is the length, which is never 0.
            _, first, inverse = np.unique(
                keys[missing].view("S16").reshape(-1), return_index=True, return_inverse=True
            )
            rows = missing[np.sort(first)]
            order = np.empty(len(first), np.int64)
            order[np.argsort(first)] = np.arange(len(first))
            made = (len(self.offsets) - 1 + np.arange(len(rows))).astype(np.int32)
            self.index.add(low[rows], high[rows], made)
            numbers[missing] = made[order[inverse.reshape(-1)]]
            self._extend(keys[rows], lengths[rows])
        return numbers.astype(np.uint32)

    def _extend(self, keys: Array, lengths: Array) -> None:
        raw = np.ascontiguousarray(keys).view(np.uint8).reshape(-1, LONGEST + 1)
        there = np.arange(LONGEST + 1) < lengths[:, None]
        self.ids = np.concatenate([self.ids, raw[there].astype(np.uint16) + len(SPECIALS)])
        more = self.offsets[-1] + np.cumsum(lengths, dtype=np.int64)
        self.offsets = np.concatenate([self.offsets, more])


def _keys(code: Array, lengths: Array, ends: Array) -> Array:
    """Return the bytes of each instruction and, as the last one, its length: (n, 2) u8."""
    raw = np.zeros((len(lengths), LONGEST + 1), np.uint8)
    row = np.repeat(np.arange(len(lengths)), lengths)
    raw[row, np.arange(len(code)) - np.repeat(ends - lengths, lengths)] = code
    raw[:, LONGEST] = lengths
    return raw.view("<u8")


AnyTemplates = Templates | ByteTemplates


def make_templates(
    rules: str, bits: int, vocabularies: Vocabularies, separator: bool = False
) -> AnyTemplates:
    """Return the cache of a set of rules, for code of 64 or 32 bits."""
    if rules == ByteRules.name:
        return ByteTemplates(bits)
    return Templates(rules, bits, vocabularies, separator)
