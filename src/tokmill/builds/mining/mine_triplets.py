"""Triplets: a function, the same function in another build, and another function.

Groups: the builds of one function side by side, for losses that compare all with all.

Random numbers are hashes of a seed and of what they are for: equal on every machine.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tokmill.builds.mining.name_columns import Keyed, runs
from tokmill.store.checks.hashes import mix
from tokmill.store.schema import ROLES, Array, Column, Records, id_dtype, take_flat
from tokmill.store.store import Store


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


def triplets(
    columns: Mapping[str, Column], members: Sequence[Array], groups: Array, first: int
) -> Records:
    """Return the triplets of anchors, positives and negatives (-1: none) as records.

    `groups`: the group of each record; `first`: number of the first record of the shard.
    """
    whole = np.stack(members, axis=1)
    whole = whole[(whole >= 0).all(axis=1)]
    values = {**dict(zip(ROLES, whole.T, strict=True)), "group": groups[whole]}
    return Records(
        np.zeros(len(whole) + 1, np.int64),
        {name: value.astype(columns[name].numpy()) for name, value in values.items()},
        whole[:, 0] - first,
    )


TRIES = 64
"""Records that are drawn for a negative; then the anchor makes no triplet."""
ALONE = "no partner in another build"
EQUAL = "partners have the same content"
NO_NEGATIVE = f"no negative among {TRIES} drawn records"
AVOIDED = "draws avoided as negatives: same content under another name"
NAMED_ALIKE = "draws avoided as negatives: same name elsewhere"


class Triplets:
    """`count` triplets for each record that has a partner.

    The positive is a record of the anchor's group from another build with other content. The
    negative is a record of another family and another name (`names.facts_of`).
    """

    def __init__(self, store: Store, config: Any, scratch: str, ref: Column) -> None:
        self.keyed = Keyed(store, config, scratch)
        self.config, self.store = config, store
        family = Column(id_dtype(max(1, len(store))), per="record", width=len(ROLES))
        self.columns = {**dict.fromkeys(ROLES, ref), "group": family}
        self._salts = [salt_of(word, config.seed) for word in ("positive", "negative")]

    def identity(self) -> dict[str, Any]:
        return self.keyed.identity()

    def read(self, place: int) -> Iterator[Records]:
        """Yield the triplets of the anchors in one shard, in the order of the anchors."""
        blocks = self.keyed.blocks(place)
        first = int(blocks[0][0]) if len(blocks[0]) else 0
        for number, records in enumerate(blocks, 1):
            skipped = self.keyed.left_out(records)
            notes = Counter[str]()
            used = records[self.keyed.facts["why"][records] == 0]
            anchor = np.repeat(used, self.config.count)
            times = np.tile(np.arange(self.config.count), len(used))
            positive = self.positives(anchor, times, skipped)
            negative = self.negatives(anchor, times, positive, notes)
            skipped[NO_NEGATIVE] += int(np.count_nonzero((positive >= 0) & (negative < 0)))
            family = self.keyed.facts["family"]
            batch = triplets(self.columns, (anchor, positive, negative), family, first)
            batch.skipped, batch.notes = dict(+skipped), dict(+notes)
            batch.done = number / len(blocks)
            yield batch

    def positives(self, anchor: Array, times: Array, skipped: Counter[str]) -> Array:
        """Return a positive for each anchor, or -1; counts anchors without one."""
        facts, members = self.keyed.facts, self.keyed.members
        at = members.place[anchor]
        begin, end = (edge[at] for edge in members.groups)
        own, own_end = (edge[at] for edge in members.builds)
        partners = (end - begin) - (own_end - own)
        start = below(drawn(self._salts[0], anchor), np.maximum(partners, 1)) + times
        result = np.full(len(anchor), -1)
        open_ = np.flatnonzero(members.others[at] > 0)
        for step in count():
            if not len(open_):
                break
            place = begin[open_] + (start[open_] + step) % partners[open_]
            place += np.where(place >= own[open_], (own_end - own)[open_], 0)
            candidate = members.order[place]
            good = facts["content"][candidate] != facts["content"][anchor[open_]]
            result[open_[good]] = candidate[good]
            open_ = open_[~good]
        first = times == 0
        skipped[ALONE] += int(np.count_nonzero(first & (partners == 0)))
        skipped[EQUAL] += int(np.count_nonzero(first & (partners > 0) & (result < 0)))
        return result

    def negatives(self, anchor: Array, times: Array, positive: Array, notes: Counter[str]) -> Array:
        """Return a negative for each anchor with a positive, or -1; counts draws avoided."""
        facts, used = self.keyed.facts, self.keyed.members.used
        result = np.full(len(anchor), -1)
        open_ = np.flatnonzero(positive >= 0)
        for step in range(TRIES):
            if not len(open_):
                break
            keys = drawn(self._salts[1], anchor[open_], times[open_], step)
            candidate = used[below(keys, len(used))]
            a, c = facts[anchor[open_]], facts[candidate]
            other = a["group"] != c["group"]
            copy, same_name = a["family"] == c["family"], a["name"] == c["name"]
            notes[AVOIDED] += int(np.count_nonzero(other & copy))
            notes[NAMED_ALIKE] += int(np.count_nonzero(other & same_name & ~copy))
            good = ~copy & ~same_name
            result[open_[good]] = candidate[good]
            open_ = open_[~good]
        return result


LONE, SAME, OVER = 1, 2, 3
WHY = {
    LONE: "no record of the same function has other content",
    SAME: "same content as another member",
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
                skipped=dict(+skipped),
                done=number / len(blocks),
            )

    @cached_property
    def dealt(self) -> Dealt:
        facts, used = self.keyed.facts, self.keyed.members.used
        left = np.zeros(len(self.store), np.uint8)
        # Of records of one function with equal content, the one with the smallest key stays.
        kept = ordered(used, drawn(self._salt, used), *columns(facts, used, "content", "group"))
        again = ~begins(*columns(facts, kept, "content", "group"))
        left[kept[again]] = SAME
        kept = kept[~again]
        begin, end = runs(facts["group"][kept])
        alone = end - begin < 2
        left[kept[alone]] = LONE
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
    return values[np.lexsort(keys)]


def begins(*keys: Array) -> Array:
    """Say of each place whether one of the keys differs from that of the place before (bool)."""
    result = np.ones(len(keys[0]), bool)
    if len(result):
        result[1:] = np.logical_or.reduce([np.diff(key) != 0 for key in keys])
    return result
