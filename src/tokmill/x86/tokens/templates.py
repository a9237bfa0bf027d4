"""Many instructions to tokens: the tokens of each kind of instruction are made once, and cached.

A template is the tokens of an instruction; a column of phrases has its number, one number an
instruction. The key of the cache is the canonical code (`tokmill.x86.tokens.canonical`), so the
rules are only applied to instructions that differ in more than a number.
`tokmill.x86.tokens.rules.tokenize_bytes` is the slow and simple version.
"""

from array import array
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array, id_dtype
from tokmill.x86.tokens.canonical import LONGEST, canonical_words
from tokmill.x86.tokens.rules import COLUMNS, ONCE, DecodeError, Tokens, make_rules, not_decoded
from tokmill.x86.tokens.vocabularies.vocabulary import SPECIALS, UNKNOWN, Vocabularies

_M1 = np.uint64(0x9E3779B97F4A7C15)
_M2 = np.uint64(0xBF58476D1CE4E5B9)
_HALF = np.uint64(32)


class KeyIndex:
    """A map from keys to numbers below 2^31.

    A key is two u8, `low` and `high`, which are not both 0. Collisions go to the next slot; a
    quarter to a half of the slots is used.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self._make(1 << 12)

    def __len__(self) -> int:
        return self.count

    def _make(self, slots: int) -> None:
        self.low = np.zeros(slots, np.uint64)
        self.high = np.zeros(slots, np.uint64)
        self.number = np.full(slots, -1, np.int32)

    def _slots(self, low: Array, high: Array) -> Array:
        hashed = low * _M1
        hashed ^= high * _M2
        hashed ^= hashed >> _HALF
        hashed *= _M1
        hashed >>= np.uint64(65 - len(self.low).bit_length())
        return hashed.astype(np.intp)

    def find(self, low: Array, high: Array) -> Array:
        """Return the numbers (i4, n) of n keys; -1 for unknown keys."""
        slots = self._slots(low, high)
        result = self.number[slots]
        rest = np.flatnonzero((self.low[slots] != low) | (self.high[slots] != high))
        # An empty slot, whose number is -1, ends the search.
        rest = rest[result[rest] >= 0]
        slots = slots[rest]
        while len(rest):
            slots = (slots + 1) & (len(self.low) - 1)
            result[rest] = self.number[slots]
            other = (self.low[slots] != low[rest]) | (self.high[slots] != high[rest])
            other &= result[rest] >= 0
            rest, slots = rest[other], slots[other]
        return result

    def add(self, low: Array, high: Array, numbers: Array) -> None:
        self.count += len(low)
        if self.count * 2 > len(self.low):
            taken = self.number >= 0
            old = self.low[taken], self.high[taken], self.number[taken]
            self._make(1 << (self.count * 4 - 1).bit_length())
            self._put(*old)
        self._put(low, high, numbers)

    def _put(self, low: Array, high: Array, numbers: Array) -> None:
        rest, slots = np.arange(len(low)), self._slots(low, high)
        while len(rest):
            free = self.number[slots] < 0
            # If several keys need the same slot, the last one gets it.
            self.number[slots[free]] = rest[free]
            won = free & (self.number[slots] == rest)
            here, which = slots[won], rest[won]
            self.low[here], self.high[here] = low[which], high[which]
            self.number[here] = numbers[which]
            rest, slots = rest[~won], (slots[~won] + 1) & (len(self.low) - 1)


MOST_KEYS = 1 << 18
"""Number of keys after which the cache is emptied: with templates they take less than 256 MB."""
_CHUNK = 1 << 15
"""Instructions at a time, so that temporary arrays fit into the processor's cache."""

_SPECIAL_IDS = {token: number for number, token in enumerate(SPECIALS)}


class Table(NamedTuple):
    """The tokens of all templates so far; number i has those from offsets[i] to [i + 1]."""

    offsets: Array
    """(m + 1) i8."""
    columns: dict[str, Array]
    """Column → ids, flat."""


class Templates:
    """A cache of templates for one set of rules.

    It can be pickled with its content. Numbers of templates depend on earlier calls, their tokens
    do not.
    """

    def __init__(
        self,
        rules: str = "tokmill",
        bits: int = 64,
        vocabularies: Vocabularies | None = None,
        separator: bool = False,
    ) -> None:
        """Make an empty cache.

        Args:
            vocabularies: column → vocabulary; unknown tokens become `[UNK]`. None: open
                vocabularies, which grow, for counting.
            separator: whether each instruction ends in a `[SEP]`, in all columns.
        """
        self.name, self.bits, self.separator = rules, bits, separator
        self.rules = make_rules(rules, bits)
        self.open = vocabularies is None
        self.ids = {
            column: _Ids(vocabularies[column].ids if vocabularies else _SPECIAL_IDS, self.open)
            for column in COLUMNS
        }
        self.dtypes = {
            column: np.dtype("u4" if self.open else id_dtype(len(ids)))
            for column, ids in self.ids.items()
        }
        self.index = KeyIndex()
        self._clear()

    def _clear(self) -> None:
        self.growing = object()
        """Replaced whenever the cache is emptied (`Phrases.growing`)."""
        self.index.clear()
        self.number_of: dict[bytes, int] = {}
        self.offsets = _Growing(np.dtype("i8"))
        self.offsets.add(np.zeros(1, np.int64))
        self.columns = {column: _Growing(dtype) for column, dtype in self.dtypes.items()}

    def __getstate__(self) -> dict[str, Any]:
        # The rules hold objects of iced-x86, which cannot be pickled.
        return {name: value for name, value in vars(self).items() if name != "rules"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.rules = make_rules(self.name, self.bits)

    def table(self) -> Table:
        """Return the tokens of the templates, as views.

        They are valid for all numbers since the cache was last emptied, so call this right after
        `numbers`.
        """
        return Table(
            self.offsets.values(),
            {column: values.values() for column, values in self.columns.items()},
        )

    def numbers(self, code: Array, lengths: Array) -> Array:
        """Return the template of each instruction.

        Args:
            code: u1, instructions end to end.
            lengths: u1 (n), their lengths in bytes. At most some million instructions, because the
                cache is only emptied between two calls.

        Returns:
            u4 (n), rows of `table()`.

        Raises:
            DecodeError: bytes are not an instruction of this length; nothing is cached for them.
                It is at their place in `code`.
        """
        if len(self.index) > MOST_KEYS:
            self._clear()
        result = np.empty(len(lengths), np.uint32)
        ends = np.cumsum(lengths, dtype=np.intp)
        if len(code) != (ends[-1] if len(ends) else 0):
            raise ValueError(f"{len(code)} bytes of code, but {ends[-1:].sum()} of instructions")
        for first in range(0, len(lengths), _CHUNK):
            last = min(first + _CHUNK, len(lengths))
            start = int(ends[first] - lengths[first])
            try:
                result[first:last] = self._chunk(code[start : ends[last - 1]], lengths[first:last])
            except _Refused as refused:
                row = first + refused.row
                place = int(ends[row] - lengths[row])
                raise _located(refused, code[place : ends[row]], place, self.bits) from None
        return result

    def _chunk(self, code: Array, lengths: Array) -> Array:
        low, high = self._keys(code, lengths)
        numbers = self.index.find(low, high)
        missing = np.flatnonzero(numbers < 0)
        if len(missing):
            keys = np.stack([low[missing], high[missing]], axis=1)
            # Byte strings are sorted much faster than rows; the last byte is never 0.
            _, first, inverse = np.unique(
                keys.view("S16").reshape(-1), return_index=True, return_inverse=True
            )
            order = np.argsort(first)
            rows = first[order]
            added = self._make(keys[rows], missing[rows])
            self.index.add(keys[rows, 0], keys[rows, 1], added)
            place = np.empty(len(order), np.intp)
            place[order] = np.arange(len(order))
            numbers[missing] = added[place[inverse]]
        return numbers

    def _keys(self, code: Array, lengths: Array) -> tuple[Array, Array]:
        """Return the canonical bytes of each instruction and its length as two u8 (n)."""
        if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= LONGEST:
            raise _Refused(int(np.flatnonzero((lengths < 1) | (lengths > LONGEST))[0]))
        return canonical_words(code, lengths, self.bits)

    def _make(self, keys: Array, rows: Array) -> Array:
        """Return the numbers (i4) of new keys; `rows`: the instruction of each key."""
        raw = keys.view(np.uint8)
        sizes = raw[:, LONGEST]
        code = raw[np.arange(LONGEST + 1) < sizes[:, None]].tobytes()
        decoder = plugins.require("iced_x86").Decoder(self.bits, code)
        contents = []
        for row, size, instruction in zip(rows.tolist(), sizes.tolist(), decoder, strict=False):
            if not instruction or len(instruction) != size:
                raise _Refused(row)
            try:
                contents.append(self._content(self.rules.tokens(instruction)))
            except DecodeError as error:
                raise _Refused(row, error) from None
        first_new = len(self.number_of)
        numbers = [self.number_of.setdefault(content, len(self.number_of)) for content in contents]
        new = dict(zip(numbers, contents, strict=True))
        self._extend([new[number] for number in range(first_new, len(self.number_of))])
        return np.array(numbers, np.int32)

    def _content(self, tokens: Tokens) -> bytes:
        asm, mne, kind, reg, rw, eflag = (self.ids[column] for column in COLUMNS)
        count = len(tokens["asm"])
        streams = [
            [asm[token] for token in tokens["asm"]],
            [mne[tokens["mne"]]] * count,
            [kind[name] for name, run in tokens["type"] for _ in range(run)],
            [reg[token] for token in tokens["reg"]],
            [rw[name] for name, run in tokens["rw"] for _ in range(run)],
            [eflag[tokens["eflag"]]] * count,
        ]
        if self.separator:
            streams = [[*stream, _SPECIAL_IDS["[SEP]"]] for stream in streams]
        return array("I", chain.from_iterable(streams)).tobytes()

    def _extend(self, contents: list[bytes]) -> None:
        if not contents:
            return
        ids = np.frombuffer(b"".join(contents), np.uint32)
        lengths = np.array([len(content) for content in contents]) // (4 * len(COLUMNS))
        ends = np.cumsum(lengths)
        # Where a column begins in each content, and the place of each token within the column.
        begins = (ends - lengths) * len(COLUMNS)
        within = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        for place, column in enumerate(COLUMNS):
            where = np.repeat(begins + place * lengths, lengths) + within
            self.columns[column].add(ids[where])
        self.offsets.add(self.offsets.values()[-1] + ends)

    def counts(self, numbers: Array) -> dict[str, dict[str, int]]:
        """Return column → token → count for the instructions with these `numbers`.

        `mne` and `eflag` are counted once for each instruction.
        """
        offsets, columns = self.table()
        uses = np.bincount(numbers, minlength=len(offsets) - 1)
        result = {}
        for column, ids in columns.items():
            each = uses if column in ONCE else np.repeat(uses, np.diff(offsets))
            ids = ids[offsets[:-1]] if column in ONCE else ids
            # Sums of whole numbers, which are exact in float64 up to 2^53.
            sums = np.bincount(ids, each, len(self.ids[column])).astype(np.int64)
            tokens = zip(self.ids[column], sums.tolist(), strict=True)
            result[column] = {token: count for token, count in tokens if count}
        return result


class _Refused(Exception):
    """An instruction (its row in the chunk) without tokens; error None: it is invalid."""

    def __init__(self, row: int, error: DecodeError | None = None) -> None:
        super().__init__(row)
        self.row, self.error = row, error


def _located(refused: _Refused, code: Array, address: int, bits: int) -> DecodeError:
    if refused.error is None:
        return not_decoded(code.tobytes(), address, bits)
    what, hint = refused.error.what, refused.error.hint
    return DecodeError(what, where=f"{address:#x}", hint=hint)


class _Ids(dict[str, int]):
    """Token → id; an unknown token is `[UNK]`, or gets a new id if the vocabulary is open."""

    def __init__(self, ids: dict[str, int], grows: bool) -> None:
        super().__init__(ids)
        self.grows = grows

    def __missing__(self, token: str) -> int:
        if not self.grows:
            return UNKNOWN
        self[token] = len(self)
        return self[token]


class _Growing:
    """An array that grows at its end; earlier views of it stay valid."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.data = np.empty(1 << 10, dtype)
        self.count = 0

    def values(self) -> Array:
        view = self.data[: self.count]
        view.flags.writeable = False
        return view

    def add(self, values: Array) -> None:
        stop = self.count + len(values)
        if stop > len(self.data):
            larger = np.empty(1 << (2 * stop - 1).bit_length(), self.data.dtype)
            larger[: self.count] = self.data[: self.count]
            self.data = larger
        self.data[self.count : stop] = values
        self.count = stop
