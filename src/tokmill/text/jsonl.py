"""JSON Lines: one record per line, documents from its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokmill.base.inflate import MAGIC
from tokmill.builds.source import Frozen, Hash, Item, Resources
from tokmill.store.schema import Array, Drop, Drops, drops_of
from tokmill.text.documents import DocumentSource
from tokmill.text.make_document import (
    Documents,
    FieldOptions,
    Paths,
    join_fields,
    join_lists,
    select,
)
from tokmill.text.record_blocks import Block, blank_lines, record_blocks
from tokmill.text.seen_keys import why_nothing

NEWLINE, OPEN, CLOSE = 10, 123, 125
SHORT = 64
BOM = b"\xef\xbb\xbf"


class JsonlConfig(FieldOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of JSON Lines."""


class JsonlSource(DocumentSource):
    """JSON Lines files.

    A block of lines is decoded in one call if every newline stands between `}` and `{`, and the
    result has as many records as lines. Otherwise it is decoded line by line, with a reason for
    each line that is refused.
    """

    Config: ClassVar[type[msgspec.Struct]] = JsonlConfig
    suffixes = tuple(f"{kind}{packed}" for kind in (".jsonl", ".ndjson") for packed in ("", *MAGIC))
    hints: ClassVar[dict[str, str]] = {
        "too long": "a record is one line of at most 64 MiB, and the line does not end: write each "
        "record on a line of its own (`jq -c`)",
        "nan": "NaN stands where text is to stand, as pandas writes a missing value: write null",
    }
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
        """Return a hint if no line of the files makes a record, or very few do."""
        return why_nothing(paths, config.fields)

    def documents(self, item: Item, digest: Hash) -> Iterator[Documents]:
        """Yield the documents of the lines that begin in the item."""
        for block in record_blocks(item, b"\n", digest, self.resources.block_bytes):
            # In a call, so that only the texts of a block stay in memory while it is encoded.
            yield self._documents(block)

    def _documents(self, block: Block) -> Documents:
        records, starts, drops = self._decode(block)
        columns = [self._column(records, field) for field in self.config.fields]
        texts, reasons = join_fields(columns, self.config)
        kept = {
            field: [as_text(value) for value in self.paths.values(records, field)]
            for field in self.config.keep
        }
        if block.too_long:
            drops.append(Drops(np.array(block.too_long, np.int64), "too long", True))
        return select(Documents(texts, starts, drops, kept, block.ends_part, block.done), reasons)

    def _column(self, records: Sequence[Any], field: str) -> list[str | None]:
        values = self.paths.values(records, field)
        return join_lists(values, self.config) if self.paths.has_lists(field) else values

    def _decode(self, block: Block) -> tuple[list[Any], Array, list[Drops]]:
        data, base = block.data, block.start
        if base == 0 and data.startswith(BOM):
            data, base = data[len(BOM) :], len(BOM)
        if not data:
            return [], np.zeros(0, np.int64), []
        starts = _line_starts(data)
        records = self._all(data)
        if records is not None:
            return records, starts + base, []
        drops: list[Drops] = []
        blank = blank_lines(data, starts)
        if blank.any():
            drops.append(Drops(starts[blank] + base, "blank line", False))
            data = bytes(
                np.frombuffer(data, np.uint8)[np.repeat(~blank, np.diff(starts, append=len(data)))]
            )
            starts = starts[~blank]
            records = self._all(data) if data else []
        if records is None:
            records, kept, refused = self._line_by_line(data)
            drops += drops_of(
                Drop(base + place, reason, True)
                for place, reason in zip(starts[~kept].tolist(), refused, strict=True)
            )
            starts = starts[kept]
        return records, starts + base, drops

    def _all(self, data: bytes) -> list[Any] | None:
        """Return the records if no line is blank or refused, else None."""
        flat = np.frombuffer(data, np.uint8)
        newlines = np.flatnonzero(flat == NEWLINE)
        inner = newlines[:-1] if data[-1] == NEWLINE else newlines
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
            if len(records) == len(inner) + 1:
                return records
        return None

    def _line_by_line(self, data: bytes) -> tuple[list[Any], Array, list[str]]:
        """Return the records, which lines they are (bool, one per line), reasons of the others."""
        records: list[Any] = []
        kept: list[bool] = []
        refused: list[str] = []
        lines = data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        reasons: dict[bytes, str] = {}
        for line in lines:
            # Short bad lines often repeat, and exceptions are slow.
            reason = reasons.get(line)
            if reason is None:
                try:
                    records.append(self.decoder.decode(line.strip()))
                    kept.append(True)
                    continue
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    if (record := self._with_nan(line)) is not None:
                        records.append(record)
                        kept.append(True)
                        continue
                    reason = refusal(line.strip(), error)
                if len(line) < SHORT:
                    reasons[line] = reason
            refused.append(reason)
            kept.append(False)
        return records, np.array(kept, bool), refused

    def _with_nan(self, line: bytes) -> Any:
        """Return the record of a line with NaN or Infinity, which are no JSON; None: it has none.

        Python and pandas write them. Where a text is to stand the line is refused.
        """
        if b"NaN" not in line and b"Infinity" not in line:
            return None
        try:
            value = json.loads(line.decode())
            json.dumps(value, ensure_ascii=False).encode()
            return msgspec.convert(value, self.paths.struct)
        except (ValueError, RecursionError, msgspec.ValidationError):
            return None


def _line_starts(data: bytes) -> Array:
    newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == NEWLINE)
    return np.concatenate([[0], (newlines[:-1] if data[-1] == NEWLINE else newlines) + 1])


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
    """Return a kept value as text: a string unchanged, others as JSON (with NaN and Infinity)."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    raw = msgspec.json.encode(value, enc_hook=str)
    if b"null" not in raw:
        return raw.decode()
    # It writes null for NaN and the infinite too.
    plain = msgspec.to_builtins(value, enc_hook=str)
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
