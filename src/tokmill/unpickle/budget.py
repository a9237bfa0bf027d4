"""A limit on the memory and time that a pickle may cost."""

from __future__ import annotations

from pathlib import Path

from tokmill.errors import TokmillError

SPARE = 256 << 20
"""Bytes that any file may cost."""
TIMES = 16
"""More bytes for each byte of the file."""


class Budget:
    """Counts the bytes that are made from a pickle.

    A reference to an earlier value takes a few bytes in a pickle, however large the value is. Code
    that copies or counts the content of values must call `take` first, so that a small file cannot
    use up all memory or time.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.left = SPARE + TIMES * size

    def take(self, size: int) -> None:
        """Use some of the budget; raises `TokmillError` if it is used up."""
        self.left -= size
        if self.left < 0:
            raise TokmillError(
                "the pickle makes far more data than its size allows",
                where=str(self.path),
                hint="it is damaged, or was made to fill the memory of its readers",
            )
