"""Records that are not in a store, and where they begin in the inputs."""

from __future__ import annotations

import msgspec

from tokmill.base.errors import TokmillError
from tokmill.base.files import open_file
from tokmill.store.receipts import read_planned
from tokmill.store.store import Store


class LeftOut(msgspec.Struct, frozen=True):
    """A record that is not in a store."""

    item: str
    path: str
    byte: int
    line: int | None
    """Counted from 1; None if the input is gone, is compressed, or is not text."""
    reason: str
    rejected: bool


def input_paths(store: Store) -> dict[str, str]:
    return {planned.name: planned.path for planned in read_planned(store.path)}


def left_out(store: Store, most: int = 20) -> list[LeftOut]:
    """Return the first rejected records with their places, in the order of the inputs."""
    paths = input_paths(store)
    result: list[LeftOut] = []
    for number in range(len(store.shards)):
        receipt = store.receipt(number)
        for reject in receipt.rejects[: most - len(result)]:
            name = receipt.items[reject.item].name
            path = paths.get(name, "")
            line = line_of(path, reject.first)
            result.append(LeftOut(name, path, reject.first, line, reject.reason, True))
    return result


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
