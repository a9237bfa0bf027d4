"""Which parts of which records stand in which row of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from tokmill.store.schema import Array


@dataclass(slots=True)
class Spans:
    """Spans in the order in which they fill their rows; all arrays int64, one value a span.

    `row` is the position in the batch, `record` a record of the store, `document` the number of
    the document within its row, `start` and `stop` token positions within the record.
    """

    row: Array
    record: Array
    document: Array
    start: Array
    stop: Array
