"""The argument of recognisers, and helpers that several of them use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokmill.base.errors import shell_word
from tokmill.base.files import reading
from tokmill.base.headers import loads_json

HEAD = 1 << 16
MAX_JSON = 256 << 20
"""Larger JSON files are not read for a description."""
ENTRIES = 3
"""Entries of a pickle that are shown by default."""
SHOWN = 300
"""Characters of a text that are shown."""

Facts = dict[str, Any]


@dataclass(frozen=True)
class Look:
    """A file or folder to recognise: its path, its first bytes and its size."""

    path: Path
    head: bytes = b""
    size: int = 0
    json: Any = field(default=None)
    """Content of a file that is one JSON value, read once for all recognisers."""
    entries: int = ENTRIES
    """Number of entries of a pickle to show."""
    quiet: bool = True
    """Whether no progress is shown while a long file is read."""

    @property
    def quoted(self) -> str:
        return shell_word(self.path)

    @property
    def suffix(self) -> str:
        """The last suffix in small letters, with its dot."""
        return self.path.suffix.lower()


Recogniser = Callable[[Look], Facts | None]
"""Returns facts (`kind` and `what` first), or None for a file or folder of another kind."""


def open_look(path: Path) -> Look:
    """Read the beginning of a file, and all of it if it may be a JSON value."""
    with reading(path) as handle:
        head = handle.read(HEAD)
        size = handle.seek(0, 2)
        value = None
        if head.lstrip()[:1] in (b"{", b"[") and size <= MAX_JSON:
            handle.seek(0)
            try:
                value = loads_json(handle.read())
            except ValueError:
                value = None
    return Look(path, head, size, value)


def tail(look: Look, size: int = 1) -> bytes:
    with reading(look.path) as handle:
        handle.seek(max(0, look.size - size))
        return handle.read(size)


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that are distinct."""
    parts = [path.absolute().parts for path in paths]
    for deep in range(1, max(map(len, parts), default=1) + 1):
        ends = ["/".join(p[-deep:]) for p in parts]
        if len(set(ends)) == len(set(parts)):
            return ends
    return [str(path) for path in paths]


def shorten(value: Any, most: int = SHOWN) -> Any:
    """Return a value with long strings and lists cut, for showing."""
    if isinstance(value, str):
        left = len(value) - most
        return value if left <= 0 else f"{value[:most]}… ({left:,} more characters)"
    if isinstance(value, dict):
        return {key: shorten(inner, most) for key, inner in value.items()}
    if isinstance(value, list):
        short = [shorten(inner, most) for inner in value[:20]]
        return short if len(value) <= 20 else [*short, f"… ({len(value) - 20:,} more)"]
    return value
