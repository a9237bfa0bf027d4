"""Read columns with a value per record, by record numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokmill.base.errors import UsageError, nearest
from tokmill.feed.rows import Rows
from tokmill.store.manifest import Overlay
from tokmill.store.schema import Array
from tokmill.store.store import Store

FAMILY = "(family)"


def value_columns(store: Store) -> list[str]:
    """Return the columns of a store that have numbers per record."""
    return [n for n, c in store.schema.items() if c.per == "record" and c.dtype != "utf8"]


class Values:
    """Columns with a value per record, for the rows of several sources.

    `dtypes`: name → dtype, with the width as its shape. Raises `UsageError` for a column that a
    source does not have, that holds strings, or if rows may have several records. `FAMILY` is no
    column, but the family of each row's own record (`Rows.families`).
    """

    def __init__(self, sources: Sequence[Rows], names: Sequence[str]) -> None:
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self._families: list[Array] = []
        if FAMILY in names:
            # No record of another source has the same number.
            first = np.cumsum([0, *(len(rows.store) for rows in sources)]).tolist()
            self._families = [rows.families() + n for n, rows in zip(first, sources, strict=False)]
            self.dtypes[FAMILY] = np.dtype(np.int64)
        names = [name for name in names if name != FAMILY]
        self._from: list[dict[str, int]] = []
        """For each source: name → number of the store among its `value_stores`."""
        for rows in sources:
            self._from.append({name: _store_of(rows, name) for name in names})
        for name in names:
            columns = [
                rows.value_stores[number[name]].schema[name]
                for rows, number in zip(sources, self._from, strict=True)
            ]
            widths = {column.width for column in columns}
            if len(widths) > 1:
                raise UsageError(
                    f"the column {name!r} has the widths {', '.join(map(str, sorted(widths)))}",
                    where=str(sources[-1].store.path),
                    hint="stores that are mixed need columns of one kind",
                )
            kind = np.result_type(*(column.numpy() for column in columns))
            self.dtypes[name] = np.dtype((kind, tuple(widths - {0})))

    def read(self, source: int, rows: Rows, records: Sequence[Array]) -> dict[str, Array]:
        """Return name → values of rows of a source, from `records` of each of its value stores."""
        values = {
            name: rows.value_stores[number].values(name, records[number])
            for name, number in self._from[source].items()
        }
        if self._families:
            values[FAMILY] = self._families[source][records[-1]]
        return values


def _store_of(rows: Rows, name: str) -> int:
    numbers = [n for n, store in enumerate(rows.value_stores) if name in value_columns(store)]
    if numbers:
        return numbers[-1 if name in rows.of_rows else 0]
    if not rows.value_stores:
        raise UsageError(
            f"the column {name!r} has a value per record, and a row may hold several records",
            where=str(rows.store.path),
            hint='take one record per row: --set task.rows="whole"',
        )
    names = [name for store in rows.value_stores for name in value_columns(store)]
    strings = [store for store in rows.value_stores if name in store.schema]
    raise UsageError(
        f"the column {name!r} holds strings, not numbers"
        if strings
        else f"the store has no column {name!r} with a value per token or a record",
        where=str(rows.value_stores[0].path),
        hint=nearest(name, names),
    )


class Vectors:
    """Vectors of referred records, for rows that hold references, or of the tokens themselves.

    `column`: column of the rows, with a record number of `store` for each token; `name`: a column
    of `store` (often of an overlay) with a vector per record; or both are one column with a vector
    per token. Raises `UsageError` if there is none.
    """

    def __init__(self, column: str, store: Store, name: str) -> None:
        self.column, self.store, self.name = column, store, name
        own = store.schema.get(name)
        self.own = own is not None and own.per == "token" and own.width > 0
        names = [n for n in value_columns(store) if store.schema[n].width]
        if name not in names and not self.own:
            raise UsageError(
                f"the store has no column {name!r} with a vector per record",
                where=str(store.path),
                hint=nearest(name, names) if names else "`tokmill embed RUN STORE` makes one",
            )
        self.width = store.schema[name].width

    @property
    def model(self) -> str:
        """Digest of the model that made the vectors (`tokmill embed`); "": it is not known."""
        for laid in self.store.overlays.values():
            stated = laid.manifest.overlay
            if self.name in laid.schema and isinstance(stated, Overlay):
                return str(stated.about.get("model", ""))
        return ""

    def of(self, columns: Mapping[str, Array], document: Array) -> Array:
        """Return (B, T, W) float32, the vector of each position's record; 0 at padding."""
        if self.own:
            return columns[self.column].astype(np.float32)
        filled = document >= 0
        # A record that several positions name is read once.
        records, which = np.unique(
            columns[self.column][filled].astype(np.int64), return_inverse=True
        )
        vectors = np.zeros((*document.shape, self.width), np.float32)
        vectors[filled] = self.store.values(self.name, records)[which]
        return vectors
