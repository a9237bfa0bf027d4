"""JSON Lines: one record per line, documents from its fields.

An error about a missing field names the keys that the lines have.
"""

import contextlib
import difflib
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.base.headers import loads_json
from tokmill.base.inflate import CAT, MAGIC, head_of
from tokmill.builds.source import Hash, Item
from tokmill.store.schema import Array, Drop, Drops, drops_of
from tokmill.text.documents import DocumentSource
from tokmill.text.make_document import (
    Documents,
    FieldOptions,
    Paths,
    join_fields,
    join_lists,
    quoted,
    select,
)
from tokmill.text.record_blocks import BOM, Block, blank_lines, line_starts, record_blocks

LINES = 1000
"""Lines that are read, in at most `HEAD` bytes."""
HEAD = 1 << 22
DEEP = 8
"""Keys and lists in a path at most."""
SHOWN = 12
CHATS = "the lines are chats (the list {}): write them by a template (docs/chats.md)"


TOGETHER = (
    ("instruction", "input", "output"),
    ("instruction", "context", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("system_prompt", "question", "response"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
)
"""Keys that together make a document, in data sets of instructions and answers."""


class Seen(NamedTuple):
    """Path → number of lines with it: paths to text, and paths to other values.

    `lines`: number of objects that were read.
    """

    lines: int
    texts: Counter[str]
    others: Counter[str]

    def in_words(self) -> str:
        counts = [(count, path, "") for path, count in self.texts.items()]
        counts += [
            (count, path, ", no text") for path, count in self.others.items()
            if path not in self.texts
        ]  # fmt: skip
        counts.sort(key=lambda item: (bool(item[2]), -item[0], item[1]))
        shown = ", ".join(f"{path} ({count:,}{what})" for count, path, what in counts[:SHOWN])
        more = f" and {len(counts) - SHOWN} more" * (len(counts) > SHOWN)
        return f"the first {self.lines:,} lines have {shown or 'no keys'}{more}"

    def together(self) -> tuple[str, ...]:
        """Return the keys of instructions and answers that together make a document, or none."""
        return next((keys for keys in TOGETHER if self.texts.keys() >= {*keys}), ())

    def nearest(self, wanted: Sequence[str]) -> str:
        """Return the path to text that is most similar to a wanted one, or ""."""
        for name in wanted:
            # A key with a dot that must be quoted; the same key in a nested object; a similar name.
            same = [path for path in self.texts if path == quoted(name)]
            deeper = [p for p in self.texts if p.rpartition(".")[2] == name.rpartition(".")[2]]
            close = difflib.get_close_matches(name, list(self.texts), n=1, cutoff=0.5)
            for names in (same, deeper, close):
                if names:
                    return str(names[0])
        return self.texts.most_common(1)[0][0] if len(self.texts) == 1 else ""


def seen_keys(path: str) -> Seen:
    """Return the keys of the first lines of a JSON Lines file; invalid lines are ignored."""
    values = []
    for line in islice(_lines(path), LINES):
        with contextlib.suppress(ValueError):
            values.append(loads_json(line))
    return keys_of(values)


def keys_of(values: Iterable[Any]) -> Seen:
    lines, texts, others = 0, Counter[str](), Counter[str]()
    for value in values:
        if isinstance(value, dict):
            lines += 1
            ends = set(_ends(value, "", DEEP))
            texts.update(name for name, is_text in ends if is_text)
            others.update(name for name, is_text in ends if not is_text)
    return Seen(lines, texts, others)


def chat_key(seen: Seen) -> str:
    """Return the path of the messages if the lines are chats, else ""."""
    for path in seen.texts:
        if path.endswith(("[].role", "[].from")):
            return path.rpartition("[]")[0]
    return ""


def why_nothing(paths: Sequence[str], fields: Sequence[str]) -> str:
    """Return the hint for lines without text in any of the fields.

    It names the keys that the files have; "" if no line is an object, or a line has text in one of
    the fields.
    """
    for path in paths:
        try:
            if re.match(rb"\s*\[\s*\{", b"".join(islice(_lines(path), 3))):
                return (
                    "this is one JSON list, not JSON Lines; a command that converts it makes: "
                    f"{how_to_split(path)}"
                )
            seen = seen_keys(path)
        except (OSError, TokmillError):
            continue
        if not seen.lines or any(field in seen.texts for field in fields):
            continue
        if key := chat_key(seen):
            return CHATS.format(key)
        several, near = seen.together(), seen.nearest(fields)
        if several:
            near = " --field ".join(map(shlex.quote, several))
            choose = f"--field {near} makes one document of them; "
        else:
            choose = f"--field {shlex.quote(near)}? " if near else "name yours with --field: "
        named = " or ".join(map(repr, fields))
        return f"no line has text in {named}: {choose}{seen.in_words()}"
    return ""


def how_to_split(path: str) -> str:
    """Return the command that converts a file with one JSON list to JSON Lines."""
    read = CAT.get(Path(path).suffix, "")
    name = (path.removesuffix(Path(path).suffix) if read else path).removesuffix(".json")
    lines_file = shlex.quote(f"{name}.jsonl" if f"{name}.jsonl" != path else f"{name}.lines.jsonl")
    given = f"{read} {shlex.quote(path)} | " if read else ""
    taken = "" if read else f" < {shlex.quote(path)}"
    each = "print(json.dumps(entry)) for entry in json.load(sys.stdin)"
    return f"{given}python3 -c 'import json, sys; [{each}]'{taken} > {lines_file}"


def _lines(path: str) -> Iterator[bytes]:
    yield from head_of(path, HEAD).removeprefix(BOM).split(b"\n")


def _ends(value: Any, path: str, deep: int) -> Iterator[tuple[str, bool]]:
    if isinstance(value, dict) and value and deep:
        for key, inner in islice(value.items(), 100):
            yield from _ends(inner, f"{path}.{quoted(key)}" if path else quoted(key), deep - 1)
    elif isinstance(value, list) and value and deep:
        for inner in islice(value, 20):
            yield from _ends(inner, f"{path}[]", deep - 1)
    else:
        yield path, isinstance(value, str)


OPEN, CLOSE = 123, 125


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

    def prepare(self) -> None:
        self.paths = Paths(self.config.fields, self.config.keep)
        self.decoder = self.paths.decoder

    @classmethod
    def why_nothing(cls, config: JsonlConfig, paths: Sequence[str]) -> str:
        """Return a hint if no line of the files makes a record, or very few do."""
        return why_nothing(paths, config.fields)

    def documents(self, item: Item, digest: Hash) -> Iterator[Documents]:
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
        starts = line_starts(data)
        records = self._all(data, starts)
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
            records = self._all(data, line_starts(data)) if data else []
        if records is None:
            records, kept, refused = self._line_by_line(data)
            drops += drops_of(
                Drop(base + place, reason, True)
                for place, reason in zip(starts[~kept].tolist(), refused, strict=True)
            )
            starts = starts[kept]
        return records, starts + base, drops

    def _all(self, data: bytes, starts: Array) -> list[Any] | None:
        """Return the records if no line is blank or refused, else None."""
        flat = np.frombuffer(data, np.uint8)
        # `decode_lines` alone would accept two records on a line, or one over two lines.
        if (flat[starts] == OPEN).all() and (flat[starts[1:] - 2] == CLOSE).all():
            try:
                records = self.decoder.decode_lines(data)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                records = []
            if len(records) == len(starts):
                return records
        return None

    def _line_by_line(self, data: bytes) -> tuple[list[Any], Array, list[str]]:
        """Return the records, which lines they are (bool, one per line), reasons of the others."""
        records: list[Any] = []
        kept: list[bool] = []
        refused: list[str] = []
        for line in data.removesuffix(b"\n").split(b"\n"):
            try:
                records.append(self.decoder.decode(line.strip()))
                kept.append(True)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                record = self._with_nan(line)
                kept.append(record is not None)
                if record is None:
                    refused.append(refusal(line.strip(), error))
                else:
                    records.append(record)
        return records, np.array(kept, bool), refused

    def _with_nan(self, line: bytes) -> Any:
        """Return the record of a line with NaN or Infinity, which are not JSON; None: it has none.

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


def refusal(line: bytes, error: Exception) -> str:
    """Return why a line was refused: type, utf8, surrogate, nan, depth or json."""
    if isinstance(error, RecursionError):
        return "depth"
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return "utf8"
    constants: list[str] = []
    try:
        value = json.loads(text, parse_constant=constants.append)
    except RecursionError:
        return "depth"
    except ValueError:
        return "json"
    if constants:
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
