"""Steps of a run for people: the documents of a step, and the steps at which metrics jump."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokmill.base.errors import UsageError, nearest, one_line
from tokmill.report.describe.shown_records import Reader, matching
from tokmill.store.schema import Array
from tokmill.training.runs.run import metrics_of
from tokmill.training.trace import Seen, Trace

PREVIEW = 24
"""Tokens that are shown of a document."""
WINDOW, LEAST = 32, 8
"""Logged steps that say what is usual: at most, and at least."""
FAR, CHANGE = 6.0, 0.1
"""A jump is so many deviations above the median, and more than this part of it."""
JUMPING = ("loss", "grad_norm")


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
        found = {number: matching(one, conditions) for number, one in chosen.items()}
        return {number: np.fromiter(one, np.int64) for number, one in found.items()}
    if len({path.resolve() for path in paths}) > 1 and store is None:
        raise UsageError(
            f"the run reads {len(paths)} stores, and each has a record {record}",
            where=str(trace.path),
            hint=f"name one: --store {paths[0]}",
        )
    for one in chosen.values():
        one.find(record)
    return {number: np.asarray([record], np.int64) for number in chosen}


def jumps(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the logged steps whose loss or gradient norm is far above what was usual before.

    `usual` is the median of the last `WINDOW` logged values; a deviation is 1.4826 times their
    median absolute deviation from it.
    """
    found = []
    for metric in JUMPING:
        before: list[float] = []
        for entry in entries:
            value = entry.get(metric)
            if not isinstance(value, int | float):
                continue
            if len(before) >= LEAST:
                usual = statistics.median(before)
                off = 1.4826 * statistics.median(abs(one - usual) for one in before)
                if value > usual + max(FAR * off, CHANGE * abs(usual)):
                    step = int(entry["step"])
                    found.append({"step": step, "metric": metric, "value": value, "usual": usual})
            before = [*before[1 - WINDOW :], value]
    return sorted(found, key=lambda one: one["step"])


def of_jumps(run: Path, trace: Trace, most: int) -> Iterator[dict[str, Any]]:
    """Yield the jumps of a run, each with the first `most` documents of its step."""
    shows = Documents(trace)
    for jump in jumps(metrics_of(run)):
        seen = trace.step(jump["step"])
        documents = [shows.show(one) for one in seen[:most]]
        yield {**jump, "documents_in_all": len(seen), "documents": documents}


def origin(document: Mapping[str, Any]) -> str:
    """Return the input of a shown document, and its place there, in words."""
    return f"{document['from']} {document['at']}" if "from" in document else document["store"]


def preview(document: Mapping[str, Any], most: int = 60) -> str:
    """Return the beginning of a shown document in one line."""
    text = one_line(document["preview"])
    return text[:most] + (" …" if len(text) > most else "")
