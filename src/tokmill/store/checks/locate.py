"""Where records lie and where they came from; which have a value; which were left out."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import open_file
from tokmill.store.receipts import read_planned
from tokmill.store.store import Store


class Place(msgspec.Struct, frozen=True):
    """Where a record lies and where it came from."""

    record: int
    shard: str
    """Path of the shard's file."""
    record_in_shard: int
    token_start: int
    """First token of the record within the shard."""
    tokens: int
    item: str
    """Name of the input."""
    path: str
    byte: int
    """Where the record begins in the (uncompressed) input; for Parquet its row."""


def locate(store: Store, record: int) -> Place:
    """Return the place of a record; raises `UsageError` for a number out of range."""
    number, local = store.find(record)
    shard = store.shard(number)
    start, stop = (int(value) for value in shard["offsets"][local : local + 2])
    item = store.receipt(number).items[int(shard["item"][local])]
    return Place(
        record=record,
        shard=str(store.shard_file(number)),
        record_in_shard=local,
        token_start=start,
        tokens=stop - start,
        item=item.name,
        path=input_paths(store).get(item.name, ""),
        byte=int(shard["start"][local]),
    )


def find_records(store: Store, column: str, value: str) -> Iterator[int]:
    spec = store.schema.get(column)
    if spec is None or spec.per != "record":
        known = [name for name, c in store.schema.items() if c.per == "record"]
        raise UsageError(
            f"there is no column {column!r} with a value per record",
            where=str(store.path),
            hint=nearest(column, known) or "a build with --keep FIELD makes such columns",
        )
    base = 0
    for number, entry in enumerate(store.shards):
        shard = store.shard(number)
        if spec.dtype == "utf8":
            values = shard.strings(column, 0, entry.records)
            yield from (base + i for i, text in enumerate(values) if text == value)
        else:
            try:
                wanted = float(value)
            except ValueError:
                raise UsageError(
                    f"{value!r} is no number, but {column!r} holds numbers",
                    hint=f"tokmill store locate STORE {column}=17",
                ) from None
            yield from (base + int(i) for i in np.flatnonzero(shard[column] == wanted))
        base += entry.records


class LeftOut(msgspec.Struct, frozen=True):
    """A record that is not in a store, or several in a row."""

    item: str
    path: str
    byte: int
    line: int | None
    """Counted from 1; None if the input is gone, is compressed, or is not text."""
    reason: str
    rejected: bool
    count: int = 1
    """Consecutive records with the same reason; this is the first."""
    last: int | UnsetType = UNSET
    """Where the last of several records begins."""


def input_paths(store: Store) -> dict[str, str]:
    return {planned.name: planned.path for planned in read_planned(store.path)}


def left_out(store: Store, most: int = 20) -> list[LeftOut]:
    """Return the first runs of rejected records with their places, in the order of the inputs."""
    paths = input_paths(store)
    found: list[LeftOut] = []
    for number in range(len(store.shards)):
        receipt = store.receipt(number)
        for run in receipt.rejects:
            if len(found) == most:
                return found
            name = receipt.items[run.item].name
            path = paths.get(name, "")
            line = line_of(path, run.first)
            last = run.last if run.count > 1 else UNSET
            found.append(LeftOut(name, path, run.first, line, run.reason, True, run.count, last))
    return found


def line_of(path: str, byte: int) -> int | None:
    """Return the line (from 1) of a byte of a text file; None for other or missing files."""
    if not path.endswith((".jsonl", ".ndjson", ".tsv", ".txt", ".text", ".md")):
        return None
    try:
        with open_file(path) as file:
            lines = 1
            while byte > 0 and (block := file.read(min(byte, 1 << 20))):
                lines += block.count(b"\n")
                byte -= len(block)
            return lines
    except (OSError, TokmillError):
        return None
