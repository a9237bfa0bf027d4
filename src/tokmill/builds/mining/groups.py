"""Groups: the builds of one function side by side, for losses that compare all with all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tokmill.builds.mining.mine_triplets import drawn, salt_of
from tokmill.builds.mining.name_columns import Keyed, counted, runs
from tokmill.store.schema import Array, Column, Records, id_dtype, take_flat
from tokmill.store.store import Store

ALONE, EQUAL, OVER = 1, 2, 3
WHY = {
    ALONE: "no record of the same function has other content",
    EQUAL: "same content as another member",
    OVER: "left over: groups of two, and an odd number of records",
}


class Dealt(NamedTuple):
    """The members of all groups end to end, ordered by the first record of the function."""

    member: Array
    offsets: Array
    first: Array
    """The first record of the function of each group."""
    left: Array
    """A key of `WHY` for each record of the store, or 0; uint8."""


class Groups:
    """The records of one function, of each content one, in groups of at most `members`."""

    def __init__(self, store: Store, config: Any, scratch: str, ref: Column) -> None:
        self.keyed = Keyed(store, config, scratch)
        self.config, self.store = config, store
        self.columns = {
            "member": msgspec.structs.replace(ref, per="token"),
            "group": Column(id_dtype(max(1, len(store))), per="record"),
        }
        self._salt = salt_of("member", config.seed)

    def identity(self) -> dict[str, Any]:
        """Return the columns that are compared."""
        return self.keyed.identity()

    def read(self, place: int) -> Iterator[Records]:
        """Yield the groups of the functions whose first record lies in one shard."""
        blocks = self.keyed.blocks(place)
        first = int(blocks[0][0]) if len(blocks[0]) else 0
        facts, dealt = self.keyed.facts, self.dealt
        for number, records in enumerate(blocks, 1):
            skipped = self.keyed.left_out(records)
            for code, why in WHY.items():
                skipped[why] += int(np.count_nonzero(dealt.left[records] == code))
            low, high = (records[0], records[-1]) if len(records) else (0, -1)
            here = np.arange(*np.searchsorted(dealt.first, [low, high + 1]))
            member, offsets = take_flat(dealt.member, dealt.offsets, here)
            family = facts["family"][dealt.first[here]]
            yield Records(
                offsets,
                {
                    "member": member.astype(self.columns["member"].numpy()),
                    "group": family.astype(self.columns["group"].numpy()),
                },
                dealt.first[here] - first,
                skipped=counted(skipped),
                done=number / len(blocks),
            )

    @cached_property
    def dealt(self) -> Dealt:
        facts, used = self.keyed.facts, self.keyed.members.used
        left = np.zeros(len(self.store), np.uint8)
        # Of records of one function with equal content, the one with the smallest key stays.
        kept = ordered(used, drawn(self._salt, used), *columns(facts, used, "content", "group"))
        again = ~begins(*columns(facts, kept, "content", "group"))
        left[kept[again]] = EQUAL
        kept = kept[~again]
        begin, end = runs(facts["group"][kept])
        alone = end - begin < 2
        left[kept[alone]] = ALONE
        kept = kept[~alone]
        # Dealt like cards, one build after the other, so that every group gets several builds.
        kept = ordered(kept, drawn(self._salt, kept), *columns(facts, kept, "variant", "group"))
        build = np.cumsum(begins(*columns(facts, kept, "variant", "group")))
        rank = np.arange(len(kept)) - runs(build)[0]
        kept = ordered(kept, drawn(self._salt, kept), rank, facts["group"][kept])
        begin, end = runs(facts["group"][kept])
        hands = -(-(end - begin) // self.config.members)
        hand = (np.arange(len(kept)) - begin) % np.maximum(hands, 1)
        order = ordered(np.arange(len(kept)), hand, facts["group"][kept])
        kept, hand = kept[order], hand[order]
        begin, end = runs(np.cumsum(begins(hand, facts["group"][kept])))
        over = end - begin < 2
        left[kept[over]] = OVER
        kept, hand = kept[~over], hand[~over]
        new = np.flatnonzero(begins(hand, facts["group"][kept]))
        offsets = np.concatenate([new, [len(kept)]])
        return Dealt(kept, offsets, facts["group"][kept[new]], left)


def columns(facts: Array, records: Array, *names: str) -> list[Array]:
    return [facts[name][records] for name in names]


def ordered(values: Array, *keys: Array) -> Array:
    """Return values in the order of keys, the last the most important."""
    result: Array = values[np.lexsort(keys)]
    return result


def begins(*keys: Array) -> Array:
    """Say of each place whether one of the keys differs from that of the place before (bool)."""
    result = np.ones(len(keys[0]), bool)
    if len(result):
        result[1:] = np.logical_or.reduce([np.diff(key) != 0 for key in keys])
    return result
