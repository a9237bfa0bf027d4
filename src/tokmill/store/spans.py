"""Spans: the parts of records that fill the rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from tokmill.store.schema import Array


@dataclass(slots=True)
class Spans:
    """Spans in the order in which they fill their rows; all arrays int64, one value a span.

    `row`: row of the batch; `record`: record of the store; `document`: number of the document in
    its row; `start`, `stop`: token positions in the record.
    """

    row: Array
    record: Array
    document: Array
    start: Array
    stop: Array
