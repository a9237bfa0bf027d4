"""Stores of x86 code as pickles of token dicts, for scripts that read only these.

Pickles are written here and in `triplets_export` alone: plain lists, dicts, tuples, strings and
numbers, in protocol 4. The operations are written directly, so the bytes of each instruction are
made once. Source of the formats: SemanticBBV, `pre_processing/`, and CPython, `Lib/pickletools.py`.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.errors import UsageError, nearest
from tokmill.base.files import inside, read_file
from tokmill.base.recipe import Natural
from tokmill.formats import notes
from tokmill.formats.notes import exporting
from tokmill.store.schema import PHRASE_BIT, Array
from tokmill.store.store import Store

COLUMNS = ("asm", "mne", "type", "reg", "rw", "eflag")
"""The six streams of an instruction, in the order in which a token dict has them."""
RUNS = ("type", "rw")
"""Written as (name, run)."""
ONCE = ("mne", "eflag")
"""Written as one string an instruction."""
BATCH = 1000
"""Entries that Python's own pickler writes at a time."""


def tokens_of(data: bytes, where: str) -> Any:
    """Return the vocabulary of an x86 column from its file; raises `TokmillError` if invalid."""
    return plugins.require("tokmill.x86.tokens.vocabularies.vocabulary").TokenList.from_json(
        data, where
    )


class TokenDictsExportOptions(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """Options of pickles of token dicts."""

    key: str = ""
    """Columns of strings, such as function or function,level: their values become the keys of a
    dict of lists, or of such dicts; without it, a list."""
    sequences_per_file: Natural = 0
    """Sequences (with `key`: keys) per file NAME_0.pkl, NAME_1.pkl …; 0: all in one
    file."""
    name: str = "tokens"
    """First part of the file names."""


class TokenDictsExport:
    """A pickle of sequences of token dicts, or several in a folder.

    Equal adjacent tokens of `type` and `rw` become one run. A [SEP] after an instruction is left
    out. Equal stores give equal files.
    """

    Config: ClassVar[type[msgspec.Struct]] = TokenDictsExportOptions

    def __init__(self, config: TokenDictsExportOptions) -> None:
        self.config = config

    def write(self, store: Store, out: Path) -> dict[str, Any]:
        """Write the file or files; return files, tokens, sequences and bytes."""
        config = self.config
        phrases = [name for name, column in store.schema.items() if column.phrase]
        missing = [name for name in COLUMNS if name not in phrases]
        if missing:
            raise UsageError(
                f"the store has no instructions: {', '.join(missing)} not among its phrases",
                where=str(store.path),
                hint="token dicts are made from stores of x86 code",
            )
        strings = [name for name, column in store.schema.items() if column.dtype == "utf8"]
        keys = config.key.split(",") if config.key else []
        if wrong := [key for key in keys if key not in strings]:
            raise UsageError(
                f"no column {wrong[0]!r} of strings",
                where=str(store.path),
                hint=nearest(wrong[0], strings),
            )
        groups = _groups(store, keys) if keys else {}
        others: tuple[str, str] | None
        count = len(groups) if keys else store.records
        size = config.sequences_per_file or max(1, count)
        if config.sequences_per_file:
            folder, name = out, config.name
            others = (f"{name}_*.pkl", f"{name}_*.pkl")
            paths = [inside(folder, f"{config.name}_{i}.pkl") for i in range(-(-count // size))]
        else:
            paths = [notes.output_file(out, ".pkl", config.name)]
            folder, name, others = paths[0].parent, paths[0].name, None
        with exporting(
            store, "token-dicts", config, folder, name, files=paths, named=out, others=others
        ) as export:
            for number, path in enumerate(paths):
                chosen = range(number * size, min((number + 1) * size, count))
                writer = _Writer(store)
                if keys:
                    part = islice(groups.items(), chosen.start, chosen.stop)
                    export.put(path, writer.dict_of_lists(dict(part)))
                else:
                    export.put(path, writer.list_of(chosen))
        more = {}
        if "level" in strings and "level" not in keys:
            shards = enumerate(entry.records for entry in store.shards)
            texts = [
                store.shard(i).text("level", 0, records).distinct()[0] for i, records in shards
            ]
            if levels := {level.decode() for rows in texts for level in rows} - {"", "unknown"}:
                lost = f"levels of sequences ({', '.join(sorted(levels))}) are not in the file"
                more["note"] = f"{lost}: --key function,level keeps them"
        return notes.summary(paths, store.tokens, sequences=store.records, **more)


Groups = dict[str, Any]
"""Key → records, or the groups of the next column; in the order in which they are in the store."""


def _groups(store: Store, keys: Sequence[str]) -> Groups:
    groups: Groups = {}
    first = 0
    for number, entry in enumerate(store.shards):
        columns = [store.shard(number).strings(key, 0, entry.records) for key in keys]
        for record, (*outer, last) in enumerate(zip(*columns, strict=True), first):
            place = groups
            for name in outer:
                place = place.setdefault(name, {})
            place.setdefault(last, []).append(record)
        first += entry.records
    return groups


class _Writer:
    """Writes one pickle; a string is written once, then referred to."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.tokens = [
            tokens_of(read_file(store.vocabulary_file(store.schema[name].vocab or name)), name)
            for name in COLUMNS
        ]
        self.separator = [tokens.ids.get("[SEP]", -1) for tokens in self.tokens]
        self.memo: dict[str, int] = {}
        self.shard = -1
        self.pieces: list[bytes] = []

    def list_of(self, records: range) -> Iterator[bytes]:
        yield b"\x80\x04]"
        for first in range(records.start, records.stop, BATCH):
            yield b"("
            for record in range(first, min(first + BATCH, records.stop)):
                yield self._sequence(record)
            yield b"e"
        yield b"."

    def dict_of_lists(self, groups: Groups) -> Iterator[bytes]:
        """Yield the bytes of {key: [sequence]}, or of {key: {key: [sequence]}}."""
        yield b"\x80\x04"
        yield from self._keyed(groups)
        yield b"."

    def _keyed(self, groups: Groups) -> Iterator[bytes]:
        yield b"}"
        for key, group in groups.items():
            yield self._text(key)
            if isinstance(group, dict) and group.keys() != {""}:
                yield from self._keyed(group)
            else:
                yield b"]("
                yield from map(self._sequence, group[""] if isinstance(group, dict) else group)
                yield b"e"
            yield b"s"

    def _sequence(self, record: int) -> bytes:
        number, local = self.store.find(record)
        shard = self.store.shard(number)
        if number != self.shard:
            self.shard = number
            self.pieces = [b""] * (len(shard["table_offsets"]) - 1)
        start, stop = shard["phrase_offsets"][local : local + 2].tolist()
        rows = (shard["phrase"][start:stop] & ~PHRASE_BIT).tolist()
        pieces = self.pieces
        written = [pieces[row] or self._new(row) for row in rows]
        return b"](" + b"".join(written) + b"e"

    def _new(self, row: int) -> bytes:
        """Return the bytes of an instruction that is written for the first time."""
        shard = self.store.shard(self.shard)
        start, stop = shard["table_offsets"][row : row + 2].tolist()
        ids = [shard[f"table.{name}"][start:stop] for name in COLUMNS]
        if stop - start > 1 and all(
            int(column[-1]) == end for column, end in zip(ids, self.separator, strict=True)
        ):
            ids = [column[:-1] for column in ids]
        first = self._instruction(ids)
        # From the second time on, all its strings are known.
        self.pieces[row] = self._instruction(ids)
        return first

    def _instruction(self, ids: list[Array]) -> bytes:
        parts = [b"}("]
        for name, tokens, column in zip(COLUMNS, self.tokens, ids, strict=True):
            parts.append(self._text(name))
            names = [tokens.tokens[i] for i in column.tolist()]
            if name in ONCE:
                parts.append(self._text(names[0]))
            elif name in RUNS:
                begins = np.flatnonzero(np.append(True, column[1:] != column[:-1]))
                runs = np.diff(np.append(begins, len(column))).tolist()
                parts.append(b"](")
                for begin, run in zip(begins.tolist(), runs, strict=True):
                    parts.append(self._text(names[begin]) + number_bytes(run) + b"\x86")
                parts.append(b"e")
            else:
                parts += [b"](", *map(self._text, names), b"e"]
        return b"".join([*parts, b"u"])

    def _text(self, text: str) -> bytes:
        number = self.memo.get(text)
        if number is not None:
            return b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little")
        self.memo[text] = len(self.memo)
        data = text.encode("utf-8", "surrogatepass")
        if len(data) < 256:
            return b"\x8c%c" % len(data) + data + b"\x94"
        return b"X" + len(data).to_bytes(4, "little") + data + b"\x94"


def pickled_counts(counts: Mapping[str, int]) -> bytes:
    """Return a pickle of {token: frequency}, in the order given."""
    parts = [b"\x80\x04}("]
    for token, count in counts.items():
        text = token.encode()
        number = count.to_bytes(count.bit_length() // 8 + 1, "little", signed=True)
        parts.append(b"X" + len(text).to_bytes(4, "little") + text)
        parts.append(b"\x8a%c" % len(number) + number)
    return b"".join([*parts, b"u."])


def number_bytes(value: float) -> bytes:
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if value < 1 << 8:
        return b"K%c" % value
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    data = value.to_bytes(9, "little").rstrip(b"\0")
    data += b"\0" * (data[-1] > 127)
    return b"\x8a%c" % len(data) + data
