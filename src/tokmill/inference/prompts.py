"""Prompts from a file: a text in each line, or JSON Lines."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tokmill.base.errors import UsageError, nearest
from tokmill.base.files import machine_errors
from tokmill.base.headers import loads_json
from tokmill.inference.coders import parse_ids

LONGEST = 1 << 24
"""Largest line in bytes: a file without line ends is not a list of prompts."""
JSON_SUFFIXES = (".jsonl", ".ndjson")


@dataclass
class Prompts:
    """The prompts of a file, in its order.

    A line of a text file is a prompt; with `as_ids` it has ids such as 1,2,3. A line of JSON Lines
    (by the suffix, or `as_json`) is a string, a list of ids, or an object with one of these under
    `key`.
    """

    path: str
    """Path of the file; - is stdin."""
    as_json: bool = False
    as_ids: bool = False
    key: str = "prompt"
    blank: int = field(default=0, init=False)
    """Number of blank lines so far, which are skipped."""
    taken: list[Any] = field(default_factory=list, init=False)
    """The prompts so far, as in the file."""

    def __iter__(self) -> Iterator[str | list[int]]:
        """Yield text or ids; raises `UsageError` for a line that has neither."""
        json = self.as_json or Path(self.path).suffix in JSON_SUFFIXES
        with self._open() as file:
            number = 0
            while line := file.readline(LONGEST + 1):
                number += 1
                where = f"{self.path}:{number}"
                if len(line) > LONGEST:
                    raise UsageError(
                        f"a line has more than {LONGEST:,} bytes",
                        where=where,
                        hint="write one prompt in each line",
                    )
                try:
                    text = line.decode().rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise UsageError(
                        f"the line is not UTF-8: byte {error.start} is 0x{line[error.start]:02x}",
                        where=where,
                        hint="convert it first, as with iconv -t UTF-8",
                    ) from None
                if not text.strip():
                    self.blank += 1
                    continue
                prompt = self._of_json(text, where) if json else text
                if self.as_ids and isinstance(prompt, str):
                    prompt = parse_ids(prompt, where)
                self.taken.append(prompt)
                yield prompt

    def _open(self) -> contextlib.AbstractContextManager[IO[bytes]]:
        if self.path == "-":
            return contextlib.nullcontext(sys.stdin.buffer)
        with machine_errors("read", self.path):
            return open(self.path, "rb")

    def _of_json(self, text: str, where: str) -> str | list[int]:
        try:
            value = loads_json(text)
        except ValueError as error:
            raise UsageError(
                f"the line is not JSON: {error}",
                where=where,
                hint="for lines of plain text, leave --jsonl out and use another suffix",
            ) from None
        if isinstance(value, dict):
            if self.key not in value:
                keys = ", ".join(map(repr, value)) or "none"
                raise UsageError(
                    f"the object has no key {self.key!r}; its keys: {keys[:200]}",
                    where=where,
                    hint=f"name it with --field; {nearest(self.key, value)}",
                )
            value = value[self.key]
        ids = isinstance(value, list) and all(type(number) is int for number in value)
        if not isinstance(value, str) and not (ids and value):
            raise UsageError(
                "a prompt is a text or a list of ids",
                where=where,
                hint='such as {"prompt": "The function"}',
            )
        return value
