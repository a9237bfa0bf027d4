"""What entries of functions have in common: who is who in a store, found once for a build."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokmill.builds.mining.name_columns import FACTS, WHY, Members, Naming, facts_of, naming
from tokmill.builds.shared import shared
from tokmill.store.manifest import canonical_digest
from tokmill.store.schema import Array
from tokmill.store.store import Store

BLOCK = 1 << 14
"""Anchors at a time."""


class Keyed:
    """The names of a store's records (`names.FACTS`) and the members of each group."""

    def __init__(self, store: Store, config: Any, scratch: str) -> None:
        self.store, self.scratch = store, scratch
        self.by: Naming = naming(
            store.schema, config.same, config.differ, config.apart, config.nameless, config.content
        )

    def identity(self) -> dict[str, Any]:
        """Return the columns that are compared."""
        return {"same": self.by.same, "differ": self.by.differ, "apart": self.by.apart}

    @cached_property
    def facts(self) -> Array:
        """A row of `FACTS` for each record."""

        def find() -> Array:
            return facts_of(self.store, self.by)

        if not self.scratch:
            return find()
        key = canonical_digest([msgspec.to_builtins(self.by), self.store.content])[:24]
        return shared(Path(self.scratch), "names", key, FACTS, (len(self.store),), find)

    @cached_property
    def members(self) -> Members:
        """The records of each group side by side."""
        return Members(self.facts)

    def blocks(self, place: int, size: int) -> list[Array]:
        """Return the records of a shard in blocks (int64); one empty block if it has none."""
        first = sum(entry.records for entry in self.store.shards[:place])
        records = np.arange(first, first + self.store.shards[place].records)
        return np.split(records, range(size, len(records), size))

    def left_out(self, records: Array) -> Counter[str]:
        """Return reason → how many of some records are never used."""
        codes, counts = np.unique(self.facts["why"][records], return_counts=True)
        pairs = zip(codes.tolist(), counts.tolist(), strict=True)
        return Counter({WHY[code]: count for code, count in pairs if code})


def counted(counts: Counter[str]) -> dict[str, int]:
    """Return the counts above 0."""
    return {reason: count for reason, count in counts.items() if count}
