"""The keys that the lines of a file have, for errors about missing fields."""

from __future__ import annotations

import difflib
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tokmill.base.errors import TokmillError
from tokmill.base.headers import loads_json
from tokmill.base.inflate import CAT, inflate
from tokmill.text.make_document import quoted
from tokmill.text.record_blocks import is_stream

LINES = 1000
"""Lines that are read, in at most `HEAD` bytes."""
HEAD = 1 << 22
DEEP = 8
"""Keys and lists in a path at most."""
SHOWN = 12
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
        """Return the keys with counts, the most frequent first."""
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
    """Return the keys of the first lines of a JSON Lines file; invalid lines are ignored.

    Raises `TokmillError` if the file cannot be decompressed.
    """
    lines, texts, others = 0, Counter[str](), Counter[str]()
    for line in islice(_lines(path), LINES):
        try:
            value = loads_json(line)
        except ValueError:
            continue
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
            if is_list(path):
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
            return f"the lines are chats (the list {key}): build them with `tokmill build chat`"
        several, near = seen.together(), seen.nearest(fields)
        if several:
            near = " --field ".join(map(_shell, several))
            choose = f"--field {near} makes one document of them; "
        else:
            choose = f"--field {_shell(near)}? " if near else "name yours with --field: "
        named = " or ".join(map(repr, fields))
        return f"no line has text in {named}: {choose}{seen.in_words()}"
    return ""


def is_list(path: str) -> bool:
    """Return whether a file begins like one JSON list of objects."""
    head = b"".join(islice(_lines(path), 3))
    return re.match(rb"\s*\[\s*\{", head) is not None


def how_to_split(path: str) -> str:
    """Return the command that converts a file with one JSON list to JSON Lines."""
    read = CAT.get(Path(path).suffix, "")
    name = (path.removesuffix(Path(path).suffix) if read else path).removesuffix(".json")
    lines_file = shlex.quote(f"{name}.jsonl" if f"{name}.jsonl" != path else f"{name}.lines.jsonl")
    given = f"{read} {shlex.quote(path)} | " if read else ""
    taken = "" if read else f" < {shlex.quote(path)}"
    each = "print(json.dumps(entry)) for entry in json.load(sys.stdin)"
    return f"{given}python3 -c 'import json, sys; [{each}]'{taken} > {lines_file}"


def _shell(path: str) -> str:
    return path if path.replace(".", "").replace("_", "").isalnum() else f"'{path}'"


def _lines(path: str) -> Iterator[bytes]:
    if is_stream(path):
        head = b""
        for chunk in inflate(path):
            head += chunk
            if len(head) >= HEAD:
                break
    else:
        with open(path, "rb") as file:
            head = file.read(HEAD)
    yield from head.removeprefix(b"\xef\xbb\xbf").split(b"\n")


def _ends(value: Any, path: str, deep: int) -> Iterator[tuple[str, bool]]:
    if isinstance(value, dict) and value and deep:
        for key, inner in islice(value.items(), 100):
            yield from _ends(inner, f"{path}.{quoted(key)}" if path else quoted(key), deep - 1)
    elif isinstance(value, list) and value and deep:
        for inner in islice(value, 20):
            yield from _ends(inner, f"{path}[]", deep - 1)
    else:
        yield path, isinstance(value, str)
