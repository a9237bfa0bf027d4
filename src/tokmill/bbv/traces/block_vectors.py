"""Basic block vectors in memory: sparse rows, one an interval of an execution."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokmill.base.files import write_file
from tokmill.store.schema import Array

ROWS = 256
"""Rows whose text is made at once."""


class Declared(NamedTuple):
    """What a file says about itself, in the comments of valgrind's exp-bbv; None: it does not."""

    interval: int | None = None
    """Instructions of an interval."""
    intervals: int | None = None
    instructions: int | None = None
    repetitions: int | None = None
    """Repetitions of REP instructions beyond the first; exp-bbv does not count them."""
    thread: int | None = None


TORN = "the last line does not end: the file may be cut off"


@dataclass(frozen=True, slots=True, eq=False)
class BlockVectors:
    """Basic block vectors, rows of a sparse matrix (CSR).

    Row i has the entries `indptr[i]` to `indptr[i + 1]`. A count is the number of instructions that
    were executed in a block: executions times instructions, in an interval of the execution.
    Entries stand in the order of the file; a block may stand twice in a row.
    """

    indptr: Array
    """int64, intervals + 1."""
    ids: Array
    """Blocks, as the file numbers them: int64."""
    counts: Array
    """Instructions executed: uint64."""
    declared: Declared = Declared()
    ignored: dict[str, int] = field(default_factory=dict)
    """First character of lines that are not vectors (`#`, `blank`) → number of such lines."""
    torn: bool = False
    """Whether the last line does not end with a newline; the file may have been cut off."""

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @property
    def other_lines(self) -> int:
        """Lines that are neither intervals nor comments: an interval behind a prefix is one."""
        return sum(n for first, n in self.ignored.items() if first not in ("#", "blank"))

    @property
    def entries(self) -> int:
        return len(self.ids)

    @property
    def instructions(self) -> Array:
        """Instructions of each interval (int64)."""
        return row_sums(self.counts, self.indptr)


EMPTY = BlockVectors(np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint64))


def row_sums(counts: Array, indptr: Array) -> Array:
    lengths = np.diff(indptr)
    sums = np.zeros(len(lengths), np.uint64)
    filled = np.flatnonzero(lengths)
    if len(filled):
        sums[filled] = np.add.reduceat(counts, indptr[:-1][filled])
    return sums.astype(np.int64)


def joined(pieces: list[BlockVectors]) -> BlockVectors:
    """Return the intervals of all pieces (at least one), with the facts of the last."""
    ends = np.cumsum([0, *(piece.entries for piece in pieces)])
    indptr = [piece.indptr[1:] + end for piece, end in zip(pieces, ends[:-1], strict=True)]
    return replace(
        pieces[-1],
        indptr=np.concatenate([np.zeros(1, np.int64), *indptr]),
        ids=np.concatenate([piece.ids for piece in pieces]),
        counts=np.concatenate([piece.counts for piece in pieces]),
    )


def write(path: Path | str, vectors: BlockVectors) -> Path:
    """Write vectors as text, atomically; a name in .gz is compressed.

    Equal vectors give equal bytes. Entries keep their order and ids; comments are not kept.
    """
    chunks = _lines(vectors)
    return write_file(path, _gzipped(chunks) if Path(path).suffix.lower() == ".gz" else chunks)


def _lines(vectors: BlockVectors) -> Iterator[bytes]:
    for start in range(0, len(vectors), ROWS):
        edges = vectors.indptr[start : start + ROWS + 1]
        rows = []
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            ids, counts = (one[first:last].tolist() for one in (vectors.ids, vectors.counts))
            pairs = zip(ids, counts, strict=True)
            rows.append(b"T" + b" ".join(b":%d:%d" % pair for pair in pairs) + b"\n")
        yield b"".join(rows)


def _gzipped(chunks: Iterator[bytes]) -> Iterator[bytes]:
    # Without a time, unlike gzip.open, so that equal content gives equal bytes.
    gz = zlib.compressobj(9, zlib.DEFLATED, 31)
    yield from map(gz.compress, chunks)
    yield gz.flush()
