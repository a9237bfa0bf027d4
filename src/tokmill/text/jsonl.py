"""JSON Lines: one record a line, documents from its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokmill.build.source import Frozen, Hash, Item, Resources
from tokmill.store.schema import Array, Drop
from tokmill.text.blocks import Block, record_blocks
from tokmill.text.documents import DocumentSource
from tokmill.text.paths import Paths
from tokmill.text.prepare import Documents, FieldOptions, join_fields, join_lists, select
from tokmill.text.seen_keys import why_nothing

NEWLINE, OPEN, CLOSE = 10, 123, 125
BOM = b"\xef\xbb\xbf"


class JsonlConfig(FieldOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of JSON Lines."""


class JsonlSource(DocumentSource):
    """JSON Lines files.

    A block of lines is decoded in one call where every newline stands between `}` and `{` and as
    many records come back as there are lines; otherwise line by line, with a reason for each line
    that is refused.
    """

    Config: ClassVar[type[msgspec.Struct]] = JsonlConfig
    version = 2
    """2: fields are not stripped unless it is asked for."""
    stdin_suffix = ".jsonl"
    suffixes = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst")
    config: JsonlConfig

    def __init__(
        self,
        config: Any,
        inputs: Sequence[str],
        vocabularies: Mapping[str, Frozen],
        resources: Resources,
    ) -> None:
        super().__init__(config, inputs, vocabularies, resources)
        self.paths = Paths(config.fields, config.keep)
        self.decoder = self.paths.decoder

    @classmethod
    def why_nothing(cls, config: JsonlConfig, paths: Sequence[str]) -> str:
        """Return what is to be said where (nearly) no line of the files makes a record."""
        return why_nothing(paths, config.fields)

    def documents(self, item: Item, digest: Hash) -> Iterator[Documents]:
        """Yield the documents of the lines that begin in the item."""
        for block in record_blocks(item, b"\n", digest, self.resources.block_bytes):
            # Of a block that is being encoded nothing but its texts should be in memory.
            yield self._documents(block)

    def _documents(self, block: Block) -> Documents:
        records, starts, drops = self._decode(block)
        columns = [self._column(records, field) for field in self.config.fields]
        texts, reasons = join_fields(columns, self.config)
        kept = {
            field: [as_text(value) for value in self.paths.values(records, field)]
            for field in self.config.keep
        }
        drops += [Drop(place, "too long", True) for place in block.too_long]
        return select(Documents(texts, starts, drops, kept, block.ends_part), reasons)

    def _column(self, records: Sequence[Any], field: str) -> list[str | None]:
        values = self.paths.values(records, field)
        return join_lists(values, self.config) if self.paths.has_lists(field) else values

    def _decode(self, block: Block) -> tuple[list[Any], Array, list[Drop]]:
        data, base = block.data, block.start
        if base == 0 and data.startswith(BOM):
            data, base = data[len(BOM) :], len(BOM)
        if not data:
            return [], np.zeros(0, np.int64), []
        flat = np.frombuffer(data, np.uint8)
        newlines = np.flatnonzero(flat == NEWLINE)
        inner = newlines[:-1] if data[-1] == NEWLINE else newlines
        starts = np.concatenate([[0], inner + 1])
        # `decode_lines` alone would accept two records on a line, or one over two lines.
        regular = (
            data[0] == OPEN
            and bool((flat[inner + 1] == OPEN).all())
            and bool((flat[inner - 1] == CLOSE).all())
        )
        if regular:
            try:
                records = self.decoder.decode_lines(data)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                records = []
            if len(records) == len(starts):
                return records, starts + base, []
        return self._line_by_line(data, base, starts)

    def _line_by_line(
        self, data: bytes, base: int, starts: Array
    ) -> tuple[list[Any], Array, list[Drop]]:
        records: list[Any] = []
        kept: list[int] = []
        drops: list[Drop] = []
        stops = [*starts[1:].tolist(), len(data)]
        for start, stop in zip(starts.tolist(), stops, strict=True):
            line = data[start:stop].strip()
            if not line:
                drops.append(Drop(base + start, "blank line", False))
                continue
            try:
                records.append(self.decoder.decode(line))
                kept.append(base + start)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                drops.append(Drop(base + start, refusal(line, error), True))
        return records, np.asarray(kept, np.int64), drops


def refusal(line: bytes, error: Exception) -> str:
    """Return why a line was refused: type, utf8, surrogate, nan, depth or json."""
    if isinstance(error, RecursionError):
        return "depth"
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return "utf8"
    found_nan = False

    def constant(name: str) -> float:
        nonlocal found_nan
        found_nan = True
        return 0.0

    try:
        value = json.loads(text, parse_constant=constant)
    except RecursionError:
        return "depth"
    except ValueError:
        return "json"
    if found_nan:
        return "nan"
    if isinstance(error, msgspec.ValidationError):
        return "type"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "surrogate"
    return "json"


def as_text(value: Any) -> str:
    """Return a value that is carried along as text: JSON, where it is no string."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
