"""Triplets of intervals: similar and dissimilar by their basic block vectors.

After SemanticBBV, `pre_processing/asm_bbv_dataset.py` and `asm_bbv_cpi_dataset.py`: cosines of
vectors that are projected at random to 100 dimensions; positives above the mean + 0.5 standard
deviations of a program, negatives below the mean - 1, or semi-hard; with `neighbours`, positives
among the nearest ones. Where no pair of a program is above or below, a quantile of its pairs is the
threshold.
"""

import operator
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from tokmill.base.errors import UsageError
from tokmill.builds.mining.interval_vectors import (
    PAIRS,
    UNIT,
    Edges,
    Programs,
    compared,
    near_ones,
    pairs_of,
    projected,
    search,
    similarity,
    spread_of,
    threshold,
)
from tokmill.builds.mining.mine_triplets import below, drawn, salt_of, triplets
from tokmill.builds.mining.name_columns import digests_of, joined, runs
from tokmill.builds.selection.minhash import batches
from tokmill.builds.shared import shared
from tokmill.store.checks.hashes import DIGEST, first_of_equals, record_digests
from tokmill.store.schema import ROLES, Array, Column, Records, id_dtype
from tokmill.store.store import Store

BLOCK = 1 << 14
"""Anchors at a time."""
TRIES = 64
"""Intervals that are drawn for a positive or a negative, before all of the program are compared."""
NO_BLOCKS, NO_CPI = 1, 2
WHY = {NO_BLOCKS: "no blocks", NO_CPI: "CPI is not known"}
NO_POSITIVE = "no positive above the threshold"
NO_NEGATIVE = "no negative below the threshold"
NO_SEMI_HARD = "no negative within the margin"
FARTHER = "negatives farther than the margin, the nearest of their program"
BY_QUANTILE = "programs whose thresholds no pair reaches: quantiles are taken"
FACTS = np.dtype([("of", "<i8"), ("content", "<i8"), ("why", "u1"), ("", "V7")])


class Intervals:
    """`count` triplets for each interval, all of one program (unless `across`)."""

    def __init__(self, store: Store, config: Any, scratch: str, ref: Column) -> None:
        check_columns(store, config)
        self.store, self.config, self.scratch = store, config, scratch
        group = Column(id_dtype(max(1, len(store))), per="record", width=len(ROLES))
        self.columns = {**dict.fromkeys(ROLES, ref), "group": group}
        self._salts = {word: salt_of(word, config.seed) for word in (*ROLES, "pairs")}

    def identity(self) -> dict[str, Any]:
        """Return the margin where it is used."""
        return {} if self.config.negatives == "semi-hard" else {"margin": None}

    def read(self, place: int) -> Iterator[Records]:
        """Yield the triplets of the anchors in one shard, in the order of the anchors."""
        first = sum(entry.records for entry in self.store.shards[:place])
        here = np.arange(first, first + self.store.shards[place].records)
        blocks = np.split(here, range(BLOCK, len(here), BLOCK))
        for number, records in enumerate(blocks, 1):
            skipped, notes = Counter[str](), Counter[str]()
            codes = self.facts["why"][records]
            for code, why in WHY.items():
                skipped[why] += int(np.count_nonzero(codes == code))
            used = records[codes == 0]
            anchor = np.repeat(used, self.config.count)
            times = np.tile(np.arange(self.config.count), len(used))
            positive, kth = self.positives(anchor, times)
            negative = np.full(len(anchor), -1)
            some = np.flatnonzero(positive >= 0)
            negative[some] = self.negatives(
                anchor[some], times[some], positive[some], kth[some], notes
            )
            missing = NO_SEMI_HARD if self.config.negatives == "semi-hard" else NO_NEGATIVE
            skipped[NO_POSITIVE] += int(np.count_nonzero(positive < 0))
            skipped[missing] += int(np.count_nonzero((positive >= 0) & (negative < 0)))
            begun = np.isin([*self.edges], records).tolist()
            moved = [one.moved for one in self.edges.values()]
            notes[BY_QUANTILE] += sum(map(operator.and_, begun, moved))
            members = (anchor, positive, negative)
            batch = triplets(self.columns, members, self.facts["of"], first)
            batch.skipped, batch.notes = dict(+skipped), dict(+notes)
            batch.done = number / len(blocks)
            yield batch

    def positives(self, anchor: Array, times: Array) -> tuple[Array, Array]:
        """Return a positive for each anchor, or -1, and the cosine of its last near neighbour."""
        config, key = self.config, drawn(self._salts["positive"], anchor, times)
        low = self.thresholds[anchor, 0]
        if config.neighbours:
            return near_ones(
                self.programs, self.units, anchor, key, low, self.other_content, config.neighbours
            )
        high = np.full(len(anchor), 2.0)
        return self.between("positive", anchor, times, low, high), high

    def negatives(
        self, anchor: Array, times: Array, positive: Array, kth: Array, notes: Counter[str]
    ) -> Array:
        """Return a negative for each anchor, or -1.

        Semi-hard: less like the anchor than the positive and its neighbours, by less than the
        margin, or with neighbours the nearest one beyond; else below the threshold.
        """
        if self.config.negatives != "semi-hard":
            low = np.full(len(anchor), -2.0)
            return self.between("negative", anchor, times, low, self.thresholds[anchor, 1])
        like = self.likeness(anchor, positive)
        low, high = like - self.config.margin, np.minimum(like, kth)
        result = self.between("negative", anchor, times, low, high, self.config.neighbours > 0)
        some = np.flatnonzero(result >= 0)
        farther = self.likeness(anchor[some], result[some]) <= low[some]
        notes[FARTHER] += int(np.count_nonzero(farther))
        return result

    def between(
        self, word: str, anchor: Array, times: Array, low: Array, high: Array, beyond: bool = False
    ) -> Array:
        """Return for each anchor an interval of its program, low < cosine < high, or -1.

        With `beyond` it is the nearest one below `low` where nothing is between.
        """
        first_draw = self.draws(word, anchor, times, low, high)
        some = np.flatnonzero(first_draw < 0)
        key = drawn(self._salts[word], anchor[some], times[some])
        result = search(
            self.programs, self.units, anchor[some], key, low[some], high[some], self.other_content
        )
        first_draw[some] = np.where(result.below & (not beyond), -1, result.record)
        return first_draw

    def draws(self, word: str, anchor: Array, times: Array, low: Array, high: Array) -> Array:
        """Return an interval for each anchor as `between` does, of some draws, or -1."""
        order, begin, end = self.programs
        result = np.full(len(anchor), -1)
        open_ = np.arange(len(anchor))
        for step in range(TRIES):
            if not len(open_):
                break
            a = anchor[open_]
            keys = drawn(self._salts[word], a, times[open_], step)
            candidate = order[begin[a] + below(keys, end[a] - begin[a])]
            like = self.likeness(a, candidate)
            good = (like > low[open_]) & (like < high[open_])
            good &= self.facts["content"][a] != self.facts["content"][candidate]
            result[open_[good]] = candidate[good]
            open_ = open_[~good]
        return result

    def likeness(self, left: Array, right: Array) -> Array:
        return similarity(self.units(left), self.units(right))

    def other_content(self, left: Array, right: Array) -> Array:
        content = self.facts["content"]
        return content[left][:, None] != content[right]

    def units(self, records: Array) -> Array:
        """Return the projected vectors of records (`vectors.rounded`)."""
        return self.vectors[records].astype(np.float32)

    @cached_property
    def facts(self) -> Array:
        """A row of `FACTS` for each record: first record of its program, and of equal content."""
        facts = np.zeros(len(self.store), FACTS)
        contents, programs = [np.zeros(0, DIGEST)], [np.zeros(0, DIGEST)]
        grouping = ("trace",) if self.config.across else ("program", "trace")
        names = [name for name in grouping if name in self.store.schema]
        for place in range(len(self.store.shards)):
            for _, batch in batches(self.store, place):
                contents.append(record_digests(batch, ["block", "count"]))
                digests = [digests_of(batch, name) for name in names]
                programs.append(joined(digests, len(batch)))
        facts["content"] = first_of_equals(np.concatenate(contents))
        facts["of"] = first_of_equals(np.concatenate(programs))
        if self.config.cpi:
            facts["why"][~np.isfinite(self.store.column("cpi"))] = NO_CPI
        facts["why"][~self.vectors.any(axis=1)] = NO_BLOCKS
        return facts

    @cached_property
    def programs(self) -> Programs:
        used = np.flatnonzero(self.facts["why"] == 0)
        order = used[np.argsort(self.facts["of"][used], kind="stable")]
        edges = np.zeros((2, len(self.store)), np.int64)
        edges[:, order] = runs(self.facts["of"][order])
        return Programs(order, edges[0], edges[1])

    @cached_property
    def vectors(self) -> Array:
        """The projected vectors of all records, int16 (n, D)."""
        config, shape = self.config, (len(self.store), self.config.dimensions)

        def find() -> Array:
            return projected(self.store, config.dimensions, config.seed)

        parts = ["projected", self.store.content, config.dimensions, config.seed]
        return shared(self.scratch, "projected", parts, np.int16, shape, find)

    @cached_property
    def thresholds(self) -> Array:
        """For each record the least cosine of a positive and the largest of a negative (n, 2)."""
        of, thresholds = self.facts["of"], np.zeros((len(self.store), 2))
        order = self.programs[0]
        rows = [(one.above, one.below) for one in self.edges.values()]
        table = np.asarray(rows).reshape(-1, 2)
        thresholds[order] = table[np.searchsorted([*self.edges], of[order])]
        return thresholds

    @cached_property
    def edges(self) -> dict[int, Edges]:
        """First record of each program → its thresholds."""
        order, _, end = self.programs
        edges, at = {}, 0
        while at < len(order):
            stop = int(end[order[at]])
            edges[int(self.facts["of"][order[at]])] = self.edges_of(order[at:stop])
            at = stop
        return edges

    def edges_of(self, records: Array) -> Edges:
        """Return the thresholds of a program, of all of its records that are used."""
        mean, deviation = spread_of(self.units, records)
        high = mean + self.config.above * deviation
        low = mean - self.config.below * deviation
        left, right = pairs_of(records, self._salts["pairs"])
        content = self.facts["content"]
        other = content[left] != content[right]
        like = self.likeness(left[other], right[other])
        semi_hard = self.config.negatives == "semi-hard"
        moved = [not (like > high).any(), not semi_hard and not (like < low).any()]
        if moved[0] and len(left) == PAIRS:
            # Of many pairs some were drawn: now all are looked at.
            moved[0] = not any(
                ((cosines > high * UNIT**2) & self.other_content(records[some], members)).any()
                for some, _, members, cosines in compared(self.programs, self.units, records)
            )
        if len(like):
            high = threshold(like, self.config.above) if moved[0] else high
            low = -threshold(-like, self.config.below) if moved[1] else low
        return Edges(high, low, any(moved) and len(like) > 0)


def check_intervals(store: Store) -> None:
    for name in ("block", "count"):
        column = store.schema.get(name)
        if column is None or column.per != "token":
            raise UsageError(
                f"the store has no column {name!r} with a value per token",
                where=str(store.path),
                hint="`tokmill build bbv` makes stores of intervals",
            )


def check_columns(store: Store, config: Any) -> None:
    """Refuse a store that has no intervals, or not those that are asked for."""
    check_intervals(store)
    if config.cpi and ("cpi" not in store.schema or store.schema["cpi"].per != "record"):
        raise UsageError(
            "the store has no column 'cpi'",
            where=str(store.path),
            hint="`tokmill build bbv --cpi FILE` adds it",
        )
    least, largest = store.manifest.ranges.get("trace", (0, 0))
    if config.across and least != largest:
        raise UsageError(
            "a block is called by its id in its trace, so traces cannot be compared",
            where=str(store.path),
            hint="leave --across out; or build the store with --blocks STORE, or with --shared-ids "
            "if equal ids mean equal blocks",
        )
