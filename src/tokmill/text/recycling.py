"""Decide, by measured memory, when an engine with a growing cache must be replaced.

gigatoken keeps every word that it has met (releases up to 0.10 have no limit). For source code the
cache is worth its memory: words repeat, and after 400 MB it has about 80 MiB. For text whose words
do not repeat it grows by 10 bytes for each byte of text, and slows the engine down.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable

START = 20 << 20
"""Bytes by which an engine may always grow."""
YOUNG = 4 << 20
"""Bytes of text up to which memory is measured often: a table that doubles needs three times its
size meanwhile."""
OFTEN = 512 << 10
SELDOM = 4 << 20
EACH = 1.0
"""More bytes of growth for each byte of text: source code needs less, random words need ten."""
MOST = 128 << 20
"""Bytes of growth after which an engine is always replaced."""


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 if the system does not state it."""
    try:
        with open("/proc/self/statm", "rb", 0) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def give_back_memory() -> None:
    """Return freed memory to the system, if the C library can do that (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class Growth:
    """Follows the memory of the process while one engine encodes.

    Other growth of the process counts too. At worst an engine is replaced too early, which costs
    some milliseconds and an empty cache.
    """

    def __init__(self, resident: Callable[[], int] = resident_bytes) -> None:
        self.resident = resident
        self.start_again()

    def start_again(self) -> None:
        """Forget the past: the engine is new."""
        self._base: int | None = None
        self._bytes = 0

    @property
    def step(self) -> int:
        """Bytes of text to encode before the next measurement, about."""
        return OFTEN if self._bytes < YOUNG else SELDOM

    def too_large(self, encoded: int) -> bool:
        """Say whether to replace the engine, after `encoded` more bytes of text."""
        now = self.resident()
        self._bytes += encoded
        if self._base is None:
            # The tables that an engine makes for its first text are no growth.
            self._base = now
            return False
        self._base = min(self._base, now)
        return now - self._base > min(START + EACH * self._bytes, MOST)
