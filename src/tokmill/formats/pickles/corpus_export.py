"""Stores as walks in text: `vocab.txt`, and `corpus.txt` with a walk per line, pairs apart.

Words stand between blanks, and a blank line between pairs. The line of a word in `vocab.txt` is its
id. Source of the format: `gendata.py` and `dataprocess.py` of a BERT on walks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.base.files import inside, read_file
from tokmill.formats import notes
from tokmill.formats.notes import exporting
from tokmill.formats.pickles.token_dicts_export import tokens_of
from tokmill.store.schema import Array, joined, take_flat
from tokmill.store.store import Store

CORPUS, VOCABULARY = "corpus.txt", "vocab.txt"
PAIRS = (("pair",), ("first", "second"), ("project", "program", "version", "compiler", "level"))
"""Columns whose values tell pairs apart, or programs where there are no pairs; the first that a
store has."""
FREE = "[unused{}]"
"""What stands for an id that no word has, as in BERT's own lists."""


class CorpusExportOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of walks as text."""

    column: str = ""
    """Column of words to export; without it asm or token."""


class CorpusExport:
    """The files vocab.txt and corpus.txt, each record a line; equal stores give equal files."""

    Config: ClassVar[type[msgspec.Struct]] = CorpusExportOptions

    def __init__(self, config: CorpusExportOptions) -> None:
        self.config = config

    def write(self, store: Store, out: Path) -> dict[str, Any]:
        """Write both files into a folder; return files, tokens, bytes, walks, pairs and empty ones.

        A record without tokens makes no line. Raises `UsageError` for a column without words, and
        for words that hold blanks.
        """
        column = self.config.column or ("asm" if "asm" in store.schema else "token")
        notes.check_column(store, notes.ExportOptions(column=column))
        words = words_of(store, column)
        strings = {name for name, column in store.schema.items() if column.dtype == "utf8"}
        keys = next((names for names in PAIRS if {*names} <= strings), ())
        paths = [inside(out, VOCABULARY), inside(out, CORPUS)]
        lines = _Lines(store, column, words, keys)
        with exporting(
            store, "corpus", self.config, out, "corpus", files=paths, named=out
        ) as export:
            export.put(paths[0], "".join(f"{word}\n" for word in words))
            export.put(paths[1], lines)
        return notes.summary(paths, store.tokens, walks=store.records)


def words_of(store: Store, column: str) -> list[str]:
    """Return the words of a column by id; raises `UsageError` where it has none, or with blanks."""
    name = store.schema[column].vocab
    vocabulary = store.vocabularies.get(name or "")
    if name is None or vocabulary is None:
        raise UsageError(
            f"the column {column!r} has no vocabulary, so its ids are not words",
            where=str(store.path),
            hint="--column names a column with a vocabulary",
        )
    raw = read_file(store.vocabulary_file(name))
    if vocabulary.coder == "x86":
        named: dict[int, str] = dict(enumerate(tokens_of(raw, name).tokens))
    else:
        library = plugins.require("tokmill.text.tokenizers.tokenizer")
        tokenizer = library.Tokenizer.from_json(raw, name)
        named = {i: data.decode(errors="replace") for i, data in tokenizer.vocab.items()}
    words = [named.get(number, FREE.format(number)) for number in range(vocabulary.size)]
    for word in words:
        if len(word.split()) != 1:
            raise UsageError(
                f"the token {word!r} is not a word: it is empty or holds a blank",
                where=f"{store.path}, column {column!r}",
                hint="a corpus is made of words: of stores of x86 code, or of `build corpus`",
            )
    return words


class _Lines:
    """The bytes of `corpus.txt`, some records at a time."""

    def __init__(self, store: Store, column: str, words: list[str], keys: tuple[str, ...]) -> None:
        self.store, self.column, self.keys = store, column, keys
        self.bytes, self.ends = joined([f"{word} ".encode() for word in words])

    def __iter__(self) -> Iterator[bytes]:
        last: tuple[str, ...] | None = None
        for ids, number, first, stop in notes.blocks(self.store, self.column):
            shard = self.store.shard(number)
            offsets = shard["offsets"][first : stop + 1].astype(np.int64)
            filled = np.flatnonzero(np.diff(offsets))
            text, ends = take_flat(self.bytes, self.ends, ids)
            # The blank after the last word of a record.
            line_ends = ends[(offsets - offsets[0])[filled + 1]]
            text[line_ends - 1] = ord("\n")
            columns = [shard.text(name, first, stop) for name in self.keys]
            named = list(zip(*(column.decoded() for column in columns), strict=True))
            kept: list[tuple[str, ...]] = [named[i] if named else () for i in filled.tolist()]
            begins = self._begins(kept, last)
            last = kept[-1] if kept else last
            line_begins = np.concatenate([[0], line_ends[:-1]])[begins] if len(filled) else begins
            yield np.insert(text, line_begins.astype(np.int64), ord("\n")).tobytes()

    def _begins(self, keys: list[tuple[str, ...]], last: tuple[str, ...] | None) -> Array:
        """Return the lines before which another pair ends; none before the first line."""
        before = [last, *keys[:-1]]
        changes = [a is not None and a != b for a, b in zip(before, keys, strict=True)]
        return np.flatnonzero(np.array(changes, bool))
