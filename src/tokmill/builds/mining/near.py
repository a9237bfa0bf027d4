"""The vectors of a store and its cells, found once for a build."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tokmill.builds.mining.cells import CELLS, cells_of
from tokmill.builds.mining.vectors import VectorTable
from tokmill.builds.shared import shared
from tokmill.store.manifest import canonical_digest
from tokmill.store.schema import Array
from tokmill.store.store import Store


class Near:
    """Vectors, and cells of records that are near to each other."""

    def __init__(self, store: Store, config: Any, scratch: str) -> None:
        self.table = VectorTable(store, config.vectors)
        self.config, self.scratch = config, scratch
        self._cells: Array | None = None

    def cells(self, records: Array) -> Array:
        """Return some records, always the same ones, in cells (`cells.CELLS`)."""

        def find() -> Array:
            return cells_of(self.table.units, records, self.config.cell, self.config.seed)

        if self._cells is None:
            if self.scratch:
                which = hashlib.sha256(records.tobytes()).hexdigest()
                said = [self.table.digest, which, self.config.cell, self.config.seed]
                key = canonical_digest(said)[:24]
                shape = (len(records),)
                self._cells = shared(Path(self.scratch), "cells", key, CELLS, shape, find)
            else:
                self._cells = find()
        return self._cells
