"""Plain text: documents between separators, or lines."""

import codecs
from collections.abc import Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.inflate import inflate
from tokmill.builds.scan import NOT_TEXT, Fits, suffix_of
from tokmill.builds.source import Hash, Item
from tokmill.store.schema import Drops
from tokmill.text.documents import DocumentSource
from tokmill.text.make_document import Documents, TextOptions, select
from tokmill.text.record_blocks import BOM, Block, blank_lines, is_stream, record_blocks


class TextConfig(TextOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of plain text."""

    record: Literal["separator", "line"] = "separator"
    """A document is the text between two separators, or one line."""
    separator: str = "<|endoftext|>"
    """A file without any separator is one document."""
    strip: bool = False
    """Remove white space around each document."""
    invalid_utf8: Literal["reject", "replace"] = "reject"
    """What happens to a document that is not UTF-8; `replace` inserts U+FFFD."""

    def __post_init__(self) -> None:
        if self.record == "line" and self.separator != TextConfig().separator:
            raise UsageError("lines have no other separator", hint="leave it or record out")


class TextSource(DocumentSource):
    """Plain text files."""

    Config: ClassVar[type[msgspec.Struct]] = TextConfig
    suffixes = ()
    config: TextConfig

    def fits(self) -> Fits:
        """Return the function that checks whether a file in a folder is text, and not empty.

        Files that are not text are added to `not_text`.
        """
        not_text = self.not_text = []

        def fits(path: Path, head: bytes) -> str:
            why = why_no_text(path, head)
            if why.startswith(NOT_TEXT):
                not_text.append(str(path))
            return why

        return fits

    @classmethod
    def remark(cls, names: Sequence[str], config: object) -> str:
        """Return a remark on files that are read as text but look like JSON Lines."""
        from tokmill.text.jsonl import JsonlSource

        records = [name for name in names if name.lower().endswith(JsonlSource.suffixes)]
        if not records:
            return ""
        many = f" and {len(records) - 1:,} more" if len(records) > 1 else ""
        return (
            f"{records[0]}{many}: JSON Lines, taken as text with its keys and quotation marks\n"
            "hint: `tokmill build jsonl` makes a document of each line's field"
        )

    def documents(self, item: Item, digest: Hash) -> Iterator[Documents]:
        """Yield documents; blank ones are skipped as empty."""
        lines = self.config.record == "line"
        delimiter = b"\n" if lines else self.config.separator.encode()
        if not delimiter:
            raise UsageError("the separator is empty", hint="--record line, or some text")
        for block in record_blocks(item, delimiter, digest, self.resources.block_bytes):
            yield self._split(block, delimiter, lines)

    def _split(self, block: Block, delimiter: bytes, lines: bool) -> Documents:
        data, start = block.data, block.start
        drops = []
        if block.too_long:
            drops.append(Drops(np.array(block.too_long, np.int64), "too long", True))
        pieces = data.split(delimiter)
        if not pieces[-1]:
            pieces.pop()
        starts = np.full(len(pieces), start, np.int64)
        if len(pieces) > 1:
            starts[1:] += np.cumsum([len(piece) + len(delimiter) for piece in pieces[:-1]])
        if lines and pieces and (blank := blank_lines(data, starts - start)).any():
            drops.append(Drops(starts[blank], "empty", False))
            pieces = list(compress(pieces, ~blank))
            starts = starts[~blank]
        if len(starts) and starts[0] == 0 and pieces[0].startswith(BOM):
            pieces[0] = pieces[0][len(BOM) :]
        if lines:
            pieces = [piece[:-1] if piece.endswith(b"\r") else piece for piece in pieces]
        errors = "replace" if self.config.invalid_utf8 == "replace" else "strict"
        rejected = [""] * len(pieces)
        texts = []
        for i, piece in enumerate(pieces):
            try:
                texts.append(piece.decode("utf-8", errors))
            except UnicodeDecodeError:
                texts.append("")
                rejected[i] = "utf8"
        documents = select(
            Documents(texts, starts, drops, ends_part=block.ends_part, done=block.done),
            rejected,
            rejected=True,
        )
        if self.config.strip:
            documents.texts = [text.strip() for text in documents.texts]
        return select(
            documents, ["empty" if not text or text.isspace() else "" for text in documents.texts]
        )


def why_no_text(path: Path, head: bytes) -> str:
    """Return, from its first bytes, why a file is not text; "" if it is text.

    For a compressed file, the first bytes are decompressed.
    """
    if is_stream(str(path)):
        try:
            head = next(inflate(str(path)), b"")[: len(head)]
        except TokmillError:
            # Reading it will raise the error.
            return ""
    if not head:
        return "empty file"
    return "" if is_text(head) else f"{NOT_TEXT}{suffix_of(path.name)}"


def is_text(head: bytes) -> bool:
    """Say whether a file begins like text: with UTF-8, without a zero byte."""
    if b"\0" in head:
        return False
    try:
        # The last character may be incomplete.
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True
