"""How much may be made of a file before it is too much to be meant well."""

from __future__ import annotations

from pathlib import Path

from tokmill.errors import TokmillError

SPARE = 256 << 20
"""Bytes that may be made of a small file."""
TIMES = 16
"""Bytes that may be made of each byte of a file, beside these."""


class Budget:
    """Counts down what is made of a pickle, in bytes.

    A value that a pickle refers to again costs it a few bytes, whatever the value holds. Whoever
    copies or counts what values hold asks here first, so that a small file cannot take all memory
    or time.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.left = SPARE + TIMES * size

    def take(self, size: int) -> None:
        """Use up budget; raises `TokmillError` where there is no more."""
        self.left -= size
        if self.left < 0:
            raise TokmillError(
                "the pickle makes far more than it holds",
                where=str(self.path),
                hint="it is damaged, or made to fill the memory of who opens it",
            )
