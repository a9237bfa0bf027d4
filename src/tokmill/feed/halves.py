"""Two halves in a row: those of one record, or of two similar ones, for telling which they are."""

from collections.abc import Sequence

import numpy as np

from tokmill.base.errors import UsageError
from tokmill.feed.order import kept, key, shard_groups
from tokmill.feed.rows import Numbering, Rows, codes
from tokmill.store.checks.hashes import token_names
from tokmill.store.gather import Spans
from tokmill.store.schema import Array
from tokmill.store.store import Store

LEAST = 4
"""Tokens of a half at least."""
NEAR = 64
"""Records of so many places, in the order of their lengths, meet each other."""
TRIES = 4
"""Ways of pairing them that are tried, until none pairs two of one function."""
AROUND = 32
"""Tokens around the middle of a record that are searched for the beginning of an instruction."""
BORDER = "border"
"""The column whose bit 0 says that an instruction begins, and bit 1 that a block does."""
BLOCK = 2
AT_ONCE = 1 << 22
"""Tokens in which the second block of records is looked for at a time."""
OWN, OTHER = 1, 2
"""Number of the document of a row that is its second half: the first one's own, or another's."""


class Halves(Rows):
    """Rows of two halves; the first half of each record stands in one row of an epoch.

    In half of the rows the second half is its own (document `OWN`), in the others that of another
    record (`OTHER`): of the same value of `group`, of about the same length, and mostly of another
    value of `apart`. A row whose other half would have the tokens of the own one keeps its own.
    Seed and epoch decide which rows these are, so any process can make any row. A half begins with
    an instruction where the store has borders.

    Records meet in pairs, new ones each epoch: each might get the other's second half. So second
    halves are the same ones in both kinds of rows, but for one record of a group of odd size.
    Lengths tell nothing either: whichever it is, the second half is as long as the shorter of both
    that it might be. Where both halves are longer than a row, the first keeps its end and the
    second its beginning.

    Args:
        store: whose records are cut in two.
        length: tokens of a row.
        group: a column with a value per record, such as `program`; "": all records are one group.
        apart: another one, such as `function`; "": none.
        shards: so many shards are mixed at a time, drawn by `seed`; 0: all.
        seed: of that, and of the choices.
        blocks: records are cut where their second block begins, and not near the middle. Halves of
            walks of two blocks are then the two ends of an edge of the control flow.

    `cut_records` and `cut_tokens`: records that are in no row, as they are too short or alone in
    their group, and their tokens.
    """

    def __init__(
        self,
        store: Store,
        length: int,
        *,
        group: str = "",
        apart: str = "",
        shards: int = 0,
        seed: int = 0,
        blocks: bool = False,
    ) -> None:
        self.store, self.length, self.seed = store, length, seed
        self.offsets = store.offsets()
        compared = [name for name in token_names(store.schema) if not store.schema[name].width]
        self._tokens = [n for n in compared if store.schema[n].vocab] or compared
        lengths = np.diff(self.offsets)
        of_group = codes(store, group) if group else np.zeros(len(lengths), np.int64)
        self._second = second_blocks(store, length) if blocks else None
        good = lengths >= 2 * LEAST
        behind = lengths
        if self._second is not None:
            behind = lengths - self._second
            good = (self._second >= LEAST) & (behind >= LEAST)
        sizes = np.bincount(of_group[good], minlength=int(of_group.max(initial=0)) + 1)
        good &= sizes[of_group] > 1
        self.records = np.flatnonzero(good)
        if not len(self.records):
            raise UsageError(
                "no two records are of one group and long enough to be cut in two",
                where=str(store.path),
                hint=f"a record has {2 * LEAST} tokens, and another one its {group or 'length'}"
                + f", and {LEAST} tokens before and in its second block" * blocks,
            )
        self.cut_records = int(np.count_nonzero(~good))
        self.cut_tokens = int(lengths[~good].sum())
        self.apart = codes(store, apart)[self.records] if apart else None
        # Records of one length are mixed, as neighbours in the store are of one function.
        mixed = key(seed, self.records)
        self._order = np.lexsort((mixed, behind[self.records], of_group[self.records]))
        ordered = of_group[self.records][self._order]
        self._place = np.empty(len(ordered), np.int64)
        self._place[self._order] = np.arange(len(ordered))
        first = np.searchsorted(ordered, ordered, side="left")
        place = np.arange(len(ordered))
        # Where the part of each place begins, in the order of lengths.
        self._begins = first + (place - first) // NEAR * NEAR
        self._partners = kept(self._make_partners, 2)
        ends = np.cumsum([0, *(part.records for part in store.shards)])
        borders = np.searchsorted(self.records, ends)
        self._numbering = Numbering(borders, shard_groups(len(store.shards), shards, seed))
        self.groups = self._numbering.groups
        self.tokens = int(np.minimum(lengths[self.records], length).sum())

    def __len__(self) -> int:
        return len(self.records)

    def own(self, rows: Array, epoch: int) -> Array:
        """Return which rows have a second half that is their own, (n,) bool."""
        return self.spans(rows, epoch).document[1::2] == OWN

    def spans(self, rows: Array, epoch: int = 0) -> Spans:
        rows = np.asarray(rows, np.int64)
        keys = key(self.seed, epoch, rows.astype(np.uint64), 1)
        here = self._numbering.in_store_order(rows)
        other = self._partners(epoch)[here]
        record, partner = self.records[here], self.records[other]
        cut, cut_other = self._cuts(record, keys), self._cuts(partner, key(keys, 2))
        lengths = np.diff(self.offsets)
        behind = np.minimum(lengths[record] - cut, lengths[partner] - cut_other)
        first = np.minimum(cut, np.maximum(self.length - behind, -(-self.length // 2)))
        second = np.minimum(behind, self.length - first)
        # Of two rows one, and where the other's second half has the same tokens.
        drawn = key(self.seed, epoch, (rows >> 1).astype(np.uint64), 0) & np.uint64(1)
        own = (rows & 1) == drawn.astype(np.int64)
        some = np.flatnonzero(~own)
        for size in (LEAST, self.length):
            ends = np.minimum(second[some], size)
            left, right = (
                read(self.store, of[some], at[some], at[some] + ends, size, self._tokens)[0]
                for of, at in ((record, cut), (partner, cut_other))
            )
            for name in self._tokens:
                left[name] = (left[name] == right[name]).all(1)
            some = some[np.all([left[name] for name in self._tokens], axis=0)]
        own[some] = True
        begin = np.where(own, cut, cut_other)
        row = np.arange(len(rows))
        return Spans(
            row=np.repeat(row, 2),
            record=np.column_stack([record, np.where(own, record, partner)]).ravel(),
            document=np.column_stack([row * 0, np.where(own, OWN, OTHER)]).ravel(),
            start=np.column_stack([cut - first, begin]).ravel(),
            stop=np.column_stack([cut, begin + second]).ravel(),
        )

    def _make_partners(self, epoch: int) -> Array:
        """Return whom each record meets in an epoch, as places in `records`, (n,) int64."""
        place, begins = np.arange(len(self._begins)), self._begins
        starts = np.flatnonzero(np.diff(begins, prepend=-1))
        part = np.cumsum(np.diff(begins, prepend=-1) > 0) - 1
        ends = np.append(starts[1:], len(begins))[part]
        meets = begins + ((place - begins) ^ 1)
        # The last of an odd number meets the one before it, which is of the same group.
        meets = np.where(meets < ends, meets, place - 1)
        best, fewest = np.empty(0, np.int64), np.empty(0, np.int64)
        for number in range(TRIES if self.apart is not None else 1):
            drawn = key(self.seed, epoch, number, place)
            tried = self._order[np.lexsort((drawn, begins))]
            partner = np.empty_like(tried)
            partner[tried] = tried[meets]
            group = np.zeros(len(starts), np.int64)
            if self.apart is not None:
                same = self.apart[tried] == self.apart[tried[meets]]
                group = np.add.reduceat(same.astype(np.int64), starts)
            if not len(best):
                best, fewest = partner, group
                continue
            better = (group < fewest)[part[self._place]]
            best, fewest = np.where(better, partner, best), np.minimum(group, fewest)
        return best

    def _cuts(self, records: Array, keys: Array) -> Array:
        """Return where records are cut in two: from .35 to .65 of their length, or at a block."""
        if self._second is not None:
            return self._second[records]
        lengths = np.diff(self.offsets)[records]
        share = 0.35 + 0.3 * (keys >> np.uint64(11)) * 2.0**-53
        middle = (lengths * share).astype(np.int64).clip(LEAST, lengths - LEAST)
        if BORDER not in self.store.token_columns:
            return middle
        start, stop = (middle - AROUND).clip(min=0), np.minimum(middle + AROUND, lengths)
        columns, inside = read(self.store, records, start, stop, 2 * AROUND, [BORDER])
        place = start[:, None] + np.arange(2 * AROUND)
        good = (columns[BORDER] & 1 > 0) & (inside >= 0)
        good &= (place >= LEAST) & (place <= (lengths - LEAST)[:, None])
        far = np.where(good, np.abs(place - middle[:, None]), 2 * AROUND)
        return np.where(good.any(1), start + far.argmin(1), middle)


def second_blocks(store: Store, most: int) -> Array:
    """Return where the second block of each record begins, (records,) int64; 0: not in `most`.

    Raises `UsageError` for a store that does not say where blocks begin.
    """
    if BORDER not in store.token_columns:
        raise UsageError(
            "the store does not say where blocks begin",
            where=str(store.path),
            hint="--set task.cut=middle; blocks are in stores of programs: tokmill build x86 "
            "--unit walk --walk-blocks 2",
        )
    lengths = np.minimum(np.diff(store.offsets()), most)
    starts = np.zeros(len(lengths), np.int64)
    count = max(1, AT_ONCE // max(most, 1))
    for first in range(0, len(lengths), count):
        records = np.arange(first, min(first + count, len(lengths)))
        columns, inside = read(store, records, records * 0, lengths[records], most, [BORDER])
        begins = (columns[BORDER] & BLOCK > 0) & (inside >= 0)
        begins[:, 0] = False
        starts[records] = begins.argmax(1)
    return starts


def read(
    store: Store, records: Array, start: Array, stop: Array, width: int, names: Sequence[str]
) -> tuple[dict[str, Array], Array]:
    """Return tokens of records in rows of `width`, by column, and -1 where there is none (n, T)."""
    count = len(records)
    columns: dict[str, Array] = {}
    inside = np.full((count, width), -1, np.int32)
    spans = Spans(np.arange(count), records, np.zeros(count, np.int64), start, stop)
    store.fill(spans, width, columns, inside, count, names)
    return columns, inside
