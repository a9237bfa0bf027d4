"""Reading a token store: a folder of shards and a manifest."""

from __future__ import annotations

import operator
import resource
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import address_of, inside
from tokmill.store import manifest as layout
from tokmill.store.manifest import Manifest, Receipt
from tokmill.store.receipts import gather_manifest
from tokmill.store.schema import Array, Records, phrase_columns
from tokmill.store.shards.column_buffers import mapped
from tokmill.store.shards.shard import SUFFIX, Shard
from tokmill.terminal.output import html_table

if TYPE_CHECKING:
    from tokmill.store.gather import Spans
    from tokmill.store.remote_store import Remote


MAPPED_SHARDS = 400
"""Shards that a store maps at most; each map needs a file descriptor."""
_OPEN: weakref.WeakSet[Store] = weakref.WeakSet()


def most_maps() -> int:
    """Return how many shards a store may map, by the process's limit of file descriptors.

    All open stores share a quarter of the limit (usually 1,024), so that a merge of many stores
    stays below it.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAPPED_SHARDS
    return max(2, min(MAPPED_SHARDS, soft // (4 * max(1, len(_OPEN)))))


class RecordError(UsageError, IndexError):
    """There is no such record."""


class Store:
    """A token store, opened for reading: a folder, or an address such as s3://bucket/store.

    Opening reads only the manifest; shards are mapped when they are first used (at an address:
    fetched into the cache, `store/remote_store.py`). A store whose build
    has not finished opens with `partial` set and holds the records made so far. The columns of
    `overlays` (names) are added to those of the store; records and fingerprint stay the same.

    Raises `TokmillError` if there is no store, or an overlay does not fit it (`open_overlay`).
    """

    def __init__(self, path: Path | str, overlays: Sequence[str] = ()) -> None:
        self.remote: Remote | None = None
        if address_of(path) or (Path(path) / layout.NOTE).is_file():
            from tokmill.store.remote_store import remote_at

            self.remote = remote_at(path)
        self.path = self.remote.folder if self.remote else Path(path)
        if not self.path.is_dir():
            what = "is a file, not a store" if self.path.exists() else "there is no such store"
            hint = "`tokmill build` makes a store, `tokmill inspect FILE` says how"
            raise TokmillError(what, where=str(self.path), hint=hint)
        if (self.path / layout.MANIFEST).exists():
            self.manifest: Manifest = layout.read_checked(self.path / layout.MANIFEST, Manifest)
        elif (self.path / layout.PLAN).exists():
            self.manifest = gather_manifest(self.path)
        else:
            raise TokmillError(
                "the folder holds no store (no manifest.json, no plan.json)",
                where=str(self.path),
                hint="`tokmill inspect FOLDER` shows what it holds",
            )
        if self.manifest.format != layout.FORMAT:
            raise TokmillError(
                f"the store has format {self.manifest.format}, and this program reads "
                f"{layout.FORMAT}",
                where=str(self.path),
                hint="build it again, or read it with the tokmill that made it",
            )
        if self.manifest.records and not self.manifest.shards:
            raise TokmillError(
                f"its manifest has {self.manifest.records:,} records and no shard",
                where=str(self.path),
                hint="the same `tokmill build` makes the manifest again",
            )
        self.schema = self._own = self.manifest.schema
        self.vocabularies = self.manifest.vocabularies
        self.fingerprint = self.manifest.fingerprint
        self.partial = not self.manifest.complete
        self.tokens, self.records = self.manifest.tokens, self.manifest.records
        self.shards = self.manifest.shards
        self.token_columns = [n for n, c in self.schema.items() if c.per == "token"]
        self._shard_records = np.asarray([entry.records for entry in self.shards], np.int64)
        self._record_ends = np.cumsum(self._shard_records)
        self._mapped: dict[int, Shard] = {}
        """Number → shard, the least recently used first."""
        self._touched: dict[int, None] = {}
        self._offsets: Array | None = None
        self._decoders: dict[str, Callable[[Array], str]] = {}
        self.overlays: dict[str, Store] = {}
        self.referred: dict[str, Store] = {}
        """Fingerprint → the stores that `reference` has opened."""
        _OPEN.add(self)
        for name in overlays:
            self._add_overlay(name)

    @property
    def place(self) -> str:
        """The address or the folder of the store."""
        return self.remote.address if self.remote else str(self.path)

    def __len__(self) -> int:
        return self.records

    def __repr__(self) -> str:
        return f"Store({self.place!r}, records={self.records}, tokens={self.tokens})"

    def _repr_html_(self) -> str:
        """Return a small table for notebooks."""
        facts = {"source": self.manifest.source, "records": self.records, "tokens": self.tokens}
        columns = {name: f"{c.dtype} a {c.per}" for name, c in self.schema.items()}
        return html_table(repr(self), facts | {"fingerprint": self.fingerprint} | columns)

    @overload
    def __getitem__(self, number: SupportsIndex) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, number: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, number: SupportsIndex | slice) -> Any:
        """Return a record (`record`), or a list of those of a slice; -1 is the last one."""
        if isinstance(number, slice):
            return [self.record(one) for one in range(*number.indices(self.records))]
        place = operator.index(number)
        return self.record(place + self.records * (-self.records <= place < 0))

    def text(self, number: int, column: str = "") -> str:
        """Return the text of a record, by the vocabulary of a token column (default: the first).

        Raises `TokmillError` for a column without a vocabulary, or with one that decodes nothing.
        """
        column = column or next((n for n in self.token_columns if self.schema[n].vocab), "token")
        if column not in self.token_columns:
            raise UsageError(
                f"the store has no token column {column!r}",
                where=str(self.path),
                hint=nearest(column, self.token_columns),
            )
        if column not in self._decoders:
            name = self.schema[column].vocab or column
            file, kind = self.vocabulary_file(name), self.vocabularies[name].coder
            coder = plugins.load(plugins.CODERS, kind)
            if kind == "tokenizer":
                self._decoders[column] = coder.from_file(file).decode
            else:
                lists = coder.from_files({column: file})
                self._decoders[column] = lambda ids: lists.decode({column: ids})[1:]
        return self._decoders[column](self[number][column])

    def _add_overlay(self, name: str) -> None:
        from tokmill.store.overlay import open_overlay

        overlay = open_overlay(self, name)
        self.overlays[name] = overlay
        self.schema = {**self.schema, **overlay.schema}
        self.manifest = msgspec.structs.replace(
            self.manifest,
            schema=self.schema,
            ranges={**self.manifest.ranges, **overlay.manifest.ranges},
        )
        self.token_columns = [n for n, c in self.schema.items() if c.per == "token"]

    def reference(self, column: str) -> Store:
        """Return the store whose record numbers a column holds; it is opened once for all columns.

        Raises `UsageError` if the column refers to no store, `TokmillError` if that store is
        missing, has changed, or has too few records (`store/references.py`).
        """
        from tokmill.store.references import open_reference

        owner = next((laid for laid in self.overlays.values() if column in laid.schema), self)
        return open_reference(owner, column, self.referred)

    @property
    def content(self) -> str:
        """Digest of all content: the fingerprint; with overlays, of their fingerprints too."""
        digests = [overlay.fingerprint for overlay in self.overlays.values()]
        return layout.canonical_digest([self.fingerprint, digests]) if digests else self.fingerprint

    def shard(self, number: int) -> Shard:
        """Return a shard, mapped; the least recently used maps are closed."""
        # Several threads may call this at a time. Each step is one atomic operation of a dict (an
        # OrderedDict's are not atomic).
        shard = self._mapped.pop(number, None)
        if shard is None:
            self._touched[number] = None
            while len(self._mapped) >= most_maps():
                self._mapped.pop(next(iter(self._mapped.copy()), -1), None)
            entry = self.shards[number]
            if self.remote is not None:
                for other, map_ in self._mapped.copy().items():
                    # Removed from the cache: its bytes are free when nobody has it mapped.
                    if not map_.path.exists():
                        self._mapped.pop(other, None)
                shard = self.remote.shard(entry)
                if self._offsets is not None:
                    # They were read alone, without the digest of the whole shard.
                    stop = int(self._record_ends[number])
                    offsets = self._offsets[stop - entry.records : stop + 1]
                    if not np.array_equal(offsets - offsets[0], shard["offsets"]):
                        raise shard.damaged("its offsets are not those that were read before")
            else:
                shard = Shard(self.shard_file(number))
            shard.check_lengths(entry.records, entry.tokens, self._own)
            for overlay in self.overlays.values():
                for name in overlay.schema:
                    shard.lay(name, overlay.shard(number)[name])
        shard.check_size()
        self._mapped[number] = shard
        return shard

    def check_sizes(self) -> None:
        """Raise `MachineError` if a shard was cut while it is mapped; see `Shard.check_size`."""
        for store in (self, *self.overlays.values()):
            for shard in store._mapped.copy().values():
                shard.check_size()

    def touched(self) -> list[int]:
        """Return the numbers of the shards that were used since the store was opened."""
        return list(self._touched.copy())

    def offsets(self) -> Array:
        """Return the number of tokens before each record, and the total (int64, records + 1)."""
        if self._offsets is None:
            self._offsets = mapped(self.path, self.records + 1, self._each_offsets)
        return self._offsets

    def _each_offsets(self) -> Iterator[Array]:
        yield np.zeros(1, np.int64)
        base = 0
        shards = map(self.shard, range(len(self.shards)))
        read: Iterator[Array] = (shard["offsets"] for shard in shards)
        if self.remote is not None:
            read = self.remote.arrays(self.shards, "offsets", "<u8")
        for offsets in (each.astype(np.int64) for each in read):
            yield offsets[1:] + base
            base += int(offsets[-1])

    def ends(self) -> Array:
        """Return the cumulative number of tokens at the end of each record (int64, records)."""
        return self.offsets()[1:]

    def find(self, record: int) -> tuple[int, int]:
        """Return (number of the shard, number within it) of a record."""
        if not 0 <= record < self.records:
            raise RecordError(
                f"there is no record {record}",
                where=str(self.path),
                hint=f"records are numbered 0 to {self.records - 1}",
            )
        shard = int(np.searchsorted(self._record_ends, record, side="right"))
        return shard, record - (int(self._record_ends[shard - 1]) if shard else 0)

    def shards_of(self, records: Array) -> Array:
        """Return the shard of each of some records (int64)."""
        return np.searchsorted(self._record_ends, records, side="right")

    def places(self, records: Array) -> tuple[Array, Array, Array]:
        """Return (shard, number within it, first token within it) of records; all int64."""
        shard = self.shards_of(records)
        local = records - (self._record_ends[shard] - self._shard_records[shard])
        if self._offsets is not None:
            return shard, local, self._offsets[records] - self._offsets[records - local]
        # Only the shards of these records are used.
        first = np.empty(len(records), np.int64)
        order = np.argsort(shard, kind="stable")
        borders = np.flatnonzero(np.diff(shard[order])) + 1
        for here in np.split(order, borders) if len(order) else []:
            first[here] = self.shard(int(shard[here[0]]))["offsets"][local[here]]
        return shard, local, first

    def record(self, number: int) -> dict[str, Any]:
        """Return one record: column → array (token columns), scalar, vector or string."""
        shard_number, local = self.find(number)
        shard = self.shard(shard_number)
        start, stop = (int(value) for value in shard["offsets"][local : local + 2])
        result: dict[str, Any] = {}
        in_phrases = [*phrase_columns(self.schema), *(["border"] * ("border" in self.schema))]
        in_phrases = [name for name in in_phrases if self.schema[name].phrase]
        if in_phrases:
            values = shard.phrase_tokens(local, 0, stop - start, in_phrases)
            result.update(zip(in_phrases, values, strict=True))
        for name, column in self.schema.items():
            if column.phrase:
                continue
            if column.dtype == "utf8":
                result[name] = shard.strings(name, local, local + 1)[0]
            elif column.per == "token":
                result[name] = shard[name][start:stop]
            else:
                result[name] = shard[name][local]
        return result

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.records):
            yield self.record(number)

    def batches(self, size: int = 4096) -> Iterator[tuple[int, int, Records]]:
        """Yield (shard, first record in the shard, records) through the whole store, in order."""
        for number, entry in enumerate(self.shards):
            for start in range(0, entry.records, size):
                stop = min(start + size, entry.records)
                yield number, start, self.shard(number).records(start, stop, self.schema)
        self.check_sizes()

    def column(self, name: str) -> Array:
        """Return a whole record column of numbers (copied, in the order of the records)."""
        column = self.schema.get(name)
        if column is None:
            raise UsageError(
                f"the store has no column {name!r}",
                where=str(self.path),
                hint=nearest(name, self.schema),
            )
        if column.per != "record" or column.dtype == "utf8":
            raise UsageError(
                f"the column {name!r} does not hold a number per record",
                hint="`tokmill inspect STORE` lists the columns that hold one",
            )
        # Copies: a view would keep its shard mapped, and a map its file descriptor.
        parts = [np.array(self.shard(number)[name]) for number in range(len(self.shards))]
        return np.concatenate(parts) if parts else np.zeros(0, column.numpy())

    def values(self, name: str, records: Array) -> Array:
        """Return a column with numbers per record at some records, (n,) or (n, width).

        records: int64 (n,), in any order. Only the shards that hold them are read.
        """
        column = self.schema[name]
        values = np.zeros((len(records), *([column.width] if column.width else [])), column.numpy())
        shards, places, _ = self.places(records)
        for number in np.unique(shards).tolist():
            here = np.flatnonzero(shards == number)
            values[here] = self.shard(number)[name][places[here]]
        return values

    def has_value(self, name: str, value: int) -> bool:
        """Say whether a column of numbers has a value; where its range allows it, all is read."""
        low, high = self.manifest.ranges.get(name, (value, value))
        shards = range(len(self.shards)) if low <= value <= high else ()
        return any(bool((self.shard(number)[name] == value).any()) for number in shards)

    def bytes_per_token(self) -> float | None:
        """Return UTF-8 bytes of the documents / tokens; None for stores that are not text."""
        if "bytes" not in self.schema or not self.tokens:
            return None
        read: Iterator[Array] = (self.shard(number)["bytes"] for number in range(len(self.shards)))
        if self.remote is not None:
            read = self.remote.arrays(self.shards, "bytes", self.schema["bytes"].numpy().str)
        return float(sum(int(each.sum(dtype=np.int64)) for each in read)) / self.tokens

    def fill(
        self,
        spans: Spans,
        length: int,
        columns: dict[str, Array],
        document: Array,
        size: int,
        names: Sequence[str] | None = None,
    ) -> None:
        """Copy spans into (size, length) arrays; missing ones are added to `columns`.

        Token columns and `document` are filled from the left of each row; positions without a span
        stay unchanged. Spans of one row must be adjacent.
        """
        names = self.token_columns if names is None else names
        for name in names:
            if name not in columns:
                column = self.schema[name]
                vector = (column.width,) if column.width else ()
                columns[name] = np.zeros((size, length, *vector), column.numpy())
        from tokmill.store.gather import Gather

        gather = Gather(self, spans, size, length)
        gather.copy(0, size, {name: columns[name] for name in names}, np.arange(size))
        documents = gather.documents(0, size)
        np.copyto(document, documents, where=documents >= 0)

    def whole(self, hint: str = "finish it with the same `tokmill build` first") -> Store:
        """Return the store; raises `TokmillError` if its build has not finished."""
        if self.partial:
            raise TokmillError("the store is not complete", where=self.place, hint=hint)
        return self

    def receipt(self, number: int) -> Receipt:
        """Return the receipt of a shard."""
        path = shard_path(self.path, self.shards[number].name)
        return layout.read_checked(path.with_suffix(".json"), Receipt)

    def shard_file(self, number: int) -> Path:
        """Return the path of a shard; one at an address is fetched."""
        if self.remote is not None:
            return self.remote.file(self.shards[number])
        return shard_path(self.path, self.shards[number].name)

    def vocabulary_file(self, name: str) -> Path:
        """Return the path of a vocabulary's file."""
        if name not in self.vocabularies:
            raise TokmillError(
                f"the store has no vocabulary {name!r}",
                where=str(self.path),
                hint=nearest(name, self.vocabularies)
                or "it was imported without a tokenizer: give one with --tokenizer",
            )
        return inside(self.path / "vocab", self.vocabularies[name].file)


def shard_path(store: Path, name: str) -> Path:
    return inside(store / "shards", f"{name}{SUFFIX}")
