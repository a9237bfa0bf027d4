"""Prompts from a file, one in each line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from tokmill.base.errors import UsageError
from tokmill.base.files import machine_errors
from tokmill.inference.coders import parse_ids

LONGEST = 1 << 24
"""Largest line in bytes: a file without line ends is not a list of prompts."""


@dataclass
class Prompts:
    """The prompts of a file, in its order: texts, or with `as_ids` ids such as 1,2,3."""

    path: str
    """Path of the file; - is stdin."""
    as_ids: bool = False
    blank: int = field(default=0, init=False)
    """Number of blank lines so far, which are skipped."""
    taken: list[Any] = field(default_factory=list, init=False)
    """The prompts so far, as in the file."""

    def __iter__(self) -> Iterator[str | list[int]]:
        """Yield text or ids; raises `UsageError` for a line that has neither."""
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
                prompt = parse_ids(text, where) if self.as_ids else text
                self.taken.append(prompt)
                yield prompt

    def _open(self) -> contextlib.AbstractContextManager[IO[bytes]]:
        if self.path == "-":
            return contextlib.nullcontext(sys.stdin.buffer)
        with machine_errors("read", self.path):
            return open(self.path, "rb")
