"""The pieces into which packing cuts documents; kept in the store's `cache/`.

A document gives full windows and a rest. Documents with the same number of windows and the same
rest are interchangeable and form a class. A document is identified by its class and its number
there.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from tokmill.errors import MachineError, TokmillError
from tokmill.feed.order import shard_groups
from tokmill.feed.pack import best_fit
from tokmill.files import make_folder, remove
from tokmill.store.schema import Array
from tokmill.store.shard import SUFFIX, Shard, write_tensors
from tokmill.store.store import Store


@dataclass(frozen=True, slots=True)
class Pieces:
    """The documents of a store, by group, then by length of the rest, then by number of windows.

    `documents`: records of the store, uint32 if that suffices, else uint64. The others are int64.
    `rest`, `windows`, `count` have a value per class, in the same order: tokens of the rest (0: no
    rest), full windows of a document, number of documents. `classes`: the first class of each
    group, and the number of classes (groups + 1). `packs`: rows that the rests of each group fill.
    """

    documents: Array
    rest: Array
    windows: Array
    count: Array
    classes: Array
    packs: Array


def cut(lengths: Array, length: int, overlap: int) -> tuple[Array, Array]:
    """Return the number of full windows of documents, and the tokens of the rests (both int64).

    Window i begins at token i · (length - overlap), and the rest where the next window would begin.
    The first `overlap` tokens of a rest are those of the last window; a rest without other tokens
    is dropped.
    """
    step = length - overlap
    windows = np.zeros(len(lengths), np.int64)
    long = lengths >= length
    windows[long] = (lengths[long] - length) // step + 1
    rest = lengths - windows * step
    rest[long & (rest == overlap)] = 0
    return windows, rest


def pieces_of(store: Store, length: int, overlap: int, shards: int, seed: int) -> Pieces:
    """Return the pieces of a store, in groups of `shards` shards (0: all), drawn by `seed`.

    They are read from `cache/`, or computed and kept there if the folder can be written.
    """
    folder = store.path / "cache"
    mine = f"pieces-{store.fingerprint[:16]}-"
    path = folder / f"{mine}{length}-{overlap}-{shards}-{seed if shards else 0}{SUFFIX}"
    pieces = _read(path, store.records)
    if pieces is None:
        groups = shard_groups(len(store.shards), shards, seed)
        pieces = _make(store, length, overlap, groups)
        with contextlib.suppress(MachineError):
            make_folder(folder)
            for other in folder.glob("pieces-*"):
                # Of an earlier state of the store.
                if not other.name.startswith(mine):
                    remove(other)
            _write(path, pieces)
    return pieces


def rests(rest: Array, count: Array) -> tuple[Array, Array, Array]:
    """Return the rests of a group for `best_fit`: (lengths, number of each, first of each); int64.

    `first`: place among the group's documents of the first one with a rest of this length.
    """
    lengths, first_class = np.unique(rest, return_index=True)
    pieces = np.add.reduceat(count, first_class)
    first = np.cumsum(pieces) - pieces
    real = lengths > 0
    return lengths[real], pieces[real], first[real]


def _make(store: Store, length: int, overlap: int, groups: list[Array]) -> Pieces:
    """Sort the documents of each group, and count the rows that their rests fill."""
    records = np.asarray([entry.records for entry in store.shards], np.int64)
    first = np.cumsum(records) - records
    documents = np.zeros(store.records, np.uint32 if store.records <= 1 << 32 else np.uint64)
    classes: list[Array] = []
    packs: list[int] = []
    done = 0
    for shards in groups:
        here = documents[done : done + int(records[shards].sum())]
        done += len(here)
        # numpy sorts numbers of 16 bits by radix.
        rest = np.zeros(len(here), np.min_scalar_type(length))
        windows = np.zeros(len(here), np.int64)
        stop = 0
        for shard in shards.tolist():
            start, stop = stop, stop + int(records[shard])
            lengths = np.diff(store.shard(shard)["offsets"].astype(np.int64))
            windows[start:stop], rest[start:stop] = cut(lengths, length, overlap)
            here[start:stop] = np.arange(first[shard], first[shard] + stop - start)
        windows = windows.astype(np.min_scalar_type(windows.max(initial=0)))
        order = np.lexsort((windows, rest))
        here[:], rest, windows = here[order], rest[order], windows[order]
        new = np.ones(len(here), bool)
        new[1:] = (rest[1:] != rest[:-1]) | (windows[1:] != windows[:-1])
        begins = np.flatnonzero(new)
        count = np.diff(begins, append=len(here))
        classes.append(np.stack([rest[begins], windows[begins], count]).astype(np.int64))
        packed = best_fit(*rests(classes[-1][0], count)[:2], length)
        packs.append(int(packed.repeats.sum()))
    ends = np.cumsum([0, *(part.shape[1] for part in classes)])
    rest, windows, count = np.concatenate(classes, axis=1)
    return Pieces(documents, rest, windows, count, ends, np.asarray(packs, np.int64))


def _read(path: Path, records: int) -> Pieces | None:
    """Return the pieces in a file, mapped; None if it is missing or damaged."""
    try:
        file = Shard(path)
        pieces = Pieces(*(file[field.name] for field in fields(Pieces)))
    except TokmillError:
        return None
    whole = len(pieces.documents) == pieces.count.sum() == records
    return pieces if whole else None


def _write(path: Path, pieces: Pieces) -> None:
    """Write the pieces atomically, in the container that shards have."""
    columns = {field.name: getattr(pieces, field.name) for field in fields(Pieces)}
    write_tensors(
        path,
        {name: (f"{a.dtype.kind}{a.dtype.itemsize}", [len(a)], [a]) for name, a in columns.items()},
    )
