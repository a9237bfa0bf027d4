"""The distinct instructions of programs: bytes, text and counts."""

import csv
import functools
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import iced_x86 as iced
import msgspec
import numpy as np

from tokmill.base.errors import UsageError
from tokmill.base.files import make_folder, write_file
from tokmill.builds.scan import FolderOptions
from tokmill.store.schema import Array
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.lifting import Seen, find_inputs, map_graphs
from tokmill.x86.tokens.canonical import LONGEST, names
from tokmill.x86.tokens.vocabularies.count import nothing_read, parts

COLUMNS = ("text", "bytes", "code", "bits", "count", "programs")
KEY = np.dtype(f"S{LONGEST + 1}")
"""Bytes of an instruction, zeros, and its length: never 0, so numpy does not strip zeros."""
BLOCK = 1 << 18
ROWS = 1 << 14


@functools.cache
def intel() -> iced.Formatter:
    """Return a formatter whose text is like that of capstone."""
    formatter: iced.Formatter = iced.Formatter(iced.FormatterSyntax.INTEL)
    formatter.hex_prefix, formatter.hex_suffix = "0x", ""
    formatter.uppercase_hex = formatter.add_leading_zero_to_hex_numbers = False
    formatter.rip_relative_addresses = True
    formatter.branch_leading_zeros = False
    formatter.memory_size_options = iced.MemorySizeOptions.ALWAYS
    formatter.show_branch_size = False
    return formatter


class Collected(msgspec.Struct, frozen=True):
    """The result of `collect`."""

    programs: int
    instructions: int
    encodings: int
    """Instructions with distinct bytes: the rows of the file."""
    refused: dict[str, str]
    """Program → why it was not read."""
    left_out: dict[str, int]
    """Reason → number of files in folders that were not read."""


def collect(
    inputs: Sequence[str],
    out: Path,
    *,
    levels: Sequence[str] | None = None,
    workers: int = 0,
    choice: FolderOptions | None = None,
    quiet: bool = True,
) -> Collected:
    """Write the distinct instructions of programs, pickles and graph files.

    Each encoding is a row, the most frequent first, equally frequent ones in the order of their
    bytes: `text` (Intel syntax at address 0), `bytes` (hexadecimal), `code` (the `Code` of
    iced-x86), `bits` of the code, `count`, and the number of `programs` that have it. It takes
    about 28 bytes of memory a row.
    """
    if out.suffix != ".csv":
        raise UsageError("instructions are written as CSV", where=str(out), hint="-o NAME.csv")
    files, left_out = find_inputs(inputs, choice)
    tables: dict[Literal[32, 64], _Table] = {}
    programs = instructions = 0
    refused: dict[str, Seen] = {}
    for seen in map_graphs(
        distinct, files, levels=levels, workers=workers, title="instructions", quiet=quiet
    ):
        if seen.refused:
            refused[seen.program] = seen
            continue
        bits, keys, counts = seen.value
        tables.setdefault(bits, _Table()).add(keys, counts, np.ones(len(keys), np.int64))
        programs += 1
        instructions += int(counts.sum())
    if not programs:
        raise nothing_read(inputs, refused)
    for table in tables.values():
        table.merge()
    make_folder(out.parent)
    write_file(out, _csv(_rows(tables)))
    return Collected(
        programs,
        instructions,
        sum(len(table.keys) for table in tables.values()),
        {name: refused[name].refused for name in sorted(refused)},
        left_out,
    )


def distinct(graph: Graph) -> tuple[int, Array, Array]:
    """Return bits, the distinct instructions of a graph (`KEY`, sorted) and their counts (i8)."""
    table = _Table()
    for code, lengths in parts(graph, 0, len(graph.lengths), BLOCK):
        keys, counts = np.unique(_keys(code, lengths), return_counts=True)
        table.add(keys, counts, np.zeros(len(keys), np.int64))
    table.merge()
    return graph.bits, table.keys, table.counts


def _keys(code: Array, lengths: Array) -> Array:
    padded = np.concatenate([code, np.zeros(LONGEST + 1, np.uint8)])
    starts = np.cumsum(lengths, dtype=np.intp) - lengths
    place = np.arange(LONGEST + 1)
    keys = padded[starts[:, None] + place]
    keys[place >= lengths[:, None]] = 0
    keys[:, LONGEST] = lengths
    return keys.view(KEY).reshape(-1)


class _Table:
    """Keys with two sums each; additions are merged as soon as they are as large as the table."""

    def __init__(self) -> None:
        self.keys = np.zeros(0, KEY)
        self.counts = self.programs = np.zeros(0, np.int64)
        self.waiting: list[tuple[Array, Array, Array]] = []

    def add(self, keys: Array, counts: Array, programs: Array) -> None:
        self.waiting.append((keys, counts, programs))
        if sum(len(part[0]) for part in self.waiting) > len(self.keys) + BLOCK:
            self.merge()

    def merge(self) -> None:
        parts = [(self.keys, self.counts, self.programs), *self.waiting]
        keys, counts, programs = (np.concatenate(column) for column in zip(*parts, strict=True))
        self.waiting = []
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        begins = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
        self.keys = keys[begins]
        self.counts = np.add.reduceat(counts[order], begins) if len(begins) else counts
        self.programs = np.add.reduceat(programs[order], begins) if len(begins) else programs


def _rows(tables: dict[Literal[32, 64], _Table]) -> Iterator[list[tuple[Any, ...]]]:
    widths = sorted(tables, reverse=True)
    bits = np.repeat(widths, [len(tables[width].keys) for width in widths])
    keys = np.concatenate([tables[width].keys for width in widths])
    counts = np.concatenate([tables[width].counts for width in widths])
    programs = np.concatenate([tables[width].programs for width in widths])
    order = np.lexsort((-bits, keys, -counts))
    code_names, formatter = names("Code"), intel()
    decoders = iced.Decoder
    for first in range(0, len(order), ROWS):
        rows = order[first : first + ROWS]
        batch = []
        for key, width, count, programs_with in zip(
            keys[rows].tolist(),
            bits[rows].tolist(),
            counts[rows].tolist(),
            programs[rows].tolist(),
            strict=True,
        ):
            raw = key[: key[LONGEST]]
            instruction = decoders(width, raw).decode()
            code = code_names[instruction.code]
            text = formatter.format(instruction)
            batch.append((text, raw.hex(), code, width, count, programs_with))
        yield batch


def _csv(rows: Iterator[list[tuple[Any, ...]]]) -> Iterator[bytes]:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for some in rows:
        writer.writerows(some)
        yield out.getvalue().encode()
        out.seek(0)
        out.truncate()
