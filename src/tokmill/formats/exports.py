"""Common parts of all exports of stores to foreign token files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import inside, make_folder
from tokmill.store.schema import Array
from tokmill.store.store import Store

BLOCK = 1 << 20
"""Tokens that an export holds at a time (one record at least)."""


class ExportOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of all exports."""

    column: str = "token"
    """Column of ids to export."""


def check_column(store: Store, options: ExportOptions) -> None:
    """Refuse a column that does not hold one id per token."""
    column = store.schema.get(options.column)
    if column is None:
        ids = [n for n in store.token_columns if store.schema[n].dtype in ("u1", "u2", "u4")]
        raise UsageError(
            f"the store has no column {options.column!r}",
            where=str(store.path),
            hint=f"--column chooses one of {', '.join(ids)}" if ids else "it has no column of ids",
        )
    if column.per != "token" or column.width or column.dtype not in ("u1", "u2", "u4"):
        raise UsageError(
            f"the column {options.column!r} does not hold one id per token",
            where=str(store.path),
            hint="--column chooses another",
        )


def id_count(store: Store, name: str) -> int:
    """Return the number of ids of a column: its vocabulary's size, else the largest id + 1."""
    vocabulary = store.vocabularies.get(store.schema[name].vocab or "")
    if vocabulary is not None:
        return vocabulary.size
    return int(store.manifest.ranges.get(name, (0, 3 if name == "border" else -1))[1]) + 1


def lengths(store: Store) -> Iterator[Array]:
    """Yield the token counts of all records (int64), a shard at a time."""
    for number in range(len(store.shards)):
        yield np.diff(store.shard(number)["offsets"].astype(np.int64))
    store.check_sizes()


def blocks(store: Store, name: str, tokens: int = BLOCK) -> Iterator[tuple[Array, int, int, int]]:
    """Yield (ids, shard, first record, last record + 1) of whole records, in order.

    A block holds about `tokens` ids, or one longer record; ids that are not in phrases are a view.
    """
    column = store.schema[name]
    for number in range(len(store.shards)):
        shard = store.shard(number)
        offsets = shard["offsets"].astype(np.int64)
        first, count = 0, len(offsets) - 1
        while first < count:
            last = int(np.searchsorted(offsets, offsets[first] + tokens, side="right")) - 1
            last = min(max(last, first + 1), count)
            if column.phrase:
                phrases = shard.records(first, last, {name: column}).phrases
                assert phrases is not None
                ids = phrases.expanded(name)
            else:
                ids = shard[name][int(offsets[first]) : int(offsets[last])]
            yield ids, number, first, last
            first = last
    store.check_sizes()


def pieces(store: Store, name: str, dtype: np.dtype[Any]) -> Iterator[Array]:
    """Yield all ids of a column in order and in `dtype`, about a million at a time.

    Raises `TokmillError` for an id that `dtype` does not hold.
    """
    most = np.iinfo(dtype).max
    for ids, _, _, _ in blocks(store, name):
        for start in range(0, len(ids), BLOCK):
            piece = ids[start : start + BLOCK]
            if np.iinfo(piece.dtype).max > most and int(piece.max()) > most:
                raise TokmillError(
                    f"the id {piece.max()} does not fit into {dtype.name}",
                    where=str(store.path),
                    hint="--dtype u4",
                )
            yield np.ascontiguousarray(piece, dtype)


def raw(arrays: Iterable[Array]) -> Iterator[memoryview]:
    """Yield arrays as bytes for `files.write_file`."""
    for array in arrays:
        if array.size:
            yield array.data.cast("B")


def wide_dtype(store: Store, name: str) -> np.dtype[Any]:
    """Return uint16, or uint32 above 65,536 ids (nanoGPT, CS336)."""
    return np.dtype("<u2" if id_count(store, name) <= 1 << 16 else "<u4")


class Sink(io.RawIOBase):
    """A file object without seek that collects the output of another library's writer."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._place = 0

    def writable(self) -> bool:
        """Say that it can be written to."""
        return True

    def tell(self) -> int:
        """Return the number of bytes that were written."""
        return self._place

    def write(self, data: Any, /) -> int:
        """Keep bytes."""
        self._parts.append(bytes(data))
        self._place += len(self._parts[-1])
        return len(self._parts[-1])

    def take(self) -> bytes:
        """Return what was written since the last call."""
        data = b"".join(self._parts)
        self._parts = []
        return data


def output_file(out: Path, suffix: str, name: str = "tokens") -> Path:
    """Return `out` itself if it ends in `suffix`, else the file `name` in the folder `out`."""
    path = out if out.name.endswith(suffix) else inside(out, f"{name}{suffix}")
    make_folder(path.parent)
    return path


def summary(files: Iterable[Path], tokens: int, **more: Any) -> dict[str, Any]:
    """Return the result of an export: files, tokens and bytes."""
    paths = list(files)
    return {
        "files": [str(path) for path in paths],
        "tokens": tokens,
        "bytes": sum(path.stat().st_size for path in paths),
        **more,
    }
