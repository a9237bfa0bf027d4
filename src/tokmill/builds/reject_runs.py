"""Records of a shard that were left out: counted by reason; rejects are listed as runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import UNSET, UnsetType

from tokmill.store.manifest import Cut, Receipt, Rejects
from tokmill.store.schema import Array, Drops, Records

MOST = 4096
"""Runs of rejects that a receipt lists."""


class Runs:
    """Collects the records that the batches of a shard leave out.

    Consecutive rejects with the same reason make a run, if no kept or skipped record lies between
    them. With `joins` off, each reject is a run of its own (addresses in programs form no
    sequence). The result does not depend on how records are divided into batches.
    """

    def __init__(self, joins: bool) -> None:
        self.joins = joins
        self.skipped: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.listed: list[Rejects] = []
        self.unlisted: tuple[int, int, int, int] | UnsetType = UNSET
        self._last: tuple[int, str] | None = None
        """Item and reason of the last run, if the next reject may continue it."""

    def take_over(self, receipt: Receipt, cut: Cut) -> None:
        """Begin with what was left out of the first items of a shard that was cut."""
        self.skipped, self.rejected = Counter(cut.skipped), Counter(cut.rejected)
        self.listed, self.unlisted = receipt.rejects[: cut.rejects], cut.unlisted

    def add(self, item: int, batch: Records) -> tuple[int, int]:
        """Add the left-out records of a batch; return the number of (skipped, rejected) ones."""
        skipped: Counter[str] = Counter(batch.skipped)
        bad: dict[str, list[Array]] = {}
        others = [batch.starts]
        for some in batch.drops:
            if some.rejected:
                bad.setdefault(some.reason, []).append(some.offsets)
            else:
                skipped[some.reason] += len(some.offsets)
                others.append(some.offsets)
        self.skipped.update(skipped)
        rejects = [Drops(np.concatenate(at), reason, True) for reason, at in bad.items()]
        count = 0
        if any(len(some.offsets) for some in rejects):
            count = self._add_rejects(item, rejects, np.sort(np.concatenate(others)))
        elif len(batch) or skipped:
            self._last = None
        return skipped.total(), count

    def _add_rejects(self, item: int, rejects: Sequence[Drops], others: Array) -> int:
        places = np.concatenate([some.offsets for some in rejects])
        kinds = np.repeat(np.arange(len(rejects)), [len(some.offsets) for some in rejects])
        order = np.argsort(places, kind="stable")
        places, kinds = places[order], kinds[order]
        before = np.searchsorted(others, places)
        begins = np.ones(len(places), bool)
        if self.joins:
            begins[1:] = (kinds[1:] != kinds[:-1]) | (before[1:] != before[:-1])
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(places)) - 1
        for some in rejects:
            self.rejected[some.reason] += len(some.offsets)
        goes_on = self.joins and before[0] == 0 and self._last == (item, rejects[kinds[0]].reason)
        if goes_on:
            self._extend(item, int(places[last[0]]), int(last[0]) + 1)
            first, last = first[1:], last[1:]
        room = max(0, MOST - len(self.listed))
        for a, b in zip(first[:room].tolist(), last[:room].tolist(), strict=True):
            reason = rejects[kinds[a]].reason
            self.listed.append(Rejects(item, int(places[a]), int(places[b]), b - a + 1, reason))
        if len(first) > room:
            begin = (item, int(places[first[room]]))
            begin = begin if self.unlisted is UNSET else self.unlisted[:2]
            self.unlisted = (*begin, item, int(places[-1]))
        ends = before[-1] == len(others)
        self._last = (item, rejects[kinds[-1]].reason) if ends else None
        return len(places)

    def _extend(self, item: int, place: int, count: int) -> None:
        """Extend the last run up to a place."""
        if self.unlisted is not UNSET:
            self.unlisted = (*self.unlisted[:2], item, place)
            return
        run = self.listed[-1]
        self.listed[-1] = Rejects(item, run.first, place, run.count + count, run.reason)
