"""Write basic block vectors as text, as SimPoint 3.2 and whatever reads its files expect them."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path

from tokmill import plugins
from tokmill.bbv.vectors import BlockVectors
from tokmill.errors import UsageError
from tokmill.files import write_file
from tokmill.store.schema import Array

ROWS = 256
"""Rows whose text is made at once."""
SEPARATORS = {"simpoint": b" ", "valgrind": b"   "}


def write(
    path: Path | str, vectors: BlockVectors, *, id_base: int | None = None, style: str = "simpoint"
) -> Path:
    """Write vectors as text, atomically; a name in .gz, .xz or .zst is compressed.

    Args:
        path: the file.
        vectors: what is written. Entries keep their order; comments are not kept.
        id_base: the smallest id of the file; None: that of the vectors.
        style: `simpoint` (a space between entries) or `valgrind` (three, as BbTracker's).

    Raises `UsageError` for an unknown style.
    """
    if style not in SEPARATORS:
        raise UsageError(f"no style is called {style!r}", hint=f"known: {', '.join(SEPARATORS)}")
    ids = vectors.ids if id_base is None else vectors.columns + id_base
    return write_file(path, packed(Path(path), lines(vectors, ids, SEPARATORS[style])))


def lines(vectors: BlockVectors, ids: Array, separator: bytes) -> Iterator[bytes]:
    """Yield the text of intervals, some rows at a time."""
    for start in range(0, len(vectors), ROWS):
        edges = vectors.indptr[start : start + ROWS + 1]
        rows = []
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            pairs = zip(ids[first:last].tolist(), vectors.counts[first:last].tolist(), strict=True)
            rows.append(b"T" + separator.join(b":%d:%d" % pair for pair in pairs) + b"\n")
        yield b"".join(rows)


def packed(path: Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield chunks, compressed as the suffix says; equal content gives equal bytes."""
    kind = path.suffix.lower()
    if kind == ".gz":
        yield from _gzipped(chunks)
    elif kind == ".xz":
        xz = lzma.LZMACompressor()
        yield from map(xz.compress, chunks)
        yield xz.flush()
    elif kind == ".zst":
        zst = plugins.require("zstandard").ZstdCompressor(write_checksum=True).compressobj()
        yield from map(zst.compress, chunks)
        yield zst.flush()
    else:
        yield from chunks


def _gzipped(chunks: Iterator[bytes]) -> Iterator[bytes]:
    # Without a time, unlike gzip.open, so that equal content gives equal bytes.
    gz = zlib.compressobj(9, zlib.DEFLATED, 31)
    yield from map(gz.compress, chunks)
    yield gz.flush()
