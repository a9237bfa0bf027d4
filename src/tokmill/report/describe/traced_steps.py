"""Steps of a run for people: what they read, with the input of each document and its beginning."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokmill.base.errors import UsageError, nearest, one_line
from tokmill.report.comparison.run_summaries import Jump
from tokmill.report.describe.shown_records import Reader, matching
from tokmill.store.schema import Array
from tokmill.training.trace import Seen, Trace

PREVIEW = 24
"""Tokens that are shown of a document."""


class Documents:
    """Shows what a model sees, with the input of each record and its columns."""

    def __init__(self, trace: Trace) -> None:
        self.readers = {store.path: Reader(store) for store in trace.stores}

    def show(self, seen: Seen) -> dict[str, Any]:
        """Return place, record, input, columns with a value per record, and a preview."""
        shown = self.readers[seen.store.path].show(
            seen.record, min(PREVIEW, seen.stop - seen.start), seen.start
        )
        schema, length = seen.store.schema, shown.pop("tokens")
        columns = {name: shown[name] for name, column in schema.items() if column.per == "record"}
        text = shown.get("text") or next(
            (shown[name] for name in seen.store.token_columns if name in shown), ""
        )
        return {
            **seen._asdict(),
            "store": str(seen.store.path),
            "length": length,
            **{name: shown[name] for name in ("from", "at") if name in shown},
            "columns": columns,
            "preview": text if isinstance(text, str) else " ".join(map(str, text)),
        }


def wanted(
    trace: Trace, record: int | None, conditions: Sequence[str], store: Path | None
) -> dict[int, Array]:
    """Return number of the store → records that are asked for, for `Trace.holding`.

    Without `store`, conditions are for all stores, and a record is one of the only store.
    """
    paths = [one.path for one in trace.stores]
    if store is not None and store.resolve() not in [path.resolve() for path in paths]:
        hint = nearest(str(store), [str(path) for path in paths])
        raise UsageError(f"the run reads no store {store}", where=str(trace.path), hint=hint)
    chosen = {
        number: one
        for number, one in enumerate(trace.stores)
        if store is None or one.path.resolve() == store.resolve()
    }
    if record is None:
        records = {number: matching(one, conditions) for number, one in chosen.items()}
        return {number: np.fromiter(one, np.int64) for number, one in records.items()}
    if len({path.resolve() for path in paths}) > 1 and store is None:
        raise UsageError(
            f"the run reads {len(paths)} stores, and each has a record {record}",
            where=str(trace.path),
            hint=f"name one: --store {paths[0]}",
        )
    for one in chosen.values():
        one.find(record)
    return {number: np.asarray([record], np.int64) for number in chosen}


def of_jumps(trace: Trace, jumps: Sequence[Jump], most: int) -> Iterator[dict[str, Any]]:
    """Yield jumps of a run, each with the first `most` documents of its step."""
    shows = Documents(trace)
    for jump in jumps:
        seen = trace.step(jump.step)
        documents = [shows.show(one) for one in seen[:most]]
        yield {**jump._asdict(), "documents_in_all": len(seen), "documents": documents}


def origin(document: Mapping[str, Any]) -> str:
    """Return the input of a shown document, and its place there, in words."""
    return f"{document['from']} {document['at']}" if "from" in document else document["store"]


def preview(document: Mapping[str, Any], most: int = 60) -> str:
    text = one_line(" ".join(document["preview"].split()))
    return text[:most] + (" …" if len(text) > most else "")
