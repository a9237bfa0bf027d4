"""Headerless token files (nanoGPT, CS336 trainers) and llm.c shards.

A headerless `.bin` is `np.fromfile(path, dtype)`: little-endian uint16, or uint32 above 65,536
ids, and nothing else. Source of the format: nanoGPT, `data/openwebtext/prepare.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import machine_errors, reading, sampled_digest
from tokmill.builds.make_shard import InputChanged
from tokmill.builds.scan import InputFile
from tokmill.builds.source import MAX_ITEM, Frozen, Hash, Item, Request
from tokmill.formats import exports
from tokmill.formats.bin_files import MAX_RECORD, IdRange, Ids, Place, in_order, places
from tokmill.formats.llmc import HEADER, LlmcExport, read_header
from tokmill.formats.notes import exporting
from tokmill.formats.tokens import (
    IdType,
    TokenOptions,
    TokenSource,
    at_byte,
    read_exactly,
    store_dtype,
)
from tokmill.store.schema import Array, Records
from tokmill.store.store import Store

RECORD_TOKENS = 1 << 20
SAMPLE = 128 << 10


class BinOptions(TokenOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of headerless token files and llm.c shards."""

    dtype: Literal["auto", "u2", "u4"] = "auto"
    """Width of the ids; auto: as in the llm.c header, else 4 bytes above 65,536 ids, or 2."""
    separator_id: int | None = None
    """Id that ends each document; by default the tokenizer's eot."""
    record_tokens: int | None = None
    """Cut records of this number of tokens instead; 1,048,576 if no separator is known."""


class BinSource(TokenSource):
    """Headerless token files, and llm.c shards, which have a magic number.

    A record ends after each `separator_id`, or with the file; the separator stays in the record,
    like the `eot` of text stores. An item has the documents that begin in its range. In consecutive
    shards, the last document of an item may continue in the next files; the path of such an item is
    the folder. Without a separator a file is cut into records of `record_tokens`.
    """

    Config: ClassVar[type[msgspec.Struct]] = BinOptions
    version = 2
    suffixes = (".bin",)
    config: BinOptions

    @classmethod
    def freeze(cls, config: Any, request: Request) -> dict[str, Frozen]:
        """Return the tokenizer, if one is named; refuse options that contradict each other."""
        if config.separator_id is not None and config.record_tokens is not None:
            raise UsageError(
                "separator_id and record_tokens are two ways to cut records", hint="choose one"
            )
        if config.record_tokens is not None and not 0 < config.record_tokens <= MAX_RECORD // 4:
            raise UsageError(
                f"record_tokens = {config.record_tokens} is not 1 to {MAX_RECORD // 4}",
                hint="--record-tokens takes a number in this range",
            )
        frozen = super().freeze(config, request)
        size = frozen["token"].vocabulary.size if frozen else config.vocab_size or 1 << 32
        if config.separator_id is not None and not 0 <= config.separator_id < size:
            raise UsageError(
                f"separator_id = {config.separator_id} is none of the {size} ids",
                hint="--separator-id is the id that ends each document there",
            )
        return frozen

    @property
    def separator(self) -> int | None:
        """The id that ends documents, None where records are cut by number."""
        if self.config.record_tokens is not None:
            return None
        if self.config.separator_id is None and self.frozen is not None:
            return self.frozen.vocabulary.roles.get("eot")
        return self.config.separator_id

    def file_dtype(self) -> IdType:
        files = self.found()
        return store_dtype([self.id_range(file.path).dtype for file in files])

    def id_range(self, path: Path) -> IdRange:
        """Return the place of a file's ids; refuse an impossible size, header or width."""
        with reading(path) as file:
            size = file.seek(0, 2)
            head = read_exactly(file, 0, min(size, SAMPLE), path)
        wanted = None if self.config.dtype == "auto" else np.dtype(f"<{self.config.dtype}")
        told = read_header(head, size, path)
        if told is not None:
            if wanted not in (None, told):
                raise UsageError(
                    f"the llm.c header says {told.name}, not {wanted}",
                    where=str(path),
                    hint="leave dtype out",
                )
            return IdRange(HEADER, told, (size - HEADER) // told.itemsize)
        if wanted is None and path.with_suffix(".idx").exists():
            raise TokmillError(
                "there is a Megatron index beside it, with the beginnings of the documents",
                where=str(path),
                hint="`tokmill build megatron` reads the pair; --dtype u2 reads the ids alone",
            )
        dtype = wanted or np.dtype("<u2" if (self.size or 0) <= 1 << 16 else "<u4")
        if size % dtype.itemsize:
            raise TokmillError(
                f"{size} bytes are no whole number of {dtype.itemsize}-byte ids",
                where=f"{path}, byte {size - size % dtype.itemsize}",
                hint="its copy was cut off, or its ids have another width: --dtype u2 or u4",
            )
        sample = np.frombuffer(head[: len(head) - len(head) % dtype.itemsize], dtype)
        if wanted is None and (why := look_alike(sample)):
            raise TokmillError(
                why,
                where=str(path),
                hint="if the file is right, name the type of its ids: --dtype u2 or --dtype u4",
            )
        return IdRange(0, dtype, size // dtype.itemsize)

    def found(self) -> list[InputFile]:
        return in_order(super().found())

    @cached_property
    def _places(self) -> dict[str, Place]:
        """Name of a file → where it stands; empty where records are cut by number."""
        if self.separator is None:
            return {}
        return {p.file.name: p for p in places(self.found(), self.id_range, self.separator)}

    def items(self) -> Iterator[Item]:
        """Yield the files in ranges of at most 64 MiB of whole ids (and of whole records)."""
        places = self._places
        for file in self.found():
            header, dtype, tokens = self.id_range(file.path)
            step = MAX_ITEM
            if self.separator is None:
                record = self._record_tokens * dtype.itemsize
                step = max(1, MAX_ITEM // record) * record
            end = header + tokens * dtype.itemsize
            path, digest = file.path.absolute(), file.digest
            if places and not places[file.name].alone:
                path, digest = path.parent, self._digest(places[file.name], digest)
            for start in range(header, max(end, header + 1), step):
                yield Item(file.name, str(path), start, min(start + step, end), digest)

    def _digest(self, place: Place, own: str) -> str:
        """Return the digest of a file, and of parts of other files that belong to its records."""
        assert self.separator is not None
        digest = hashlib.sha256(f"{own} {place.continues}".encode())
        for _, _, ids in place.rest(self.separator):
            digest.update(ids.tobytes())
        return digest.hexdigest()[:32]

    @property
    def _record_tokens(self) -> int:
        return self.config.record_tokens or RECORD_TOKENS

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        """Yield the documents that begin in the item, or the records that it is cut into."""
        path = Path(item.path)
        if not path.is_dir():
            yield from self._read(item, digest, path, None)
            return
        place = self._places.get(item.name)
        if place is None:
            raise changed(path)
        path = place.file.path
        self._check_unchanged(item, place)
        yield from self._read(item, digest, path, place)
        self._check_unchanged(item, place)

    def _read(self, item: Item, digest: Hash, path: Path, place: Place | None) -> Iterator[Records]:
        id_range = self.id_range(path)
        header, dtype, tokens = id_range
        size = dtype.itemsize
        first, last = (item.start - header) // size, (item.stop - header) // size
        with reading(path) as file:
            part = Ids(file, path, id_range)
            if self.separator is None:
                found = part.even(first, last, self._record_tokens, self.resources.block_bytes)
            else:
                first, last = (
                    part.behind(max(at - 1, 0), self.separator)
                    if at or (place and place.continues)
                    else 0
                    for at in (first, last)
                )
                found = part.documents(first, last, self.separator, self.resources.block_bytes)
            for start, ids, offsets in found:
                token = self.checked(ids, at_byte(path, part.byte(start), size))
                digest.update(ids.tobytes())
                done = (start + len(ids) - first) / max(1, last - first)
                if place is not None and start + len(ids) == tokens:
                    rest = self._rest(place, digest)
                    token = np.concatenate([token, *rest])
                    offsets[-1] += sum(map(len, rest))
                starts = part.byte(start) + offsets[:-1] * size
                yield Records(offsets, {"token": token}, starts, done=done)

    def _rest(self, place: Place, digest: Hash) -> list[Array]:
        """Return the parts of a file's last document in other files, and update `digest`."""
        assert self.separator is not None
        found = []
        for path, byte, ids in place.rest(self.separator):
            found.append(self.checked(ids, at_byte(path, byte, ids.itemsize)))
            digest.update(ids.tobytes())
        return found

    def _check_unchanged(self, item: Item, place: Place) -> None:
        path = place.file.path
        with machine_errors("read", path):
            size = path.stat().st_size
        if self._digest(place, sampled_digest(path, size)) != item.digest:
            raise changed(path)


def changed(path: Path) -> InputChanged:
    """Return the error for a shard that has changed, or whose next shards have changed."""
    return InputChanged(
        "the file, or one that continues it, has changed since the build was planned",
        where=str(path),
        hint="the same `tokmill build` with --yes plans anew and makes what changed again",
    )


def look_alike(sample: Array) -> str:
    """Return why ids seem to have another width or byte order, else "".

    Needs at least 32 ids. If every second uint16 value is 0 or very small, they are halves of
    uint32 ids. If all ids are multiples of 256, or their low bytes have fewer values than their
    high bytes, the bytes are swapped.
    """
    if len(sample) < 32 or not sample.any():
        return ""
    swapped = sample.byteswap()
    if sample.dtype.itemsize == 4:
        if int(sample.max()) >= 1 << 24 and int(swapped.max()) < 1 << 24:
            return "the ids look like big-endian uint32"
        return ""
    low, high = sample[0::2], sample[1::2]
    if (not high.any()) or (int(high.max()) < 32 and int(low.max()) >= 1024):
        return "the ids look like uint32, but were to be read as uint16"
    if not (low & 255).any() and int(low.max()) >> 8 < 32:
        return "the ids look like big-endian uint32, but were to be read as uint16"
    low_bytes, high_bytes = sample & 255, sample >> 8
    if not low_bytes.any():
        return "the ids look like big-endian uint16"
    spread = len(np.unique(high_bytes)) >= 200
    if spread and int(low_bytes.max()) < int(high_bytes.max()):
        return "the ids look like big-endian uint16"
    return ""


class BinExportOptions(
    exports.ExportOptions, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """Options of headerless token files."""

    dtype: Literal["auto", "u2", "u4"] = "auto"
    """Width of the ids; auto: uint16, uint32 above 65,536 ids."""


class BinExport:
    """One headerless file of all ids, record after record."""

    Config: ClassVar[type[msgspec.Struct]] = BinExportOptions

    def __init__(self, config: BinExportOptions) -> None:
        self.config = config

    def write(self, store: Store, out: Path) -> dict[str, Any]:
        """Write `out` (or `out/tokens.bin`) and return files, tokens, bytes and dtype."""
        config = self.config
        exports.check_column(store, config)
        dtype = exports.wide_dtype(store, config.column)
        if config.dtype != "auto":
            dtype = np.dtype(f"<{config.dtype}")
        path = exports.output_file(out, ".bin")
        with exporting(
            store, "bin", config, path.parent, path.name, files=[path], named=out
        ) as export:
            export.put(path, exports.raw(exports.pieces(store, config.column, dtype)))
        return exports.summary([path], store.tokens, dtype=dtype.name)


__all__ = ["BinExport", "BinSource", "LlmcExport"]
