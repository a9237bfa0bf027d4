"""Triplets of intervals as pickles of 6-tuples, or of 9-tuples with CPI.

The operations of the pickle are written directly: lists, tuples, numbers and numpy arrays, in
protocol 4. A vector is written once, then referred to. Source of the formats: SemanticBBV,
`pre_processing/asm_bbv_dataset.py`; numpy, `ndarray.__reduce__`; CPython, `Lib/pickletools.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.mining.intervals import check_intervals
from tokmill.formats import notes
from tokmill.formats.notes import exporting
from tokmill.formats.pickles.token_dicts_export import BATCH, number_bytes
from tokmill.store.overlay import vector_column
from tokmill.store.schema import ROLES, Array, has_entries
from tokmill.store.store import Store


class TripletsExportOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of pickles of triplets."""

    vectors: str = ""
    """Overlay of the store of blocks (`tokmill embed`): its vectors are written in place of the
    numbers of blocks."""
    cpi: bool = False
    """Write the CPI of the three intervals too (9-tuples)."""
    name: str = "triplets"
    """First part of the file's name, if a folder is given."""


class TripletsExport:
    """A pickle of triplets of intervals: a list of tuples of (blocks, weights) of each member.

    The blocks of a mined member stand in the order of their weights, the smallest first, as the
    script writes them; those of an imported one as they were. Equal stores give equal files.
    """

    Config: ClassVar[type[msgspec.Struct]] = TripletsExportOptions

    def __init__(self, config: TripletsExportOptions) -> None:
        self.config = config

    def write(self, store: Store, out: Path) -> dict[str, Any]:
        """Write the file; return files, tokens, entries and bytes."""
        imported = has_entries(store.schema)
        missing = [name for name in ROLES if name not in store.schema]
        if missing and not imported:
            raise UsageError(
                f"the store has no column {missing[0]!r}",
                where=str(store.path),
                hint="`tokmill build mine PROFILES --what bbv` makes triplets of intervals",
            )
        profiles = store if imported else store.reference("anchor")
        if not imported:
            check_intervals(profiles)
        vectors = None
        if self.config.vectors:
            blocks = profiles.reference("block")
            vectors = Store(blocks.path, [self.config.vectors]).overlays[self.config.vectors]
            vector_column(vectors)
        if self.config.cpi and "cpi" not in profiles.schema:
            raise UsageError(
                "the intervals have no CPI", where=str(profiles.path), hint="leave --cpi out"
            )
        path = notes.output_file(out, ".pkl", self.config.name)
        with exporting(
            store, "triplets", self.config, path.parent, path.name, files=[path], named=out
        ) as export:
            export.put(path, _Writer(store, profiles, vectors, self.config.cpi).entries())
        entries = len(store) // (len(ROLES) if imported else 1)
        return notes.summary([path], profiles.tokens, entries=entries)


class _Writer:
    def __init__(self, store: Store, profiles: Store, vectors: Store | None, cpi: bool) -> None:
        self.store, self.profiles, self.vectors, self.cpi = store, profiles, vectors, cpi
        self.memo: dict[object, int] = {}

    def entries(self) -> Iterator[bytes]:
        if self.store is self.profiles:
            members = np.arange(len(self.store)).reshape(-1, len(ROLES))
        else:
            members = np.stack([self.store.column(name) for name in ROLES], axis=1)
        yield b"\x80\x04]"
        for first in range(0, len(members), BATCH):
            yield b"("
            for row in members[first : first + BATCH].tolist():
                parts = [b"("]
                for member in row:
                    parts += self._member(member)
                if self.cpi:
                    parts += [self._cpi(member) for member in row]
                yield b"".join([*parts, b"t"])
            yield b"e"
        yield b"."

    def _member(self, number: int) -> Iterator[bytes]:
        record = self.profiles.record(number)
        if self.store is self.profiles:
            blocks, weights = record["vector" if "vector" in record else "block"], record["weight"]
        else:
            order = np.lexsort((record["block"], record["count"]))
            blocks, weights = record["block"][order], record["count"][order]
        yield b"]("
        if blocks.ndim > 1:
            yield from map(self._array, blocks)
        else:
            yield from map(number_bytes if self.vectors is None else self._vector, blocks.tolist())
        yield b"e]("
        yield from map(number_bytes, weights.tolist())
        yield b"e"

    def _cpi(self, number: int) -> bytes:
        shard, local = self.profiles.find(number)
        value = float(self.profiles.shard(shard)["cpi"][local])
        if not np.isfinite(value):
            raise TokmillError(
                f"the CPI of interval {number} is not known",
                where=str(self.profiles.path),
                hint="`tokmill build mine --what bbv --cpi` leaves such intervals out",
            )
        return number_bytes(value)

    def _vector(self, block: int) -> bytes:
        if block in self.memo:
            return self._known(block)
        assert self.vectors is not None
        [values] = self.vectors.values(vector_column(self.vectors), np.asarray([block]))
        return self._array(values, block)

    def _array(self, values: Array, key: object = None) -> bytes:
        """Return a vector as a numpy array, the second time as a reference."""
        data = np.ascontiguousarray(values).tobytes()
        key = data if key is None else key
        if key in self.memo:
            return self._known(key)
        parts = [self._named("reconstruct", "numpy.core.multiarray", "_reconstruct")]
        parts += [self._named("ndarray", "numpy", "ndarray"), b"K\x00\x85C\x01b\x87R"]
        parts += [b"(K\x01", number_bytes(len(values)), b"\x85", self._dtype(values), b"\x89"]
        parts += [b"B", len(data).to_bytes(4, "little"), data, b"tb"]
        return b"".join([*parts, self._kept(key)])

    def _dtype(self, values: Array) -> bytes:
        kind = f"f{values.itemsize}"
        if kind in self.memo:
            return self._known(kind)
        name = self._named("dtype", "numpy", "dtype")
        state = b"(K\x03" + _text("<") + b"NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\x00tb"
        return name + _text(kind) + b"\x89\x88\x87R" + state + self._kept(kind)

    def _named(self, key: str, module: str, name: str) -> bytes:
        if key in self.memo:
            return self._known(key)
        return _text(module) + _text(name) + b"\x93" + self._kept(key)

    def _kept(self, key: object) -> bytes:
        self.memo[key] = len(self.memo)
        return b"\x94"

    def _known(self, key: object) -> bytes:
        number = self.memo[key]
        return b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little")


def _text(text: str) -> bytes:
    return b"\x8c%c" % len(text) + text.encode()
