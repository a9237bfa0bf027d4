"""What a reader of files is to the harness: a line of the table."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Make = Callable[[Path], Iterable[Path]]
"""Writes good files into a folder and returns those that are to be damaged."""
Read = Callable[[Path], Any]
"""Reads what `Make` wrote in the folder, all of it, and returns something to compare."""


@dataclass(frozen=True)
class Reader:
    """A line of the table."""

    make: Make
    read: Read
    digests: bool = False
    source: str = ""
    """The kind of source in `plugins` that is read."""
    export: str = ""
    """The export in `plugins` whose folder is read."""
    share: float = 1
    """Share of the mutations that it gets, where one takes longer."""
    restore: Callable[[Path, Path], None] | None = None
    """Puts back what reading may have changed: (folder, good folder)."""
